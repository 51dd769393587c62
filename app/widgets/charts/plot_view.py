"""The pyqtgraph side of a plot: axes in our type and colours, curves, bands, the mark under the pointer, zooming.

Curves are thinned to the pixels there are before they reach pyqtgraph, with their peaks kept, so that a hundred thousand
steps cost what two thousand do. The wheel is left to the page; dragging chooses a span of steps.
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
"""Plots of fewer points in all are drawn thicker and antialiased; for long curves that costs twenty times as much."""
LEFT_AXIS = 54
"""Width of the axis of values: the same in every plot, so that the plots of a column line up."""
BOTTOM_AXIS = 34
OVERHANG = 10
"""How far a figure may stand out beyond the end of its axis."""
BAND_ALPHA, RAW_ALPHA = 44, 80


class CurveData(Protocol):
    """What a curve must have; `app.widgets.charts.plot.Trace` is one."""

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
    """The axis of values: short figures, in percent for shares, in the unit that suits the largest."""

    def __init__(self, title: str, unit: str) -> None:
        super().__init__("left")
        self._title, self._unit = title, unit
        self._factor = 1

    def suit(self, largest: float) -> None:
        """Choose the unit; an axis whose title is nothing but its unit says the new one."""
        self._factor, word = display_unit(self._unit, largest)
        title = word if self._title == self._unit else self._title
        if title != self.labelText:
            self.setLabel(title, **self.labelStyle)

    def boundingRect(self) -> QRectF:
        # With a grid the axis forgets the room that the lowest and the highest figure need, and leaves them out.
        return super().boundingRect().adjusted(0, -OVERHANG, 0, OVERHANG)

    def tickStrings(self, values: Sequence[float], scale: float, spacing: float) -> list[str]:
        return ticks([float(f"{round(value / spacing) * spacing * self._factor:.6g}") for value in values])


class _StepAxis(pg.AxisItem):
    """The axis of steps: there is nothing between two of them."""

    def tickSpacing(self, minVal: float, maxVal: float, size: float) -> list[tuple[float, float]]:
        found = super().tickSpacing(minVal, maxVal, size) or []
        return [(max(1.0, spacing), 0) for spacing, _ in found[:1]]

    def tickStrings(self, values: Sequence[float], scale: float, spacing: float) -> list[str]:
        return [f"{value:,.0f}" for value in values]


class _CurveItems:
    """The items of one trace: line, dots for lone points, the faint raw line under a smoothed one, the band."""

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
            view.addItem(item, ignoreBounds=True)

    def remove(self) -> None:
        for item in self._items:
            self._view.removeItem(item)

    def draw(self, pen: QPen, x: np.ndarray, y: np.ndarray, raw: np.ndarray | None, edges: Any, fine: bool) -> None:
        pen = QPen(pen)
        pen.setCosmetic(True)
        pen.setWidthF(1.6 if fine else 1)
        self.line.setData(x, y, pen=pen, antialias=fine)
        alone = isolated_points(y)
        self.dots.setData(x[alone], y[alone], brush=pen.color())
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
    """A view over steps: two axes and a box of curves. (pyqtgraph's own PlotItem brings some fifty widgets for a menu that
    we do not show, and every one of them would be dressed anew when the theme changes.)

    Signals: pointed(step as float, or None); span_chosen((first, last), or None for all).
    """

    pointed = Signal(object)
    span_chosen = Signal(object)

    def __init__(self, axis: str, unit: str) -> None:
        super().__init__()
        self._values, self._steps = _ValueAxis(axis, unit), _StepAxis("bottom")
        self.box: Any = pg.ViewBox(enableMouse=False, enableMenu=False)  # pyqtgraph's annotations are not complete
        self._axis = axis
        self._curves: list[_CurveItems] = []
        self._drag: float | None = None
        self._mark = pg.InfiniteLine(angle=90)
        self._chosen = pg.LinearRegionItem(movable=False)
        self._lay_out()
        self._set_up()
        self.dress()

    def _lay_out(self) -> None:
        whole, grid = pg.GraphicsWidget(), QGraphicsGridLayout()
        grid.setContentsMargins(0, 6, OVERHANG, 0)
        grid.setSpacing(0)
        for part, row, column in ((self._values, 0, 0), (self.box, 0, 1), (self._steps, 1, 1)):
            grid.addItem(part, row, column)
        grid.setRowStretchFactor(0, 1)
        grid.setColumnStretchFactor(1, 1)
        whole.setLayout(grid)
        self.setCentralItem(whole)
        for axis in (self._values, self._steps):
            axis.linkToView(self.box)

    def _set_up(self) -> None:
        self.box.disableAutoRange()
        self._values.setWidth(theme.scaled(LEFT_AXIS))
        self._values.setStyle(tickLength=0, tickTextOffset=6, maxTickLevel=0, hideOverlappingLabels=False)
        self._steps.setStyle(tickLength=0, tickTextOffset=5, maxTickLevel=0, hideOverlappingLabels=OVERHANG)
        self._values.setGrid(255)
        self._values.setZValue(-1)  # pyqtgraph draws the grid over the curves
        self._steps.setHeight(theme.scaled(BOTTOM_AXIS))
        for mark in (self._mark, self._chosen):
            mark.setVisible(False)
            self.box.addItem(mark, ignoreBounds=True)
        self.setFrameShape(self.Shape.NoFrame)
        self.setContextMenuPolicy(Qt.ContextMenuPolicy.NoContextMenu)  # the card has the menu
        self.setFocusPolicy(Qt.FocusPolicy.ClickFocus)
        self.setMouseTracking(True)

    def dress(self) -> None:
        """Take the colours of the palette in force."""
        colours = theme.palette()
        self.setBackground(colours.plot_background)
        style: Any = {"color": colours.muted.name(), "font-size": f"{theme.scaled(theme.CAPTION)}px"}
        for axis, text in ((self._values, self._values.labelText or self._axis), (self._steps, "step")):
            axis.setPen(pg.mkPen(colours.grid if axis is self._steps else None))
            axis.setTextPen(pg.mkPen(colours.muted))
            axis.setTickFont(theme.figures_font(theme.CAPTION))
            axis.enableAutoSIPrefix(False)
            axis.setLabel(text, **style)
        self._values.setTickPen(pg.mkPen(colours.grid))
        self._mark.setPen(pg.mkPen(colours.muted, style=Qt.PenStyle.DotLine))
        self._chosen.setBrush(_faint(colours.accent, 40))
        for line in self._chosen.lines:
            line.setPen(pg.mkPen(colours.accent))

    # ── drawing ─────────────────────────────────────────────────────────────────────────────────

    def draw(self, traces: Sequence[CurveData], span: tuple[float, float] | None, smoothing: float) -> None:
        """Draw the traces over `span` (all steps when None)."""
        while len(self._curves) > len(traces):
            self._curves.pop().remove()
        while len(self._curves) < len(traces):
            self._curves.append(_CurveItems(self.box))
        first, last = span or _all_steps(traces)
        fine = sum(len(trace.x) for trace in traces) * (1 + (smoothing > 0)) < SHORT_CURVES
        shown: list[np.ndarray] = []
        for curve, trace in zip(self._curves, traces, strict=True):
            shown += self._draw_one(curve, trace, (first, last), smoothing, fine)
        air = (last - first) * 0.01 or 0.5
        self.box.setXRange(first - air, last + air, padding=0)
        low, high = axis_range(*shown)
        self._values.suit(max(abs(low), abs(high)))
        self.box.setYRange(low - (high - low) * 1e-4, high, padding=0)  # a tick right on the edge would be left out

    def _draw_one(
        self, curve: _CurveItems, trace: CurveData, span: tuple[float, float], smoothing: float, fine: bool
    ) -> list[np.ndarray]:
        """Draw one trace; returns the columns that the axis of values must hold."""
        start = max(0, int(np.searchsorted(trace.x, span[0])) - 1)
        end = int(np.searchsorted(trace.x, span[1], side="right")) + 1
        columns = [exponential_average(trace.y, smoothing)[start:end]]
        if smoothing > 0:
            columns.append(trace.y[start:end])
        banded = trace.low is not None and trace.high is not None
        if banded:
            columns += [trace.low[start:end], trace.high[start:end]]  # pyright: ignore[reportOptionalSubscript]
        x, y, *more = downsample(trace.x[start:end], 2 * max(200, self.width()), *columns)
        raw = more.pop(0) if smoothing > 0 else None
        curve.draw(trace.pen, x, y, raw, more if banded else None, fine)
        return [y, *([raw] if raw is not None else []), *more]

    def mark(self, step: int | None) -> None:
        """Draw the upright line at a step, or none."""
        self._mark.setVisible(step is not None)
        if step is not None:
            self._mark.setValue(step)

    # ── pointer ─────────────────────────────────────────────────────────────────────────────────

    def _step_at(self, event: QMouseEvent) -> float:
        place: QPointF = self.mapToScene(event.position().toPoint())
        return float(self.box.mapSceneToView(place).x())

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if event.button() == Qt.MouseButton.LeftButton:
            self._drag = self._step_at(event)

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        step = self._step_at(event)
        if self._drag is not None and event.buttons() & Qt.MouseButton.LeftButton:
            self._chosen.setRegion(sorted((self._drag, step)))
            self._chosen.setVisible(abs(self._drag - step) >= 1)
        self.pointed.emit(step)

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        start, self._drag = self._drag, None
        self._chosen.setVisible(False)
        if start is not None:
            first, last = sorted((round(start), round(self._step_at(event))))
            if last - first >= 2:
                self.span_chosen.emit((float(first), float(last)))

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        self._drag = None
        self.span_chosen.emit(None)

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()  # it scrolls the page


def _all_steps(traces: Sequence[CurveData]) -> tuple[float, float]:
    ends = [(float(trace.x[0]), float(trace.x[-1])) for trace in traces if len(trace.x)]
    first, last = min(one for one, _ in ends), max(one for _, one in ends)
    return (first, last) if last > first else (math.floor(first) - 1, first + 1)


def _faint(colour: QColor, alpha: int) -> QColor:
    faint = QColor(colour)
    faint.setAlpha(alpha)
    return faint
