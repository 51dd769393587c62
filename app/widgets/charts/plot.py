"""One chart: a card with a title, a legend with the newest values, and curves over steps; charts as files."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Literal

import numpy as np
from PySide6.QtCore import QBuffer, QEvent, QIODevice, QPoint, QRect, Qt, Signal
from PySide6.QtGui import (
    QContextMenuEvent,
    QFocusEvent,
    QGuiApplication,
    QImage,
    QKeyEvent,
    QKeySequence,
    QPainter,
    QPaintEvent,
    QPen,
    QResizeEvent,
)
from PySide6.QtSvg import QSvgGenerator
from PySide6.QtWidgets import QFrame, QLabel, QMenu, QSizePolicy

from app import theme
from app.state.run import Mark
from app.widgets.basic.controls import ElidedLabel, LinkButton
from app.widgets.basic.labels import label, place_about, plain_tip, show_text
from app.widgets.basic.layout import BY_KEYBOARD, column, configure, holder, paint_ring, row, stack
from app.widgets.basic.number_format import figure
from app.widgets.charts.curves import EMPTY, Trace, nearest_index, pile, steps_of
from app.widgets.charts.plot_view import PlotView, StepScale
from backend.utils.disk import save_as

Format = Literal["png", "svg", "csv"]
FORMATS: dict[Format, str] = {"png": "PNG image", "svg": "SVG drawing", "csv": "CSV table"}
SHARPNESS = 2.0
CHUNK = 4096
CORNER = 8
LEGEND_LINES, LOW_PLOT = 4, 190  # entries beyond these lines, or half of them in a lower plot, are only in the tool tip
MORE = "{} more"


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """One curve: its pen, name and value. The entry of a `hidden` curve stays, crossed out."""

    pen: QPen
    label: str
    value: str
    hidden: bool = False


class Legend(QLabel):
    clicked = Signal(str)

    def __init__(self) -> None:
        super().__init__(wordWrap=True, textFormat=Qt.TextFormat.RichText)
        configure(
            self,
            font=theme.figures_font(theme.CAPTION),
            alignment=Qt.AlignmentFlag.AlignTop,
            minimumWidth=40,
            sizePolicy=QSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Maximum),
            textInteractionFlags=Qt.TextInteractionFlag.LinksAccessibleByMouse,
        )
        self.entries: Sequence[LegendEntry] = ()
        self.lines = LEGEND_LINES
        self.linkActivated.connect(lambda link: self.clicked.emit(self.entries[int(link)].label))

    def _fitting(self) -> int:
        """How many entries have space in the lines; the last of these also says how many are left out."""
        advance, width, line, x = self.fontMetrics().horizontalAdvance, self.width(), 1, 0
        for i, entry in enumerate(self.entries):
            size = advance(f"━━ {entry.label} {entry.value}   ")
            line, x = (line + 1, size) if x and x + size > width else (line, x + size)
            is_last = i == len(self.entries) - 1
            if line > self.lines or (line == self.lines and not is_last and x + advance(MORE.format(99)) > width):
                return i
        return len(self.entries)

    def show_entries(self, entries: Sequence[LegendEntry]) -> None:
        self.entries = entries
        self.setMaximumHeight(self.lines * self.fontMetrics().lineSpacing() + 2)
        colours, parts, fitting = theme.palette(), [], max(1, self._fitting())
        for i, entry in enumerate(self.entries[:fitting]):
            swatch = "━━" if entry.pen.style() == Qt.PenStyle.SolidLine else "╍╍"
            name, text = escape(entry.label), colours.text.name()
            if entry.hidden:
                name, text = f"<s>{name}</s>", colours.muted.name()
            colour = (colours.outline if entry.hidden else entry.pen.color()).name()
            parts.append(
                f'<a href="{i}" style="white-space:nowrap; text-decoration:none; color:{colours.muted.name()}">'
                f'<span style="color:{colour}">{swatch}</span>&nbsp;{name}&nbsp;'
                f'<span style="color:{text}">{escape(entry.value)}</span></a>'
            )
        if hidden := max(0, len(self.entries) - fitting):
            parts.append(f'<span style="color:{colours.muted.name()}">{MORE.format(hidden)}</span>')
        self.setText(" &nbsp; ".join(parts))
        everything = "\n".join(f"{entry.label}  {entry.value}" for entry in self.entries)
        self.setToolTip(plain_tip(everything) if hidden else "")

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        if event.size().width() != event.oldSize().width():
            self.show_entries(self.entries)


class Plot(QFrame):
    hovered = Signal(object)  # step that the pointer or the keyboard is on, or None
    zoomed = Signal(object)  # selected range (first, last), or None for all steps
    step_chosen = Signal(int)
    log_changed = Signal(bool)
    save_requested = Signal(str)  # format
    offer_taken = Signal()  # click on the link in place of the curves
    explanation_requested = Signal()

    def __init__(self, title: str, axis: str = "", unit: str = "", help: str = "", section: str = "") -> None:
        super().__init__()
        self.title, self.axis, self.unit, self.help, self.section = title, axis, unit, help, section
        self.is_built, self.leads_to_completions = False, True
        self.traces: Sequence[Trace] = ()
        self.marks: Sequence[Mark] = ()
        self.hidden: set[str] = set()
        self.view: PlotView | None = None
        self._log_wanted = False
        # These four take effect when the plot is drawn next.
        self.steps = StepScale()
        self.smoothing = 0.0  # decay of the moving average, 0 (off) to below 1
        self.span: tuple[float, float] | None = None
        self.all_steps: tuple[float, float] | None = None
        self.step: int | None = None
        self._needs_restyle = self._has_ring = False
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        configure(self, name=title, role="card", accessibleDescription=help, focusPolicy=Qt.FocusPolicy.StrongFocus)
        theme.signals.changed.connect(self._restyle_when_painted)

    def build(self) -> None:
        if self.is_built:
            return
        self.is_built = True
        tip, middle = plain_tip(f"{self.title}\n{self.help}"), Qt.TextElideMode.ElideMiddle
        title = ElidedLabel(middle, colour="text", text=self.title, font=theme.heading_font(), tip=tip)
        right = Qt.AlignmentFlag.AlignRight
        self.step_label = label(font=theme.figures_font(theme.CAPTION), role="caption", align=right)
        self.legend = Legend()
        self.legend.clicked.connect(self.toggle_curve)
        self.legend.lines = LEGEND_LINES // 2 if self.height() < theme.scaled(LOW_PLOT) else LEGEND_LINES
        self.waiting = label(role="muted", wrap=True, align=Qt.AlignmentFlag.AlignCenter)
        self.offer = LinkButton("", on_click=self.offer_taken.emit, shown=False)
        centred = (self.offer, 0, Qt.AlignmentFlag.AlignHCenter)
        self._placeholder = holder(column(None, self.waiting, centred, None))
        self._body = stack(self._placeholder, into=self, nested=True)
        head = row((title, 1), self.step_label)
        column(head, self.legend, (self._body, 1), into=self, spacing=4, margins=(12, 10, 10, 6))
        self.setTabOrder(self, self.offer)  # made later than the rest of the page, at whose end Qt has put it

    def show_traces(
        self, traces: Sequence[Trace], waiting: str = "", marks: Sequence[Mark] = (), offer: str = ""
    ) -> None:
        """Draw these curves and marks; without a number, the sentence `waiting` and the link `offer`."""
        self.build()
        self.traces, self.marks = traces, marks
        if not any(trace.has_data for trace in traces):
            self.waiting.setText(waiting)
            show_text(self.offer, offer)
            self._body.setCurrentWidget(self._placeholder)
            self.legend.show_entries(())
            self.step_label.setText("")
            return
        if self.view is None:
            self.view = view = PlotView(self.axis, self.unit)
            view.hovered.connect(lambda x: self.hovered.emit(self._nearest_step(x)))
            view.point_clicked.connect(lambda x: self.step_chosen.emit(self._nearest_step(x)))
            view.double_clicked.connect(lambda x: self.zoomed.emit(None) if self.span else view.point_clicked.emit(x))
            view.span_chosen.connect(self.zoomed)
            self._body.addWidget(self.view)
        shown = self.visible_traces()
        self._body.setCurrentWidget(self.view)
        self.view.step_axis.steps = self.steps
        drawn = shown if self.is_log else pile(shown)  # on a logarithmic axis heights do not add up
        self.view.draw(drawn, marks, self.span or self.all_steps, self.smoothing, log=self.is_log)
        self.view.set_step(self.step)
        self._show_values()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        lines = LEGEND_LINES // 2 if self.height() < theme.scaled(LOW_PLOT) else LEGEND_LINES
        if self.is_built and lines != self.legend.lines:
            self.legend.lines = lines
            self.legend.show_entries(self.legend.entries)

    def _show_again(self) -> None:
        if self.is_built:
            self.show_traces(self.traces, self.waiting.text(), self.marks, self.offer.text())

    def visible_traces(self) -> list[Trace]:
        return [trace for trace in self.traces if trace.label not in self.hidden] or list(self.traces)

    def toggle_curve(self, name: str) -> None:
        self.hidden ^= {name}
        self._show_again()

    def show_all_curves(self) -> None:
        if self.hidden:
            self.hidden = set()
            self._show_again()

    @property
    def can_be_log(self) -> bool:
        return any(bool((trace.y > 0).any()) for trace in self.visible_traces())

    @property
    def is_log(self) -> bool:
        return self._log_wanted and self.can_be_log

    def set_log(self, on: bool) -> None:
        self._log_wanted = on
        self._show_again()
        self.log_changed.emit(on)

    def set_step(self, step: int | None) -> None:
        """Mark a step and show the values there in the legend; None goes back to the newest values."""
        if step != self.step:  # the grid passes every move of the pointer on to every plot
            self.step = step
            if self.view is not None and self._body.currentWidget() is self.view:
                self.view.set_step(step)
                self._show_values()

    def _show_values(self) -> None:
        where, text = "", self.steps.text
        if self.step is not None:
            where = text(self.step)
        elif self.span is not None:
            first, last = map(round, self.span)
            where = f"steps {first:,} – {last:,}" if self.steps.title == "step" else f"{text(first)} – {text(last)}"
        self.step_label.setText(where)
        here = " ".join(mark.sentence for mark in self.marks if mark.step == self.step)
        entries = [
            LegendEntry(trace.pen, trace.label, figure(trace.at(self.step), self.unit), trace.label in self.hidden)
            for trace in self.traces
        ]
        self.legend.show_entries(entries)
        values = ", ".join(f"{entry.label} {entry.value}" for entry in entries if not entry.hidden)
        self.setAccessibleName(" · ".join(filter(None, (self.title, where, values, here))))

    def _nearest_step(self, x: float | None) -> int | None:
        steps = steps_of(self.traces)
        i = None if x is None else nearest_index(steps, x)
        return None if i is None else int(steps[i])

    def _restyle_when_painted(self) -> None:
        self._needs_restyle = True
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        if self._needs_restyle and self.view is not None:
            self.view.restyle()
            self._show_again()
        self._needs_restyle = False
        super().paintEvent(event)
        if self._has_ring and self.hasFocus():
            paint_ring(self, CORNER)

    def leaveEvent(self, event: QEvent) -> None:
        super().leaveEvent(event)
        self.hovered.emit(None)

    def focusInEvent(self, event: QFocusEvent) -> None:
        super().focusInEvent(event)
        self._has_ring = event.reason() in BY_KEYBOARD

    def keyPressEvent(self, event: QKeyEvent) -> None:
        key = Qt.Key(event.key())
        if event.matches(QKeySequence.StandardKey.Copy):
            self.copy()
        elif key in (Qt.Key.Key_Left, Qt.Key.Key_Right, Qt.Key.Key_Home, Qt.Key.Key_End):
            steps = steps_of(self.traces)
            if self.span is not None:
                steps = steps[(steps >= self.span[0]) & (steps <= self.span[1])]
            if len(steps):
                last = len(steps) - 1
                here = last + 1 if self.step is None else nearest_index(steps, self.step) or 0
                moves = {Qt.Key.Key_Left: here - 1, Qt.Key.Key_Right: here + 1, Qt.Key.Key_Home: 0}
                self.hovered.emit(int(steps[min(max(0, moves.get(key, last)), last)]))
        elif key in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and self.step is not None:
            self.step_chosen.emit(self.step)
        elif key == Qt.Key.Key_Escape and (self.step is not None or self.span is not None):
            (self.zoomed if self.step is None else self.hovered).emit(None)
        else:
            super().keyPressEvent(event)

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        self.menu().popup(event.globalPos())

    def menu(self) -> QMenu:
        menu = QMenu(self)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        has_data = any(trace.has_data for trace in self.traces)

        def add(text: str, do: Callable[[], object], *, enabled: bool = True, ticked: bool | None = None) -> None:
            is_check = ticked is not None
            configure(menu.addAction(text, do), enabled=enabled, checkable=is_check, checked=bool(ticked))

        menu.addAction("Copy values as CSV", QKeySequence.StandardKey.Copy, self.copy)
        menu.addAction("Copy image", lambda: QGuiApplication.clipboard().setPixmap(self.grab()))
        for name, text in FORMATS.items():
            menu.addAction(f"Save as {text}…", partial(self.save_requested.emit, name))
        for action in menu.actions():
            action.setEnabled(has_data)
        menu.addSeparator()
        if self.leads_to_completions:
            add("Completions of this step", lambda: self.step_chosen.emit(self.step), enabled=self.step is not None)
        toggle_log = partial(self.set_log, not self._log_wanted)
        add("Logarithmic axis", toggle_log, enabled=has_data and self.can_be_log, ticked=self.is_log)
        add("Show all steps", lambda: self.zoomed.emit(None), enabled=self.span is not None)
        if place_about(self):
            menu.addSeparator()
            add("About this chart", self.explanation_requested.emit)
        if len(self.traces) > 1:
            menu.addSeparator()
            for trace in self.traces:
                add(trace.label, partial(self.toggle_curve, trace.label), ticked=trace.label not in self.hidden)
        return menu

    def copy(self) -> None:
        QGuiApplication.clipboard().setText(table_text(self.traces, self.steps.column))


def write_chart(chart: Plot, path: Path, format: Format) -> None:
    """Write a chart's card as a picture, or its traces as a table. Raises DiskError."""
    if format == "csv":
        save_as(path, table_text(chart.traces, chart.steps.column))
        return
    buffer = QBuffer()
    if format == "png":
        image = QImage(chart.size() * SHARPNESS, QImage.Format.Format_RGB32)
        image.setDevicePixelRatio(SHARPNESS)
        image.fill(theme.palette().card)
        chart.render(image, QPoint())
        buffer.open(QIODevice.OpenModeFlag.WriteOnly)
        image.save(buffer, "PNG")  # pyright: ignore[reportCallIssue, reportArgumentType]
    else:
        generator = QSvgGenerator()
        generator.setOutputDevice(buffer)
        generator.setSize(chart.size())
        generator.setViewBox(QRect(QPoint(), chart.size()))
        generator.setResolution(96)
        generator.setTitle(chart.title)
        painter = QPainter(generator)
        painter.fillRect(chart.rect(), theme.palette().card)
        chart.render(painter, QPoint())
        painter.end()
    save_as(path, [bytes(buffer.data().data())])


def table_text(traces: Sequence[Trace], axis: str = "step") -> str:
    """CSV with a row for each place on the axis, a column for each curve and each edge of a band."""
    columns: list[tuple[str, np.ndarray, np.ndarray]] = []
    for trace in traces:
        name = trace.column or trace.label
        parts = {name: trace.y, f"{name} low": trace.low, f"{name} high": trace.high}
        columns += [(name, trace.x, values) for name, values in parts.items() if values is not None]
    steps = np.unique(np.concatenate([EMPTY, *(x for _, x, _ in columns)]))
    table = np.full((len(columns), len(steps)), np.nan)
    for cells, (_, x, y) in zip(table, columns, strict=True):
        cells[np.searchsorted(steps, x)] = y
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([axis, *(name for name, _, _ in columns)])
    for start in range(0, len(steps), CHUNK):
        rows = table[:, start : start + CHUNK].T.tolist()
        numbers = steps[start : start + CHUNK].astype(int).tolist()
        # repr of a float is the shortest text that reads back as the same number; NaN is not equal to itself.
        writer.writerows(
            [step, *("" if x != x else repr(x) for x in cells)] for step, cells in zip(numbers, rows, strict=True)
        )
    return text.getvalue()
