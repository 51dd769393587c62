"""One chart: a card with a title, a legend with the newest values, and curves over steps.

Which metrics share a chart is decided in `app.state.charts`, when to redraw in the chart grid. The pyqtgraph view is
created when the card first has something to draw.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

from PySide6.QtCore import QEvent, Qt, Signal
from PySide6.QtGui import (
    QContextMenuEvent,
    QFocusEvent,
    QGuiApplication,
    QKeyEvent,
    QKeySequence,
    QPaintEvent,
)
from PySide6.QtWidgets import QFrame, QHBoxLayout, QMenu, QSizePolicy, QVBoxLayout, QWidget

from app import theme
from app.state.run_state import Mark
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.labels import button, label, place_about, plain_tip
from app.widgets.basic.layout import BY_KEYBOARD, NestedStack, paint_ring
from app.widgets.basic.number_format import figure
from app.widgets.charts.chart_files import FORMATS, Trace, nearest_index, pile, steps_of, write_table
from app.widgets.charts.curves import has_spike
from app.widgets.charts.legend import Legend, LegendEntry
from app.widgets.charts.plot_view import PlotView

LOG_OFFER = "Log axis"
CORNER = 8
"""Radius of the card's corners, as in the style sheet."""


class Plot(QFrame):
    """A chart card.

    Left, Right, Home and End move the marked step, Return asks for its completions, Escape goes back to all steps.

    Attributes:
        title, axis, unit, help – of the chart, its value axis, and the values; what it shows, in a sentence or two.
        is_built – whether it has its title, legend and place for curves; `build` and `show_traces` make them.
        traces – what is shown now, hidden curves included.
        hidden – labels of the curves that are hidden.

    Signals:
        hovered(step as int, or None) – the pointer or the keyboard is on a step, or has left the plot.
        zoomed((first, last), or None) – a range of steps was selected, or all steps again.
        step_chosen(int) – a point was clicked, or Return pressed on the marked step.
        log_changed(bool) – the value axis was made logarithmic or linear.
        save_requested(str) – save this chart as a file of this format (png, svg or csv).
        explanation_requested – show what the guide says about this chart; offered where it has a place there.
        offer_taken – the link below the sentence in place of the curves was clicked.
    """

    hovered = Signal(object)
    zoomed = Signal(object)
    step_chosen = Signal(int)
    log_changed = Signal(bool)
    save_requested = Signal(str)
    offer_taken = Signal()
    explanation_requested = Signal()

    def __init__(self, title: str, axis: str = "", unit: str = "", help: str = "") -> None:
        super().__init__()
        self.title, self.axis, self.unit = title, axis, unit
        self.traces: Sequence[Trace] = ()
        self.hidden: set[str] = set()
        self.help = help
        self.is_built = False
        self._view: PlotView | None = None
        self._log_wanted = False
        self._smoothing = 0.0
        self._span: tuple[float, float] | None = None
        self._all_steps: tuple[float, float] | None = None
        self._marks: Sequence[Mark] = ()
        self._step: int | None = None
        self._step_title, self._step_text, self._is_time = "step", _step_text, False
        self._is_restyle_due = False
        self._has_ring = False
        self.setProperty("role", "card")
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName(title)
        self.setAccessibleDescription(help)
        theme.signals.changed.connect(self._restyle_when_visible)

    def build(self) -> None:
        """Make what the card contains, once. Before that it is an empty card: making all of a page with thirty plots takes as long as all
        else of it."""
        if self.is_built:
            return
        self.is_built = True
        title = label(self.title, theme.heading_font())
        title.setToolTip(plain_tip(self.help))
        self._step_label = label(
            font=theme.figures_font(theme.CAPTION), role="caption", align=Qt.AlignmentFlag.AlignRight
        )
        self._log = button(LOG_OFFER, lambda: self.set_log(self._log.isChecked()))
        self._log.setCheckable(True)
        self._log.setProperty("role", "small")
        self._log.setFocusPolicy(Qt.FocusPolicy.NoFocus)  # the menu has it for the keyboard; a stop less for Tab
        self._log.setAccessibleName(f"Logarithmic axis of {self.title}")
        self._log.setChecked(self._log_wanted)
        self._log.hide()
        self._legend = Legend()
        self._legend.clicked.connect(self.toggle_curve)
        self._body = NestedStack(self)
        self._body.addWidget(self._build_placeholder())
        head = QHBoxLayout()
        head.addWidget(title, 1)
        head.addWidget(self._step_label)
        head.addWidget(self._log)
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 10, 10, 6)
        column.setSpacing(4)
        column.addLayout(head)
        column.addWidget(self._legend)
        column.addLayout(self._body, 1)
        self.setTabOrder(self, self._offer)  # made later than the rest of the page, at whose end Qt has put it

    def _build_placeholder(self) -> QWidget:
        self._placeholder = QWidget()
        self._waiting = label(role="muted", wrap=True, align=Qt.AlignmentFlag.AlignCenter)
        self._offer = LinkButton("")
        self._offer.clicked.connect(self.offer_taken)
        self._offer.hide()
        column = QVBoxLayout(self._placeholder)
        column.setContentsMargins(0, 0, 0, 0)
        column.addStretch()
        column.addWidget(self._waiting)
        column.addWidget(self._offer, 0, Qt.AlignmentFlag.AlignHCenter)
        column.addStretch()
        return self._placeholder

    # ── drawing ─────────────────────────────────────────────────────────────────────────────────

    def show_traces(
        self, traces: Sequence[Trace], waiting: str = "", marks: Sequence[Mark] = (), offer: str = ""
    ) -> None:
        """Draw these curves and marks; `waiting` is the sentence in their place while none of them has a number, and `offer` a link below
        it."""
        self.build()
        self.traces, self._marks = traces, marks
        if not any(trace.has_data for trace in traces):
            self._waiting.setText(waiting)
            self._offer.setText(offer)
            self._offer.setVisible(bool(offer))
            self._body.setCurrentWidget(self._placeholder)
            self._legend.show_entries(())
            self._step_label.setText("")
            self._log.hide()
            return
        self._draw(self._ready_view())

    def _show_again(self) -> None:
        if self.is_built:
            self.show_traces(self.traces, self._waiting.text(), self._marks, self._offer.text())

    def _draw(self, view: PlotView) -> None:
        shown = self.visible_traces()
        self._body.setCurrentWidget(view)
        view.set_step_axis(self._step_title, self._step_text, is_time=self._is_time)
        self._offer_log(shown)
        drawn = shown if self.is_log else pile(shown)  # on a logarithmic axis heights do not add up
        view.draw(drawn, self._span or self._all_steps, self._smoothing, log=self.is_log)
        view.set_marks(self._marks)
        view.set_step(self._step)
        self._show_values()

    def visible_traces(self) -> list[Trace]:
        """The traces that are not hidden; all of them if every one is, for an empty plot shows nothing."""
        return [trace for trace in self.traces if trace.label not in self.hidden] or list(self.traces)

    def toggle_curve(self, name: str) -> None:
        """Hide the curve with this label, or show it again."""
        self.hidden ^= {name}
        self._show_again()

    def _offer_log(self, shown: Sequence[Trace]) -> None:
        """Show the button while the axis is logarithmic, or a spike presses the curves flat."""
        self._log.setVisible(self.is_log or has_spike(*(trace.y for trace in shown)))

    @property
    def is_log(self) -> bool:
        return self._log_wanted and self.can_be_log

    @property
    def can_be_log(self) -> bool:
        """Whether any value is above 0: others have no place on a logarithmic axis."""
        return any(bool((trace.y > 0).any()) for trace in self.visible_traces())

    def set_log(self, on: bool) -> None:
        """Make the value axis logarithmic, or linear again."""
        self._log_wanted = on
        if self.is_built:
            self._log.setChecked(on)
        self._show_again()
        self.log_changed.emit(on)

    def set_smoothing(self, weight: float) -> None:
        """Decay of the moving average, 0 (off) to below 1; the raw line stays, faint. Takes effect when drawn next."""
        self._smoothing = weight

    def set_span(self, span: tuple[float, float] | None, all_steps: tuple[float, float] | None = None) -> None:
        """The steps to show: a selected range, else the run's, else those of the traces. Takes effect when drawn next."""
        self._span, self._all_steps = span, all_steps

    def set_step_axis(self, title: str, text: Callable[[int], str], *, is_time: bool = False) -> None:
        """What the horizontal axis counts, where that is no step; `text(position)` names a position. `is_time`: seconds. Takes effect when
        drawn next."""
        self._step_title, self._step_text, self._is_time = title, text, is_time

    def set_step(self, step: int | None) -> None:
        """Mark a step and show the values there in the legend; None goes back to the newest values."""
        if step != self._step:  # the grid passes every move of the pointer on to every plot
            self._step = step
            # While the placeholder is shown there are no curves to read values from.
            if self._view is not None and self._body.currentWidget() is self._view:
                self._view.set_step(step)
                self._show_values()

    def _show_values(self) -> None:
        self._step_label.setText(self._span_text() if self._step is None else self._step_text(self._step))
        here = " ".join(mark.sentence for mark in self._marks if mark.step == self._step)
        entries = [
            LegendEntry(trace.pen, trace.label, figure(trace.at(self._step), self.unit), trace.label in self.hidden)
            for trace in self.traces
        ]
        self._legend.show_entries(entries)
        values = ", ".join(f"{entry.label} {entry.value}" for entry in entries if not entry.hidden)
        self.setAccessibleName(" · ".join(filter(None, (self.title, self._step_label.text(), values, here))))

    def _span_text(self) -> str:
        """The selected range in words; empty where there is none."""
        if self._span is None:
            return ""
        first, last = map(round, self._span)
        if self._step_title == "step":
            return f"steps {first:,} – {last:,}"
        return f"{self._step_text(first)} – {self._step_text(last)}"

    def _ready_view(self) -> PlotView:
        """The pyqtgraph view, created on the first call: a run has data for some of the charts only."""
        if self._view is None:
            self._view = PlotView(self.axis, self.unit)
            self._view.hovered.connect(self._emit_hovered)
            self._view.point_clicked.connect(self._emit_chosen)
            self._view.span_chosen.connect(self.zoomed)
            self._body.addWidget(self._view)
        return self._view

    def _nearest_step(self, x: float | None) -> int | None:
        steps = steps_of(self.traces)
        i = None if x is None else nearest_index(steps, x)
        return None if i is None else int(steps[i])

    def _emit_hovered(self, x: float | None) -> None:
        self.hovered.emit(self._nearest_step(x))

    def _emit_chosen(self, x: float) -> None:
        step = self._nearest_step(x)
        if step is not None:
            self.step_chosen.emit(step)

    def _restyle_when_visible(self) -> None:
        """Take the theme's colours: now if the plot is visible, else before it is painted next.

        Restyling every plot in one handler would block the window for longer than a change of theme may take.
        """
        self._is_restyle_due = self._view is not None
        if not self.visibleRegion().isEmpty():
            self._restyle()

    def _restyle(self) -> None:
        if self._is_restyle_due and self._view is not None:
            self._is_restyle_due = False
            self._view.restyle()
            self._show_again()

    def paintEvent(self, event: QPaintEvent) -> None:
        self._restyle()  # does nothing unless the theme changed while this plot was out of view
        super().paintEvent(event)
        if self._has_ring:
            paint_ring(self, CORNER)

    def leaveEvent(self, event: QEvent) -> None:
        super().leaveEvent(event)
        self.hovered.emit(None)

    # ── keyboard ────────────────────────────────────────────────────────────────────────────────

    def focusInEvent(self, event: QFocusEvent) -> None:
        super().focusInEvent(event)
        self._has_ring = event.reason() in BY_KEYBOARD
        self.update()

    def focusOutEvent(self, event: QFocusEvent) -> None:
        super().focusOutEvent(event)
        self._has_ring = False
        self.update()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        key = Qt.Key(event.key())
        if event.matches(QKeySequence.StandardKey.Copy):
            self.copy()
        elif key in (Qt.Key.Key_Left, Qt.Key.Key_Right, Qt.Key.Key_Home, Qt.Key.Key_End):
            self._move_step(key)
        elif key in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and self._step is not None:
            self.step_chosen.emit(self._step)
        elif key == Qt.Key.Key_Escape and (self._step is not None or self._span is not None):
            (self.zoomed if self._step is None else self.hovered).emit(None)
        else:
            super().keyPressEvent(event)

    def _move_step(self, key: Qt.Key) -> None:
        """Mark the step before or after the marked one, or the first or last that is shown; the first key marks the last one."""
        steps = steps_of(self.traces)
        if self._span is not None:
            steps = steps[(steps >= self._span[0]) & (steps <= self._span[1])]
        at = nearest_index(steps, self._step) if self._step is not None else None
        if len(steps) == 0:
            return
        last = len(steps) - 1
        if key == Qt.Key.Key_Home:
            at = 0
        elif key == Qt.Key.Key_End or at is None:
            at = last
        else:
            at = max(0, at - 1) if key == Qt.Key.Key_Left else min(last, at + 1)
        self.hovered.emit(int(steps[at]))

    # ── menu ────────────────────────────────────────────────────────────────────────────────────

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        self.menu().popup(event.globalPos())  # returns immediately; exec would run an event loop inside this handler

    def menu(self) -> QMenu:
        """What can be done with this chart, made anew at each call."""
        menu = QMenu(self)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        has_data = any(trace.has_data for trace in self.traces)
        menu.addAction("Copy values as CSV", QKeySequence.StandardKey.Copy, self.copy)
        menu.addAction("Copy image", lambda: QGuiApplication.clipboard().setPixmap(self.grab()))
        for name, text in FORMATS.items():
            menu.addAction(f"Save as {text}…", lambda name=name: self.save_requested.emit(name))
        for action in menu.actions():
            action.setEnabled(has_data)
        menu.addSeparator()
        completions = menu.addAction("Completions of this step", lambda: self.step_chosen.emit(self._step))
        completions.setEnabled(self._step is not None)
        log = menu.addAction("Logarithmic axis", lambda: self.set_log(not self._log_wanted))
        log.setCheckable(True)
        log.setChecked(self.is_log)
        log.setEnabled(has_data and self.can_be_log)
        show_all = menu.addAction("Show all steps", lambda: self.zoomed.emit(None))
        show_all.setEnabled(self._span is not None)
        if place_about(self):
            menu.addSeparator()
            menu.addAction("About this chart", self.explanation_requested.emit)
        if len(self.traces) > 1:
            menu.addSeparator()
            for trace in self.traces:
                action = menu.addAction(trace.label, lambda name=trace.label: self.toggle_curve(name))
                action.setCheckable(True)
                action.setChecked(trace.label not in self.hidden)
        return menu

    def as_csv(self) -> str:
        """The chart's data: a row for each step, a column for each curve and each edge of a band."""
        text = io.StringIO()
        write_table(self.traces, text)
        return text.getvalue()

    def copy(self) -> None:
        """Put the values on the clipboard, as CSV."""
        QGuiApplication.clipboard().setText(self.as_csv())


def _step_text(step: int) -> str:
    return f"step {step:,}"
