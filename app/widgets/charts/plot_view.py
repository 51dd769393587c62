"""The pyqtgraph view of a plot: axes in our fonts and colours, curves, bands, marks, the current step, and the pointer.

Curves are downsampled to the width in pixels before they reach pyqtgraph, peaks kept, so 100,000 steps cost as much as
2,000; where many steps share a pixel, the line is their mean, and their extremes are faint behind it. The vertical wheel is left to the page. Dragging selects a range of steps; dragging with Shift or the middle button, and the
horizontal wheel, move it; the wheel with Ctrl widens or narrows it; a double click shows all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import QPointF, QRectF, Qt, Signal
from PySide6.QtGui import QMouseEvent, QPainter, QPen, QResizeEvent, QWheelEvent
from PySide6.QtWidgets import QGraphicsGridLayout, QToolTip

from app import theme
from app.state.run_state import Mark
from app.widgets.basic.number_format import THIN, display_unit, duration, figure, ticks
from app.widgets.charts.curves import axis_range, downsample, envelope, exponential_average, means
from app.widgets.charts.mark_painter import CurveItems, MarkPainter, faint

# The two axes of a plot: values with short labels, linear or logarithmic, and steps or working time.

OVERHANG = 10
"""How far a tick label may reach beyond the end of its axis."""
_SMALL = 1e-2
"""Below this the power of ten is written once, in the title: labels such as 4.5e−4 would run into it."""
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class ValueAxis(pg.AxisItem):
    """The value axis: short labels, shares in percent, the unit chosen by the largest value."""

    def __init__(self, title: str, unit: str) -> None:
        super().__init__("left")
        self._title, self._unit = title, unit
        self._factor = 1.0
        self._is_log = False

    def set_scale_of(self, largest: float, *, log: bool) -> None:
        """Choose unit and power of ten for values up to `largest`. On a logarithmic axis the view's values are the logarithms to
        the base of 10, and labels are the values themselves."""
        factor, unit = display_unit(self._unit, largest)
        title = unit if self._title == self._unit else self._title
        power = 0
        if not log and 0 < largest * factor < _SMALL:
            power = math.floor(math.log10(largest * factor))
            title = f"{title}, 10{str(power).translate(_SUPERSCRIPT)}"
        self._factor, self._is_log = factor / 10**power, log
        if title != self.labelText:
            self.setLabel(title, **self.labelStyle)

    @property
    def untouched_title(self) -> str:
        """The title at first, before a unit or a power of ten was chosen."""
        return self._title

    def boundingRect(self) -> QRectF:
        # With a grid, pyqtgraph's rectangle has no space for half of the lowest and the highest label, and drops both.
        return super().boundingRect().adjusted(0, -OVERHANG, 0, OVERHANG)

    def tickValues(self, minVal: float, maxVal: float, size: float) -> list[tuple[float, list[float]]]:
        if self._is_log:
            return [(1.0, log_ticks(minVal, maxVal, most=max(2, int(size / 24))))]
        return super().tickValues(minVal, maxVal, size)

    def tickStrings(self, values: Sequence[float], scale: float, spacing: float) -> list[str]:
        if self._is_log:
            return [_log_label(10**value * self._factor) for value in values]
        # Rounded to multiples of the spacing: pyqtgraph's values carry float error, and 0.30000000000000004 is no label.
        return ticks([float(f"{round(value / spacing) * spacing * self._factor:.6g}") for value in values])


_TIME_SPACINGS = (
    1,
    2,
    5,
    10,
    15,
    30,
    *(60 * n for n in (1, 2, 5, 10, 15, 30)),
    *(3600 * n for n in (1, 2, 3, 6, 12)),
    86_400,
)
"""Seconds between ticks that are round on a clock; beyond the last, whole days."""
_TIME_LABEL = 75
"""Width in pixels that a label such as “2 h 05 min” needs."""


class StepAxis(pg.AxisItem):
    """The horizontal axis: whole numbers, of steps or of what else a comparison counts; with `is_time` seconds, whose ticks are round on a
    clock and labelled as durations."""

    is_time = False

    def tickSpacing(self, minVal: float, maxVal: float, size: float) -> list[tuple[float, float]]:
        if self.is_time:
            least = (maxVal - minVal) * _TIME_LABEL / max(size, _TIME_LABEL)
            return [(next((n for n in _TIME_SPACINGS if n >= least), 86_400 * math.ceil(least / 86_400)), 0)]
        levels = super().tickSpacing(minVal, maxVal, size) or []
        return [(max(1.0, spacing), 0) for spacing, _ in levels[:1]]

    def tickStrings(self, values: Sequence[float], scale: float, spacing: float) -> list[str]:
        if self.is_time:
            return [_clock_label(float(value)) for value in values]
        return [f"{value:,.0f}" for value in values]


def _clock_label(seconds: float) -> str:
    """A duration without a part that is 0: “0”, “30 s”, “5 min”, “2 h”, “1 h 30 min”."""
    if seconds <= 0:
        return "0"
    text = duration(seconds)
    for zero in (f" 00{THIN}s", f" 00{THIN}min", f" 0{THIN}h"):
        text = text.removesuffix(zero)
    return text


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` ticks between the logarithms `low` and `high`: powers of ten, every second or third of them where there are
    many, and 2 and 5 times powers of ten where there are few."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    inside = [float(power) for power in decades if low <= power <= high]
    if len(inside) >= 3 or high - low > 3:
        return inside[:: -(-len(inside) // most)]
    fine = [power + math.log10(times) for power in decades for times in (1, 2, 5)]
    fine = [tick for tick in fine if low <= tick <= high]
    if len(fine) < 2:  # less than a factor of two: ticks at round values, unevenly spaced
        step = (high - low) / 3
        return [low + step * i for i in (0.5, 1.5, 2.5)]
    return fine if len(fine) <= most else inside or fine[:: -(-len(fine) // most)]


def _log_label(value: float) -> str:
    if not 1e-3 <= value < 1e5:
        mantissa, _, exponent = f"{value:.0e}".partition("e")
        power = f"10{str(int(exponent)).translate(_SUPERSCRIPT)}"
        return power if mantissa == "1" else f"{mantissa}·{power}"
    return f"{value:,.3g}" if value < 1000 else figure(value)


# ── plot view ────────────────────────────────────────────────────────────────────────────────────────────────────────

SHORT_CURVES = 600
"""Plots with fewer points in total are drawn thicker and antialiased; for long curves that costs twenty times as much."""
LEFT_AXIS = 64
"""Width of the value axis: the same in every plot, so that the plots of a column line up."""
BOTTOM_AXIS = 34
NEAR = 24.0
"""How many pixels above or below a curve a click still means its point."""
WHEEL_ZOOM = 0.85
"""By how much one notch of the wheel narrows the range."""

Span = tuple[float, float]


class CurveData(Protocol):
    """The data of a curve; `app.widgets.charts.plot.Trace` has it."""

    @property
    def pen(self) -> QPen: ...
    @property
    def x(self) -> np.ndarray: ...
    @property
    def y(self) -> np.ndarray: ...
    @property
    def low(self) -> np.ndarray | None: ...
    @property
    def high(self) -> np.ndarray | None: ...
    @property
    def stacked(self) -> bool: ...


class PlotView(pg.GraphicsView):
    """Two axes and a ViewBox with curves.

    Not a pyqtgraph PlotItem: that brings some fifty widgets for a context menu that we do not show, and each of them
    would be polished again when the theme changes.

    Signals:
        hovered(x as float) – the pointer moved to this position on the step axis.
        point_clicked(x as float) – a point of a curve was clicked.
        span_chosen((first, last), or None) – a range of steps was chosen, or all of them.
    """

    hovered = Signal(object)
    point_clicked = Signal(float)
    span_chosen = Signal(object)

    def __init__(self, axis: str, unit: str) -> None:
        super().__init__()
        self._value_axis, self._step_axis = ValueAxis(axis, unit), StepAxis("bottom")
        self.box: Any = pg.ViewBox(enableMouse=False, enableMenu=False)  # Any: pyqtgraph's annotations are not complete
        self._unit, self._step_title = unit, "step"
        self._step_text: Callable[[int], str] = str
        self._curves: list[CurveItems] = []
        self._marks = MarkPainter()
        self._shown: Span = (0.0, 1.0)
        self._drag_start: float | None = None
        self._pan_start: float | None = None
        self._step_line = pg.InfiniteLine(angle=90)
        self._selection = pg.LinearRegionItem(movable=False)
        self._lay_out()
        self._set_up()
        self.restyle()

    def _lay_out(self) -> None:
        content, grid = pg.GraphicsWidget(), QGraphicsGridLayout()
        grid.setContentsMargins(0, 6, OVERHANG, 0)
        grid.setSpacing(0)
        for item, row, column in ((self._value_axis, 0, 0), (self.box, 0, 1), (self._step_axis, 1, 1)):
            grid.addItem(item, row, column)
        grid.setRowStretchFactor(0, 1)
        grid.setColumnStretchFactor(1, 1)
        content.setLayout(grid)
        self.setCentralItem(content)
        for axis in (self._value_axis, self._step_axis):
            axis.linkToView(self.box)

    def _set_up(self) -> None:
        self.box.disableAutoRange()
        self._value_axis.setWidth(theme.scaled(LEFT_AXIS))
        self._value_axis.setStyle(tickLength=0, tickTextOffset=6, maxTickLevel=0, hideOverlappingLabels=False)
        self._step_axis.setStyle(tickLength=0, tickTextOffset=5, maxTickLevel=0, hideOverlappingLabels=OVERHANG)
        self._value_axis.setGrid(255)
        self._value_axis.setZValue(self.box.zValue() - 1)  # it draws the grid lines, which belong below the curves
        self._step_axis.setHeight(theme.scaled(BOTTOM_AXIS))
        for item in (self._step_line, self._selection):
            item.setVisible(False)
            self.box.addItem(item, ignoreBounds=True)
        self.setFrameShape(self.Shape.NoFrame)
        self.setContextMenuPolicy(Qt.ContextMenuPolicy.NoContextMenu)  # events go on to the card, which has the menu
        for widget in (
            self,
            self.viewport(),
        ):  # the card around it takes the focus, also of a click, and handles the keys
            widget.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.setMouseTracking(True)

    def set_step_axis(self, title: str, text: Callable[[int], str], *, is_time: bool) -> None:
        """As `Plot.set_step_axis`."""
        self._step_text = text
        if title != self._step_title:
            self._step_title, self._step_axis.is_time = title, is_time
            self._step_axis.setLabel(title, **self._step_axis.labelStyle)

    def restyle(self) -> None:
        """Take the colours of the theme's current palette."""
        colours = theme.palette()
        self.setBackground(colours.plot_background)
        style: Any = {"color": colours.muted.name(), "font-size": f"{theme.scaled(theme.CAPTION)}px"}
        # The value axis keeps its label: it may say MB by now where its title says GB.
        titles = (
            (self._value_axis, self._value_axis.labelText or self._value_axis.untouched_title),
            (self._step_axis, self._step_title),
        )
        for axis, text in titles:
            axis.setPen(pg.mkPen(colours.grid if axis is self._step_axis else None))
            axis.setTextPen(pg.mkPen(colours.muted))
            axis.setTickFont(theme.figures_font(theme.CAPTION))
            axis.enableAutoSIPrefix(False)
            axis.setLabel(text, **style)
        self._value_axis.setTickPen(pg.mkPen(colours.grid))
        self._step_line.setPen(pg.mkPen(colours.muted, style=Qt.PenStyle.DotLine))
        self._selection.setBrush(faint(colours.accent, 40))
        for line in self._selection.lines:
            line.setPen(pg.mkPen(colours.accent))

    # ── drawing ─────────────────────────────────────────────────────────────────────────────────

    def draw(self, traces: Sequence[CurveData], span: Span | None, smoothing: float, *, log: bool = False) -> None:
        """Draw the traces over the range of steps `span`; None shows all steps. On a `log` axis values of 0 and below are gaps."""
        while len(self._curves) > len(traces):
            self._curves.pop().remove()
        while len(self._curves) < len(traces):
            self._curves.append(CurveItems(self.box))
        first, last = self._shown = span or _all_steps(traces)
        fine = sum(len(trace.x) for trace in traces) * (1 + (smoothing > 0)) < SHORT_CURVES
        columns: list[np.ndarray] = []
        for curve, trace in zip(self._curves, traces, strict=True):
            columns += self._draw_trace(curve, trace, (first, last), smoothing, fine=fine, log=log)
        margin = (last - first) * 0.01 or 0.5
        self.box.setXRange(first - margin, last + margin, padding=0)
        low, high = axis_range(*columns, unit=self._unit, log=log)
        self._value_axis.set_scale_of(10**high if log else max(abs(low), abs(high)), log=log)
        self.box.setYRange(low - (high - low) * 1e-4, high, padding=0)  # a tick right on the edge would be left out
        self._place_items()

    def _place_items(self) -> None:
        """Move the items now: pyqtgraph else does so inside the paint event, and everything is painted twice."""
        if self.sceneObj is not None:
            self.sceneObj.prepareForPaint()

    def resizeEvent(self, event: QResizeEvent | None) -> None:
        super().resizeEvent(event)
        self._place_items()

    def _draw_trace(
        self, curve: CurveItems, trace: CurveData, span: Span, smoothing: float, *, fine: bool, log: bool
    ) -> list[np.ndarray]:
        """Draw one trace; returns the columns that the value axis must contain."""
        # One point beyond either end, so that the line runs to the edge; smoothed first, with all of its past.
        start = max(0, int(np.searchsorted(trace.x, span[0])) - 1)
        end = int(np.searchsorted(trace.x, span[1], side="right")) + 1
        columns = [exponential_average(trace.y, smoothing)[start:end]]
        if smoothing > 0:
            columns.append(trace.y[start:end])
        low, high = (None if edge is None else edge[start:end] for edge in (trace.low, trace.high))
        edges = [] if low is None or high is None else [low, high]
        if log:
            # A band that reaches below 0 ends a decade below the curve: with a gap in one edge only, it would be drawn askew.
            floor = 0.1 * float(columns[0][columns[0] > 0].min(initial=1.0))
            columns, edges = logarithms(columns), logarithms([np.maximum(edge, floor) for edge in edges])
        most = 2 * max(200, self.width())
        x, y, *raw = downsample(trace.x[start:end], most, *columns)
        if not raw and len(x) < len(
            columns[0]
        ):  # many steps on a pixel: their extremes faint, and their mean as the line
            raw, y = [y], means(len(x), columns[0])
        band = envelope(trace.x[start:end], most // 2, *edges) if edges else None
        curve.draw(trace.pen, x, y, raw[0] if raw else None, band, fine=fine, area=trace.stacked)
        return [y, *raw, *(band[1:] if band else [])]

    def set_step(self, step: int | None) -> None:
        """Show the vertical line at a step; None hides it."""
        self._step_line.setVisible(step is not None)
        if step is not None:
            self._step_line.setValue(step)

    def set_marks(self, marks: Sequence[Mark]) -> None:
        """Paint these marks."""
        if self._marks.set_marks(marks):
            self.viewport().update()

    def drawForeground(self, painter: QPainter, rect: QRectF) -> None:
        super().drawForeground(painter, rect)
        self._marks.paint(painter, self.box.viewRange()[0], self.box.sceneBoundingRect())

    # ── pointer ─────────────────────────────────────────────────────────────────────────────────

    def _step_at(self, event: QMouseEvent | QWheelEvent) -> float:
        pos: QPointF = self.mapToScene(event.position().toPoint())
        return float(self.box.mapSceneToView(pos).x())

    def _is_near_curve(self, event: QMouseEvent) -> bool:
        """Whether a curve passes within NEAR pixels above or below the pointer."""
        pos = self.mapToScene(event.position().toPoint())
        step = float(self.box.mapSceneToView(pos).x())
        for curve in self._curves:
            x, y = curve.line.getData()
            if x is None or y is None or not len(x) or not self.box.sceneBoundingRect().contains(pos):
                continue
            i = min(int(np.searchsorted(x, step)), len(x) - 1)
            near = y[max(0, i - 1) : i + 1]
            tops = [self.box.mapViewToScene(QPointF(step, float(value))).y() for value in near if np.isfinite(value)]
            if tops and min(tops) - NEAR <= pos.y() <= max(tops) + NEAR:
                return True
        return False

    # None of these calls the base class: it would pass the event to pyqtgraph's items, which pan and zoom by themselves.

    def mousePressEvent(self, event: QMouseEvent) -> None:
        shift = bool(event.modifiers() & Qt.KeyboardModifier.ShiftModifier)
        if event.button() == Qt.MouseButton.MiddleButton or (event.button() == Qt.MouseButton.LeftButton and shift):
            self._pan_start = self._step_at(event)
        elif event.button() == Qt.MouseButton.LeftButton:
            self._drag_start = self._step_at(event)

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        step = self._step_at(event)
        if self._pan_start is not None:
            self._pan(self._pan_start - step)
        elif self._drag_start is not None and event.buttons() & Qt.MouseButton.LeftButton:
            self._selection.setRegion(sorted((self._drag_start, step)))
            self._selection.setVisible(abs(self._drag_start - step) >= 1)
        is_near = self._is_near_curve(event)
        self.setCursor(Qt.CursorShape.PointingHandCursor if is_near else Qt.CursorShape.ArrowCursor)
        pos = self.mapToScene(event.position().toPoint())
        lines = self._marks.sentences_near(
            self.box.viewRange()[0], self.box.sceneBoundingRect(), pos.x(), self._step_text
        )
        QToolTip.showText(event.globalPosition().toPoint(), "\n".join(lines), self)
        self.hovered.emit(step)

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        start, self._drag_start, self._pan_start = self._drag_start, None, None
        self._selection.setVisible(False)
        if start is None:
            return
        first, last = sorted((round(start), round(self._step_at(event))))
        if last - first >= 2:
            self.span_chosen.emit((float(first), float(last)))
        elif self._is_near_curve(event):
            self.point_clicked.emit(self._step_at(event))

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        self._drag_start = None
        self.span_chosen.emit(None)

    def wheelEvent(self, event: QWheelEvent) -> None:
        across, down = event.angleDelta().x(), event.angleDelta().y()
        first, last = self._shown
        if event.modifiers() & Qt.KeyboardModifier.ControlModifier and down:
            centre, factor = self._step_at(event), WHEEL_ZOOM ** (down / 120)
            self.span_chosen.emit((centre - (centre - first) * factor, centre + (last - centre) * factor))
        elif abs(across) > abs(down):
            self._pan(-across / 120 * (last - first) / 10)
        else:
            event.ignore()  # Qt then offers the event to the parent, and so to the scroll area of the page

    def _pan(self, steps: float) -> None:
        first, last = self._shown
        self.span_chosen.emit((first + steps, last + steps))


def _all_steps(traces: Sequence[CurveData]) -> Span:
    ends = [(float(trace.x[0]), float(trace.x[-1])) for trace in traces if len(trace.x)]
    first, last = min(start for start, _ in ends), max(end for _, end in ends)
    return (first, last) if last > first else (math.floor(first) - 1, first + 1)


def logarithms(columns: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The columns' logarithms to the base of 10; NaN for 0 and below."""
    return [np.log10(column, where=column > 0, out=np.full(len(column), np.nan)) for column in columns]
