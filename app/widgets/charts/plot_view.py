"""The pyqtgraph view of a plot: axes in our fonts and colours, curves, bands, marks, current step, pointer."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import QEvent, QPointF, QRectF, Qt, Signal
from PySide6.QtGui import QColor, QMouseEvent, QResizeEvent, QWheelEvent
from PySide6.QtWidgets import QGraphicsGridLayout, QToolTip

from app import theme
from app.state.run import Mark, MarkKind
from app.widgets.basic.layout import configure
from app.widgets.basic.number_format import display_unit, ticks
from app.widgets.charts.curves import DrawnCurve, Trace, axis_range, exponential_average, log10, log_ticks, thin

OVERHANG = 10
LEFT_AXIS, BOTTOM_AXIS = 64, 34  # sizes of the axes: the same in every plot, so that the plots of a column line up
LOW_VIEW, LOW_AXIS = 140, 20  # height below which the horizontal axis has no title, and its size then: room for curves
SHORT_CURVES = 600
NEAR_CURVE, NEAR_MARK = 24, 6
WHEEL_ZOOM = 0.85
BAND_ALPHA, AREA_ALPHA, RAW_ALPHA, LINE_ALPHA = 44, 110, 80, 120
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
TIME_UNITS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s"))

MARKS: dict[MarkKind, tuple[str, str, int]] = {  # kind → colour, sign and its size
    "health": ("warning", "t1", 8),
    "change": ("accent", "d", 9),
    "resume": ("text", "t2", 8),
    "checkpoint": ("muted", "s", 5),
    "eval": ("muted", "o", 5),
}
WITH_LINE: tuple[MarkKind, ...] = ("health", "change", "resume")
APART = 12
MOST_SENTENCES = 6

Span = tuple[float, float]


class StepScale(NamedTuple):
    """What the horizontal axis counts: its title, and how a place on it is named. `is_time`: milliseconds."""

    title: str = "step"
    text: Callable[[int], str] = "step {:,}".format
    is_time: bool = False

    @property
    def column(self) -> str:
        return f"{self.title}, ms" if self.is_time else self.title


class ValueAxis(pg.AxisItem):
    """Short labels, shares in percent, the unit chosen by the largest value."""

    def __init__(self, title: str, unit: str) -> None:
        super().__init__("left")
        self._title, self._unit = title, unit
        self._factor = self.largest = 1.0
        self.is_log = self.is_low = False

    def set_scale_of(self, largest: float, *, log: bool) -> None:
        """Choose unit and power of ten for values up to `largest`."""
        self.largest, self.is_log = largest, log
        factor, unit = display_unit(self._unit, largest)
        title = unit if self._title == self._unit else self._title
        if self.is_low:  # “% of completions” would be cut
            title = unit or title.partition(" of ")[0]
        power = 0
        if not log and 0 < largest * factor < 1e-2:  # labels such as 4.5e−4 would run into the title
            power = math.floor(math.log10(largest * factor))
            title = f"{unit or title}, 10{str(power).translate(_SUPERSCRIPT)}"
        self._factor = factor / 10**power
        if title != self.labelText:
            self.setLabel(title, **self.labelStyle)

    def boundingRect(self) -> QRectF:
        # With a grid, pyqtgraph's rectangle has no space for half of the lowest and the highest label, and drops both.
        return super().boundingRect().adjusted(0, -OVERHANG, 0, OVERHANG)

    def tickValues(self, minVal: float, maxVal: float, size: float) -> list[tuple[float, list[float]]]:
        if self.is_log:
            return [(1.0, log_ticks(minVal, maxVal, most=max(2, int(size / 24))))]
        return super().tickValues(minVal, maxVal, size)

    def tickStrings(self, values: Sequence[float], scale: float, spacing: float) -> list[str]:
        if self.is_log:
            return [f"{10**value * self._factor:.3g}" for value in values]
        # Multiples of the spacing: pyqtgraph's values carry float error, and 0.30000000000000004 is no label.
        return ticks([float(f"{round(value / spacing) * spacing * self._factor:.6g}") for value in values])


class StepAxis(pg.AxisItem):
    """Whole numbers, or seconds in the unit that suits the range."""

    def __init__(self) -> None:
        super().__init__("bottom")
        self.steps, self.is_low, self._unit = StepScale(), False, ""

    def show_range(self, length: float) -> None:
        size, unit = next((row for row in TIME_UNITS if length >= 3 * row[0]), TIME_UNITS[-1])
        self.setScale(1 / size if self.steps.is_time else 1)
        self._unit = f" {unit}" if self.steps.is_time else ""  # at the ticks, as a low plot has no title
        if self.steps.title != self.labelText:
            self.setLabel(self.steps.title, **self.labelStyle)

    def showLabel(self, show: bool = True) -> None:
        super().showLabel(show and not self.is_low)  # pyqtgraph shows it whenever it changes

    def tickSpacing(self, minVal: float, maxVal: float, size: float) -> list[tuple[float, float]]:
        levels = super().tickSpacing(minVal, maxVal, size) or []
        return [(spacing if self.steps.is_time else max(1.0, spacing), 0) for spacing, _ in levels[:1]]

    def tickStrings(self, values: Sequence[float], scale: float, spacing: float) -> list[str]:
        return [f"{round(value * scale, 6):,.12g}{self._unit}" for value in values]


class CurveItems:
    """Line, dots for isolated points, the faint raw line of a smoothed curve, and a band or area."""

    def __init__(self, box: Any) -> None:
        self.raw, self.line = (pg.PlotCurveItem(connect="finite") for _ in range(2))
        self.dots = pg.ScatterPlotItem(size=4, pen=None)
        self.low, self.high = (pg.PlotCurveItem(connect="finite", pen=None) for _ in range(2))
        self.band = pg.FillBetweenItem(self.low, self.high)
        self.band.setZValue(-10)
        self.raw.setZValue(-5)
        self.items = (self.band, self.raw, self.line, self.dots)
        for item in self.items:
            box.addItem(item, ignoreBounds=True)

    def draw(self, trace: Trace, curve: DrawnCurve, *, fine: bool) -> None:
        pen = trace.pen
        pen.setCosmetic(True)  # the width is in pixels, not in steps
        pen.setWidthF(1.6 if fine else 1)
        self.line.setData(curve.x, curve.line, pen=pen, antialias=fine)
        finite = np.concatenate([[False], np.isfinite(curve.line), [False]])
        isolated = finite[1:-1] & ~finite[:-2] & ~finite[2:]  # a line cannot show a number between two gaps
        self.dots.setData(curve.x[isolated], curve.line[isolated], brush=pen.color())
        self.raw.setData(curve.raw_x, curve.raw, pen=pg.mkPen(faint(pen.color(), RAW_ALPHA)), antialias=fine)
        self.band.setVisible(curve.low is not None)
        if curve.low is not None:
            self.band.setBrush(faint(pen.color(), AREA_ALPHA if trace.stacked else BAND_ALPHA))
            self.low.blockSignals(True)  # each edge's signal computes the band; once is enough
            self.low.setData(curve.x, curve.low)
            self.low.blockSignals(False)
            self.high.setData(curve.x, curve.high)


def faint(colour: QColor, alpha: int) -> QColor:
    copy = QColor(colour)
    copy.setAlpha(alpha)
    return copy


class PlotView(pg.GraphicsView):
    hovered = Signal(object)  # a position on the step axis
    point_clicked = Signal(float)
    double_clicked = Signal(float)
    span_chosen = Signal(object)  # (first, last)

    def __init__(self, axis: str, unit: str) -> None:
        super().__init__()
        self._unit = unit
        self.value_axis, self.step_axis = ValueAxis(axis, unit), StepAxis()
        self.box: Any = pg.ViewBox(enableMouse=False, enableMenu=False)  # Any: pyqtgraph's annotations are incomplete
        self.curves: list[CurveItems] = []
        self._marks: Sequence[Mark] = ()
        self._shown: Span = (0.0, 1.0)
        self._drag_start: float | None = None
        self._pan_start: float | None = None
        self._step_line = pg.InfiniteLine(angle=90)
        self._selection = pg.LinearRegionItem(movable=False)
        self.signs = pg.ScatterPlotItem(pxMode=True)
        self._mark_lines = {kind: pg.PlotCurveItem(connect="pairs") for kind in WITH_LINE}

        content, grid = pg.GraphicsWidget(), QGraphicsGridLayout()
        grid.setContentsMargins(0, 6, OVERHANG, 0)
        grid.setSpacing(0)
        for item, row, column in ((self.value_axis, 0, 0), (self.box, 0, 1), (self.step_axis, 1, 1)):
            grid.addItem(item, row, column)
        grid.setRowStretchFactor(0, 1)
        grid.setColumnStretchFactor(1, 1)
        content.setLayout(grid)
        self.setCentralItem(content)
        self.box.disableAutoRange()
        self.value_axis.setWidth(theme.scaled(LEFT_AXIS))
        self.value_axis.setStyle(tickLength=0, tickTextOffset=6, maxTickLevel=0, hideOverlappingLabels=False)
        self.value_axis.setGrid(255)
        self.value_axis.setZValue(self.box.zValue() - 1)  # it draws the grid lines, which belong below the curves
        self.step_axis.setHeight(theme.scaled(BOTTOM_AXIS))
        self.step_axis.setStyle(tickLength=0, tickTextOffset=5, maxTickLevel=0, hideOverlappingLabels=OVERHANG)
        for each in (self.value_axis, self.step_axis):
            each.linkToView(self.box)
            each.enableAutoSIPrefix(False)
        for item in (*self._mark_lines.values(), self.signs, self._step_line, self._selection):
            self.box.addItem(item, ignoreBounds=True)
        self._step_line.hide()
        self._selection.hide()
        # The card has the menu, the focus and the keys.
        configure(self, frameShape=self.Shape.NoFrame, contextMenuPolicy=Qt.ContextMenuPolicy.NoContextMenu)
        for part in (self, self.viewport()):
            part.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.setMouseTracking(True)
        self.value_axis.set_scale_of(1.0, log=False)
        self.restyle()

    def restyle(self) -> None:
        colours = theme.palette()
        self.setBackground(colours.plot_background)
        for axis in (self.value_axis, self.step_axis):
            axis.setPen(pg.mkPen(colours.grid if axis is self.step_axis else None))
            axis.setTextPen(pg.mkPen(colours.muted))
            axis.setTickFont(theme.figures_font(theme.CAPTION))
            style: Any = {"color": colours.muted.name(), "font-size": f"{theme.scaled(theme.CAPTION)}px"}
            axis.setLabel(axis.labelText or self.step_axis.steps.title, **style)
        self.value_axis.setTickPen(pg.mkPen(colours.grid))
        self._step_line.setPen(pg.mkPen(colours.muted, style=Qt.PenStyle.DotLine))
        self._selection.setBrush(faint(colours.accent, 40))
        for line in self._selection.lines:
            line.setPen(pg.mkPen(colours.accent))

    def draw(
        self, traces: Sequence[Trace], marks: Sequence[Mark], span: Span | None, smoothing: float, *, log: bool = False
    ) -> None:
        while len(self.curves) > len(traces):
            for item in self.curves.pop().items:
                self.box.removeItem(item)
        while len(self.curves) < len(traces):
            self.curves.append(CurveItems(self.box))
        if span is None:
            drawn = [trace.x for trace in traces if len(trace.x)]
            first, last = min(float(x[0]) for x in drawn), max(float(x[-1]) for x in drawn)
            span = (first, last) if last > first else (math.floor(first) - 1, first + 1)
        first, last = self._shown = span
        fine = sum(len(trace.x) for trace in traces) * (1 + (smoothing > 0)) < SHORT_CURVES
        columns: list[np.ndarray] = []
        for items, trace in zip(self.curves, traces, strict=True):
            curve = self._thinned(trace, (first, last), smoothing, log=log)
            items.draw(trace, curve, fine=fine)
            columns += [column for column in (curve.line, curve.raw, curve.low, curve.high) if column is not None]
        margin = (last - first) * 0.01 or 0.5
        self.step_axis.show_range(last - first)
        self.box.setXRange(first - margin, last + margin, padding=0)
        low, high = axis_range(*columns, unit=self._unit, log=log)
        self.value_axis.set_scale_of(10**high if log else max(abs(low), abs(high)), log=log)
        self.box.setYRange(low - (high - low) * 1e-4, high, padding=0)  # a tick right on the edge would be left out
        self._marks = marks
        self._draw_marks()
        self._place_items()

    def _thinned(self, trace: Trace, span: Span, smoothing: float, *, log: bool) -> DrawnCurve:
        # One point beyond either end, so that the line runs to the edge; smoothed first, with all of its past.
        shown = slice(
            max(0, int(np.searchsorted(trace.x, span[0])) - 1), int(np.searchsorted(trace.x, span[1], side="right")) + 1
        )
        y = trace.y[shown]
        smoothed = exponential_average(trace.y, smoothing)[shown] if smoothing > 0 else None
        low, high = (None if edge is None else edge[shown] for edge in (trace.low, trace.high))
        if log:
            # A band that reaches below 0 ends a decade below the curve: a gap in one edge alone would be drawn askew.
            floor = 0.1 * float(y[y > 0].min(initial=1.0))
            low, high = (None if edge is None else log10(np.maximum(edge, floor)) for edge in (low, high))
            y, smoothed = log10(y), None if smoothed is None else log10(smoothed)
        return thin(trace.x[shown], y, smoothed, low, high, most=2 * max(200, self.width()))

    def _draw_marks(self) -> None:
        (first, last), (low, high) = self.box.viewRange()
        kinds = list(MARKS)
        by_place: dict[int, Mark] = {}  # at most one in every APART pixels
        for mark in sorted(self._marks, key=lambda mark: kinds.index(mark.kind)):
            if first <= mark.step <= last:
                by_place.setdefault(int((mark.step - first) / (last - first) * self.box.width() / APART), mark)
        shown = list(by_place.values())
        colours = {kind: getattr(theme.palette(), role) for kind, (role, _, _) in MARKS.items()}
        top = high - (high - low) * 5 / max(10, self.box.height())
        self.signs.setData(
            x=[mark.step for mark in shown],
            y=[top] * len(shown),
            symbol=[MARKS[mark.kind][1] for mark in shown],
            size=[MARKS[mark.kind][2] for mark in shown],
            pen=[pg.mkPen(colours[mark.kind]) for mark in shown],
            brush=[None if mark.kind == "eval" else pg.mkBrush(colours[mark.kind]) for mark in shown],
        )
        for kind, line in self._mark_lines.items():
            steps = np.repeat([float(mark.step) for mark in shown if mark.kind == kind], 2)
            pen = pg.mkPen(faint(colours[kind], LINE_ALPHA), style=Qt.PenStyle.DashLine)
            line.setData(steps, np.tile([low, top], len(steps) // 2), pen=pen)

    def _place_items(self) -> None:
        if self.sceneObj is not None:  # else pyqtgraph does so inside the paint event, and everything is painted twice
            self.sceneObj.prepareForPaint()

    def resizeEvent(self, event: QResizeEvent | None) -> None:
        super().resizeEvent(event)
        if event is not None:  # pyqtgraph's constructor calls it too
            is_low = self.height() < theme.scaled(LOW_VIEW)
            self.value_axis.is_low = self.step_axis.is_low = is_low
            self.value_axis.set_scale_of(self.value_axis.largest, log=self.value_axis.is_log)
            self.step_axis.showLabel()
            self.step_axis.setHeight(theme.scaled(LOW_AXIS if is_low else BOTTOM_AXIS))
        self._place_items()

    def viewportEvent(self, event: QEvent) -> bool:
        # The scene's answer to it has no text, and hides the marks' sentences that the mouse has brought up.
        return event.type() == QEvent.Type.ToolTip or super().viewportEvent(event)

    def set_step(self, step: int | None) -> None:
        self._step_line.setVisible(step is not None)
        if step is not None:
            self._step_line.setValue(step)

    def _step_at(self, event: QMouseEvent | QWheelEvent) -> float:
        return float(self.box.mapSceneToView(self.mapToScene(event.position().toPoint())).x())

    def _is_near_curve(self, event: QMouseEvent) -> bool:
        pos = self.mapToScene(event.position().toPoint())
        step = float(self.box.mapSceneToView(pos).x())
        if not self.box.sceneBoundingRect().contains(pos):
            return False
        for curve in self.curves:
            x, y = curve.line.getData()
            if x is None or y is None or not len(x):
                continue
            i = min(int(np.searchsorted(x, step)), len(x) - 1)
            near = [float(value) for value in y[max(0, i - 1) : i + 1] if np.isfinite(value)]
            tops = [self.box.mapViewToScene(QPointF(step, value)).y() for value in near]
            if tops and min(tops) - NEAR_CURVE <= pos.y() <= max(tops) + NEAR_CURVE:
                return True
        return False

    # None of these calls the base class, whose items pan and zoom by themselves.

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
        first, last = self.box.viewRange()[0]
        reach = NEAR_MARK * (last - first) / max(1.0, self.box.width())
        near = [mark for mark in self._marks if abs(mark.step - step) <= reach]
        lines = [f"{self.step_axis.steps.text(mark.step)}: {mark.sentence}" for mark in near[:MOST_SENTENCES]]
        lines = [line[:1].upper() + line[1:] for line in lines]
        lines += [f"and {len(near) - MOST_SENTENCES} more"] if len(near) > MOST_SENTENCES else []
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
        self.double_clicked.emit(self._step_at(event))

    def wheelEvent(self, event: QWheelEvent) -> None:
        across, down = event.angleDelta().x(), event.angleDelta().y()
        first, last = self._shown
        if event.modifiers() & Qt.KeyboardModifier.ControlModifier and down:
            centre, factor = self._step_at(event), WHEEL_ZOOM ** (down / 120)
            self.span_chosen.emit((centre - (centre - first) * factor, centre + (last - centre) * factor))
        elif abs(across) > abs(down):
            self._pan(-across / 120 * (last - first) / 10)
        else:
            event.ignore()  # Qt then offers the event to the scroll area of the page

    def _pan(self, steps: float) -> None:
        first, last = self._shown
        self.span_chosen.emit((first + steps, last + steps))
