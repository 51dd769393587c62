"""One chart: a card with a title, a legend with the newest values, and curves over steps.

Which metrics share a chart is decided in `app.model.charts`, when to redraw in the chart grid. The pyqtgraph view is
created when the card first has something to draw.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from PySide6.QtCore import QEvent, Qt, Signal
from PySide6.QtGui import QContextMenuEvent, QGuiApplication, QKeyEvent, QKeySequence, QPaintEvent, QPen
from PySide6.QtWidgets import QFileDialog, QFrame, QHBoxLayout, QMenu, QSizePolicy, QStackedLayout, QVBoxLayout

from app import theme
from app.widgets.basic.labels_and_buttons import label
from app.widgets.basic.number_format import figure
from app.widgets.charts.legend import Legend, LegendEntry
from app.widgets.charts.plot_view import PlotView

EMPTY = np.empty(0)


@dataclass(frozen=True, slots=True)
class Trace:
    """One curve: steps `x` `[n]`, ascending; values `y` `[n]`, NaN in gaps; optionally a band from `low` to `high` `[n]`.

    `colour` is a role of the palette, or `reward:N` for the colour of reward function N.
    """

    label: str
    colour: str
    x: np.ndarray = field(default_factory=lambda: EMPTY)
    y: np.ndarray = field(default_factory=lambda: EMPTY)
    low: np.ndarray | None = None
    high: np.ndarray | None = None

    @property
    def has_data(self) -> bool:
        return bool(np.isfinite(self.y).any())

    @property
    def pen(self) -> QPen:
        kind, _, index = self.colour.partition(":")
        return theme.reward_pen(int(index)) if kind == "reward" else QPen(getattr(theme.palette(), self.colour))

    def at(self, step: int | None) -> float | None:
        """The value at exactly `step`, None if there is none; with `step` None the newest of the last 64 values."""
        if step is None:
            finite = np.flatnonzero(np.isfinite(self.y[-64:]))
            return float(self.y[-64:][finite[-1]]) if len(finite) else None
        i = nearest_index(self.x, step)
        return float(self.y[i]) if i is not None and self.x[i] == step else None


def nearest_index(x: np.ndarray, step: float) -> int | None:
    """The index in `x` (ascending) of the value closest to `step`; None if `x` is empty."""
    if len(x) == 0:
        return None
    right = int(np.searchsorted(x, step))
    neighbours = [i for i in (right - 1, right) if 0 <= i < len(x)]
    return min(neighbours, key=lambda i: abs(float(x[i]) - step))


class Plot(QFrame):
    """A chart card.

    Attributes:
        title, axis, unit – of the chart, its value axis, and the values.
        traces – what is shown now.

    Signals:
        hovered(step as int, or None) – the pointer is over a step, or has left the plot.
        zoomed((first, last), or None) – a range of steps was selected, or all steps again.
    """

    hovered = Signal(object)
    zoomed = Signal(object)

    def __init__(self, title: str, axis: str = "", unit: str = "", help: str = "") -> None:
        super().__init__()
        self.title, self.axis, self.unit = title, axis, unit
        self.traces: Sequence[Trace] = ()
        self._view: PlotView | None = None
        self._smoothing = 0.0
        self._span: tuple[float, float] | None = None
        self._all_steps: tuple[float, float] | None = None
        self._step: int | None = None
        self._is_restyle_due = False
        self.setProperty("role", "card")
        self.setFocusPolicy(Qt.FocusPolicy.ClickFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName(title)
        self._build(help)
        theme.signals.changed.connect(self._restyle_when_visible)

    def _build(self, help: str) -> None:
        title = label(self.title, theme.heading_font())
        title.setToolTip(help)
        self._step_label = label(
            font=theme.figures_font(theme.CAPTION), role="caption", align=Qt.AlignmentFlag.AlignRight
        )
        self._legend = Legend()
        self._waiting = label(role="muted", wrap=True, align=Qt.AlignmentFlag.AlignCenter)
        self._body = QStackedLayout()
        self._body.addWidget(self._waiting)
        head = QHBoxLayout()
        head.addWidget(title, 1)
        head.addWidget(self._step_label)
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 10, 10, 6)
        column.setSpacing(4)
        column.addLayout(head)
        column.addWidget(self._legend)
        column.addLayout(self._body, 1)

    # ── drawing ─────────────────────────────────────────────────────────────────────────────────

    def show_traces(self, traces: Sequence[Trace], waiting: str = "") -> None:
        """Draw these curves; `waiting` is the sentence in their place while none of them has a number."""
        self.traces = traces
        if not any(trace.has_data for trace in traces):
            self._waiting.setText(waiting)
            self._body.setCurrentWidget(self._waiting)
            self._legend.show_entries(())
            return
        view = self._ready_view()
        self._body.setCurrentWidget(view)
        view.draw(traces, self._span or self._all_steps, self._smoothing)
        view.mark(self._step)
        self._show_values()

    def set_smoothing(self, weight: float) -> None:
        """Decay of the moving average, 0 (off) to below 1; the raw line stays, faint. Takes effect when drawn next."""
        self._smoothing = weight

    def set_span(self, span: tuple[float, float] | None, all_steps: tuple[float, float] | None = None) -> None:
        """The steps to show: a selected range, else the run's, else those of the traces. Takes effect when drawn next."""
        self._span, self._all_steps = span, all_steps

    def set_step(self, step: int | None) -> None:
        """Mark a step and show the values there in the legend; None goes back to the newest values."""
        if step != self._step:  # the grid passes every move of the pointer on to every plot
            self._step = step
            # While the placeholder is shown there are no curves to read values from.
            if self._view is not None and self._body.currentWidget() is self._view:
                self._view.mark(step)
                self._show_values()

    def _show_values(self) -> None:
        self._step_label.setText("" if self._step is None else f"step {self._step:,}")
        self._legend.show_entries(
            [LegendEntry(trace.pen, trace.label, figure(trace.at(self._step), self.unit)) for trace in self.traces]
        )

    def _ready_view(self) -> PlotView:
        """The pyqtgraph view, created on the first call: a run has data for some of the charts only."""
        if self._view is None:
            self._view = PlotView(self.axis, self.unit)
            self._view.setFocusProxy(self)  # the card handles the keys, so a click on the view must focus the card
            self._view.hovered.connect(self._emit_hovered)
            self._view.span_chosen.connect(self.zoomed)
            self._body.addWidget(self._view)
        return self._view

    def _emit_hovered(self, x: float | None) -> None:
        # Steps of the longest trace: a metric that appeared later has none on the left.
        steps = max((trace.x for trace in self.traces), key=len, default=EMPTY)
        i = None if x is None else nearest_index(steps, x)
        self.hovered.emit(None if i is None else int(steps[i]))

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
            self.show_traces(self.traces, self._waiting.text())

    def paintEvent(self, event: QPaintEvent) -> None:
        self._restyle()  # does nothing unless the theme changed while this plot was out of view
        super().paintEvent(event)

    def leaveEvent(self, event: QEvent) -> None:
        super().leaveEvent(event)
        self.hovered.emit(None)

    # ── copying ─────────────────────────────────────────────────────────────────────────────────

    def as_csv(self) -> str:
        """The chart's data: a row for each step, a column for each curve and each edge of a band."""
        columns = [part for trace in self.traces for part in _columns(trace)]
        steps = sorted({int(step) for trace in self.traces for step in trace.x})
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["step", *(name for name, _ in columns)])
        writer.writerows([step, *(_cell(values.get(step)) for _, values in columns)] for step in steps)
        return text.getvalue()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.matches(QKeySequence.StandardKey.Copy):
            self.copy()
        else:
            super().keyPressEvent(event)

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        menu = QMenu(self)
        copy = menu.addAction("Copy values as CSV", self.copy)
        copy.setShortcut(QKeySequence.StandardKey.Copy)
        menu.addAction("Copy image", lambda: QGuiApplication.clipboard().setPixmap(self.grab()))
        menu.addAction("Save image…", self._save_image)
        menu.addSeparator()
        show_all = menu.addAction("Show all steps", lambda: self.zoomed.emit(None))
        show_all.setEnabled(self._span is not None)
        for action in menu.actions()[:3]:
            action.setEnabled(any(trace.has_data for trace in self.traces))
        menu.popup(event.globalPos())  # returns immediately; exec would run an event loop inside this handler

    def copy(self) -> None:
        """Put the values on the clipboard, as CSV."""
        QGuiApplication.clipboard().setText(self.as_csv())

    def _save_image(self) -> None:
        path, _ = QFileDialog.getSaveFileName(self, "Save image", f"{self.title}.png", "PNG images (*.png)")
        if path:
            self.grab().save(path)


def _columns(trace: Trace) -> list[tuple[str, dict[int, float]]]:
    parts = [(trace.label, trace.y), (f"{trace.label} low", trace.low), (f"{trace.label} high", trace.high)]
    steps = [int(step) for step in trace.x]
    return [(name, dict(zip(steps, values.tolist(), strict=True))) for name, values in parts if values is not None]


def _cell(value: float | None) -> str:
    """An empty cell for a gap (None or NaN); else the shortest text that reads back as the same float."""
    return "" if value is None or value != value else repr(value)
