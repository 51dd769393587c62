"""The pyqtgraph view of a plot: axes in our fonts and colours, curves, bands, the marked step, selecting a range.

Curves are downsampled to the width in pixels before they reach pyqtgraph, peaks kept, so 100,000 steps cost as much as
2,000. The wheel is left to the page; dragging selects a range of steps, a double click shows all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import QPointF, QRectF, Qt, Signal
from PySide6.QtGui import QColor, QMouseEvent, QPen, QWheelEvent
from PySide6.QtWidgets import QGraphicsGridLayout

from app import theme
from app.widgets.basic.number_format import display_unit, ticks
from app.widgets.charts.curves import axis_range, downsample, exponential_average, isolated_points

SHORT_CURVES = 600
"""Plots with fewer points in total are drawn thicker and antialiased; for long curves that costs twenty times as much."""
LEFT_AXIS = 64
"""Width of the value axis: the same in every plot, so that the plots of a column line up."""
BOTTOM_AXIS = 34
OVERHANG = 10
"""How far a tick label may reach beyond the end of its axis."""
BAND_ALPHA, RAW_ALPHA = 44, 80


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


class _ValueAxis(pg.AxisItem):
    """The value axis: short labels, shares in percent, the unit chosen by the largest value."""

    def __init__(self, title: str, unit: str) -> None:
        super().__init__("left")
        self._title, self._unit = title, unit
        self._factor = 1

    def set_largest(self, largest: float) -> None:
        """Choose the unit for values up to `largest`; an axis whose title is its unit is renamed with it."""
        self._factor, unit = display_unit(self._unit, largest)
        title = unit if self._title == self._unit else self._title
        if title != self.labelText:
            self.setLabel(title, **self.labelStyle)

    def boundingRect(self) -> QRectF:
        # With a grid, pyqtgraph's rectangle has no space for half of the lowest and the highest label, and drops both.
        return super().boundingRect().adjusted(0, -OVERHANG, 0, OVERHANG)

    def tickStrings(self, values: Sequence[float], scale: float, spacing: float) -> list[str]:
        # Rounded to multiples of the spacing: pyqtgraph's values carry float error, and 0.30000000000000004 is no label.
        return ticks([float(f"{round(value / spacing) * spacing * self._factor:.6g}") for value in values])


class _StepAxis(pg.AxisItem):
    """The step axis: tick spacing of at least 1, and labels without decimals."""

    def tickSpacing(self, minVal: float, maxVal: float, size: float) -> list[tuple[float, float]]:
        levels = super().tickSpacing(minVal, maxVal, size) or []
        return [(max(1.0, spacing), 0) for spacing, _ in levels[:1]]

    def tickStrings(self, values: Sequence[float], scale: float, spacing: float) -> list[str]:
        return [f"{value:,.0f}" for value in values]


class _CurveItems:
    """The graphics items of one trace: line, dots for isolated points, the faint raw line of a smoothed curve, band."""

    def __init__(self, view: Any) -> None:
        self._view = view
        self.raw, self.line = (pg.PlotCurveItem(connect="finite") for _ in range(2))
        self.dots = pg.ScatterPlotItem(size=4, pen=None)
        self.low, self.high = (pg.PlotCurveItem(connect="finite", pen=None) for _ in range(2))
        self.band = pg.FillBetweenItem(self.low, self.high)
        self.band.setZValue(-10)
        self.raw.setZValue(-5)
        self._items = (self.band, self.raw, self.line, self.dots)
        for item in self._items:
            view.addItem(item, ignoreBounds=True)  # the range is set by us; pyqtgraph need not ask for bounds

    def remove(self) -> None:
        for item in self._items:
            self._view.removeItem(item)

    def draw(self, pen: QPen, x: np.ndarray, y: np.ndarray, raw: np.ndarray | None, edges: Any, fine: bool) -> None:
        pen = QPen(pen)
        pen.setCosmetic(True)  # the width is in pixels, not in steps
        pen.setWidthF(1.6 if fine else 1)
        self.line.setData(x, y, pen=pen, antialias=fine)
        isolated = isolated_points(y)
        self.dots.setData(x[isolated], y[isolated], brush=pen.color())
        if raw is None:
            self.raw.clear()
        else:
            self.raw.setData(x, raw, pen=pg.mkPen(_faint(pen.color(), RAW_ALPHA)), antialias=fine)
        self._draw_band(pen.color(), x, edges)

    def _draw_band(self, colour: QColor, x: np.ndarray, edges: Any) -> None:
        self.band.setVisible(edges is not None)
        if edges is not None:
            self.band.setBrush(_faint(colour, BAND_ALPHA))
            self.low.setData(x, edges[0])
            self.high.setData(x, edges[1])


class PlotView(pg.GraphicsView):
    """Two axes and a ViewBox with curves.

    Not a pyqtgraph PlotItem: that brings some fifty widgets for a context menu that we do not show, and each of them
    would be polished again when the theme changes.

    Signals:
        hovered(x as float) – the pointer moved to this position on the step axis.
        span_chosen((first, last), or None) – a range of steps was selected by dragging, or all by a double click.
    """

    hovered = Signal(object)
    span_chosen = Signal(object)

    def __init__(self, axis: str, unit: str) -> None:
        super().__init__()
        self._value_axis, self._step_axis = _ValueAxis(axis, unit), _StepAxis("bottom")
        self.box: Any = pg.ViewBox(enableMouse=False, enableMenu=False)  # Any: pyqtgraph's annotations are not complete
        self._axis_title = axis
        self._curves: list[_CurveItems] = []
        self._drag_start: float | None = None
        self._mark = pg.InfiniteLine(angle=90)
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
        self._value_axis.setZValue(-1)  # pyqtgraph draws the grid over the curves
        self._step_axis.setHeight(theme.scaled(BOTTOM_AXIS))
        for item in (self._mark, self._selection):
            item.setVisible(False)
            self.box.addItem(item, ignoreBounds=True)
        self.setFrameShape(self.Shape.NoFrame)
        self.setContextMenuPolicy(Qt.ContextMenuPolicy.NoContextMenu)  # events go on to the card, which has the menu
        self.setFocusPolicy(Qt.FocusPolicy.ClickFocus)
        self.setMouseTracking(True)

    def restyle(self) -> None:
        """Take the colours of the theme's current palette."""
        colours = theme.palette()
        self.setBackground(colours.plot_background)
        style: Any = {"color": colours.muted.name(), "font-size": f"{theme.scaled(theme.CAPTION)}px"}
        # The value axis keeps its label: it may say MB by now where its title says GB.
        titles = ((self._value_axis, self._value_axis.labelText or self._axis_title), (self._step_axis, "step"))
        for axis, text in titles:
            axis.setPen(pg.mkPen(colours.grid if axis is self._step_axis else None))
            axis.setTextPen(pg.mkPen(colours.muted))
            axis.setTickFont(theme.figures_font(theme.CAPTION))
            axis.enableAutoSIPrefix(False)
            axis.setLabel(text, **style)
        self._value_axis.setTickPen(pg.mkPen(colours.grid))
        self._mark.setPen(pg.mkPen(colours.muted, style=Qt.PenStyle.DotLine))
        self._selection.setBrush(_faint(colours.accent, 40))
        for line in self._selection.lines:
            line.setPen(pg.mkPen(colours.accent))

    # ── drawing ─────────────────────────────────────────────────────────────────────────────────

    def draw(self, traces: Sequence[CurveData], span: tuple[float, float] | None, smoothing: float) -> None:
        """Draw the traces over the range of steps `span`; None shows all steps."""
        while len(self._curves) > len(traces):
            self._curves.pop().remove()
        while len(self._curves) < len(traces):
            self._curves.append(_CurveItems(self.box))
        first, last = span or _all_steps(traces)
        fine = sum(len(trace.x) for trace in traces) * (1 + (smoothing > 0)) < SHORT_CURVES
        columns: list[np.ndarray] = []
        for curve, trace in zip(self._curves, traces, strict=True):
            columns += self._draw_trace(curve, trace, (first, last), smoothing, fine)
        margin = (last - first) * 0.01 or 0.5
        self.box.setXRange(first - margin, last + margin, padding=0)
        low, high = axis_range(*columns)
        self._value_axis.set_largest(max(abs(low), abs(high)))
        self.box.setYRange(low - (high - low) * 1e-4, high, padding=0)  # a tick right on the edge would be left out

    def _draw_trace(
        self, curve: _CurveItems, trace: CurveData, span: tuple[float, float], smoothing: float, fine: bool
    ) -> list[np.ndarray]:
        """Draw one trace; returns the columns that the value axis must contain."""
        # One point beyond either end, so that the line runs to the edge; smoothed first, with all of its past.
        start = max(0, int(np.searchsorted(trace.x, span[0])) - 1)
        end = int(np.searchsorted(trace.x, span[1], side="right")) + 1
        columns = [exponential_average(trace.y, smoothing)[start:end]]
        if smoothing > 0:
            columns.append(trace.y[start:end])
        has_band = trace.low is not None and trace.high is not None
        if has_band:
            columns += [trace.low[start:end], trace.high[start:end]]  # pyright: ignore[reportOptionalSubscript]
        x, y, *more = downsample(trace.x[start:end], 2 * max(200, self.width()), *columns)
        raw = more.pop(0) if smoothing > 0 else None
        curve.draw(trace.pen, x, y, raw, more if has_band else None, fine)
        return [y, *([raw] if raw is not None else []), *more]

    def mark(self, step: int | None) -> None:
        """Show the vertical line at a step; None hides it."""
        self._mark.setVisible(step is not None)
        if step is not None:
            self._mark.setValue(step)

    # ── pointer ─────────────────────────────────────────────────────────────────────────────────

    def _step_at(self, event: QMouseEvent) -> float:
        pos: QPointF = self.mapToScene(event.position().toPoint())
        return float(self.box.mapSceneToView(pos).x())

    # None of these calls the base class: it would pass the event to pyqtgraph's items, which pan and zoom by themselves.

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if event.button() == Qt.MouseButton.LeftButton:
            self._drag_start = self._step_at(event)

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        step = self._step_at(event)
        if self._drag_start is not None and event.buttons() & Qt.MouseButton.LeftButton:
            self._selection.setRegion(sorted((self._drag_start, step)))
            self._selection.setVisible(abs(self._drag_start - step) >= 1)
        self.hovered.emit(step)

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        start, self._drag_start = self._drag_start, None
        self._selection.setVisible(False)
        if start is not None:
            first, last = sorted((round(start), round(self._step_at(event))))
            if last - first >= 2:
                self.span_chosen.emit((float(first), float(last)))

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        self._drag_start = None
        self.span_chosen.emit(None)

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()  # Qt then offers the event to the parent, and so to the scroll area of the page


def _all_steps(traces: Sequence[CurveData]) -> tuple[float, float]:
    ends = [(float(trace.x[0]), float(trace.x[-1])) for trace in traces if len(trace.x)]
    first, last = min(start for start, _ in ends), max(end for _, end in ends)
    return (first, last) if last > first else (math.floor(first) - 1, first + 1)


def _faint(colour: QColor, alpha: int) -> QColor:
    faint = QColor(colour)
    faint.setAlpha(alpha)
    return faint
