"""A scrolling grid of plots. A refresh redraws only the visible ones, one per turn of the event loop; the others are built in the turns after.

It knows neither runs nor metrics: callbacks supply the traces of a plot when it is about to be drawn. A step that is
hovered in one plot is marked in all; a range of steps selected in one is shown in all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PySide6.QtCore import QEvent, QObject, QTimer, Signal
from PySide6.QtGui import QResizeEvent, QShowEvent
from PySide6.QtWidgets import QApplication, QGridLayout, QPushButton, QWidget

from app import theme
from app.state.run_state import Mark
from app.widgets.basic.layout import TabArea, reserve_gutter
from app.widgets.charts.plot import Plot, Trace

PLOT_HEIGHT, LOWEST = 214, 176
"""The height of a plot that is aimed at, and the least: whole rows fill the height that there is, and two of them at least."""
MIN_WIDTH, COMFORTABLE_WIDTH = 300, 440
"""Narrowest plot with up to three columns; and with four, which only a wide window gets."""
MAX_COLUMNS = 4
TURN_MS = 12
"""Pause between two plots of one refresh, in which the event loop handles input."""


@dataclass(frozen=True, slots=True)
class ChartContent:
    """What a plot shows: its traces, and the sentence in their place while none of them has a number, with a link below it."""

    traces: Sequence[Trace] = ()
    waiting: str = ""
    marks: Sequence[Mark] = ()
    offer: str = ""


class ChartGrid(TabArea):
    """Plots in rows of one to four.

    `content_of(i)` returns what plot `i` shows now, `is_included(i)` whether it is in the grid at all.

    Attributes:
        plots – all plots, in order.
        span – the first and last step of the selected range; None while all steps are shown.

    Signals:
        zoomed((first, last), or None) – the range of steps that all plots show now.
        step_chosen(int) – a point of a curve was clicked: show what is behind it.
        save_requested(Plot, str) – save this plot as a file of this format.
    """

    zoomed = Signal(object)
    step_chosen = Signal(int)
    save_requested = Signal(object, str)

    def __init__(
        self, plots: Sequence[Plot], content_of: Callable[[int], ChartContent], is_included: Callable[[int], bool]
    ) -> None:
        super().__init__()
        self.plots = list(plots)
        self._content_of, self._is_included = content_of, is_included
        self._stale: set[int] = set()
        self.span: tuple[float, float] | None = None
        self._all_steps: tuple[float, float] | None = None
        self._laid_out: tuple[int, tuple[int, ...]] = (0, ())
        # One plot per timeout: all visible ones in a single handler would hold up input for the time of the whole refresh.
        self._turns = QTimer(self, interval=TURN_MS)
        self._turns.timeout.connect(self._draw_next)
        # A click on a zoomed plot may be the first half of a double click, which shows all steps.
        self._click = QTimer(self, singleShot=True)
        self._clicked_step = 0
        self._click.timeout.connect(lambda: self.step_chosen.emit(self._clicked_step))
        self._build()

    def _build(self) -> None:
        self._page = QWidget()
        self._page.setObjectName("page")
        self._grid = QGridLayout(self._page)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setSpacing(theme.SPACE)
        self.setWidget(self._page)
        self.setAccessibleName("Charts")
        for plot in self.plots:
            plot.setParent(self._page)
            plot.setFixedHeight(theme.scaled(PLOT_HEIGHT))
            plot.hide()
            plot.hovered.connect(self._mark_step)
            plot.zoomed.connect(self.zoom)
            plot.step_chosen.connect(self._choose)
            plot.save_requested.connect(lambda format, plot=plot: self.save_requested.emit(plot, format))
            plot.installEventFilter(self)

    def refresh(self, all_steps: tuple[float, float] | None = None) -> None:
        """Redraw the visible plots now, and the others when they scroll into view.

        `all_steps` are the first and last step of the run. A refresh during a refresh starts over with the first plot.
        """
        self._all_steps = all_steps
        self._lay_out()
        self._stale = set(range(len(self.plots)))
        self._turns.start()

    def set_smoothing(self, weight: float) -> None:
        for plot in self.plots:
            plot.set_smoothing(weight)
        self.refresh(self._all_steps)

    def forget_span(self) -> None:
        """Show all steps again, from the next refresh on."""
        self.span = None
        self.zoomed.emit(None)

    def zoom(self, span: tuple[float, float] | None) -> None:
        """Show this range of steps in all plots, as far as there are steps; None and a range of all of them show all."""
        self._click.stop()
        self.span = self._within_run(span)
        self.zoomed.emit(self.span)
        self.refresh(self._all_steps)

    def _within_run(self, span: tuple[float, float] | None) -> tuple[float, float] | None:
        """The span moved, not cut, into the steps that there are; None where it holds them all."""
        if span is None or self._all_steps is None:
            return span
        first, last = self._all_steps
        width = max(2.0, span[1] - span[0])
        if width >= last - first:
            return None
        start = min(max(span[0], first), last - width)
        return start, start + width

    def included_plots(self) -> list[Plot]:
        """The plots in the grid, in view or not."""
        return [plot for i, plot in enumerate(self.plots) if self._is_included(i)]

    def draw(self, plot: Plot) -> None:
        """Draw a plot now, in view or not, with its newest traces."""
        self._draw(self.plots.index(plot))

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        reserve_gutter(self, self._grid)
        self._fit_height()
        self._lay_out()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._turns.start()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        # Qt has no signal for scrolling into view, but it paints what does; if it is stale, it is redrawn.
        if event.type() in (QEvent.Type.Paint, QEvent.Type.Resize) and self._stale and not self._turns.isActive():
            self._turns.start()
        return False

    def _draw_next(self) -> None:
        for i in sorted(self._stale):
            plot = self.plots[i]
            # isVisible alone is true of a plot that is scrolled out of view; its visible region is then empty.
            if plot.isVisible() and not plot.visibleRegion().isEmpty():
                self._draw(i)
                return
        if self.isVisible():
            for plot in self.plots:
                if not plot.is_built and not plot.isHidden():
                    plot.build()  # so that what scrolls into view has its title at once
                    return
        self._turns.stop()

    def _draw(self, i: int) -> None:
        self._stale.discard(i)
        content = self._content_of(i)
        self.plots[i].set_span(self.span, self._all_steps)
        self.plots[i].show_traces(content.traces, content.waiting, content.marks, content.offer)

    def _lay_out(self) -> None:
        """Put the included plots into as many columns as the width allows; does nothing when that has not changed."""
        columns = self._column_count()
        included = tuple(i for i in range(len(self.plots)) if self._is_included(i))
        if (columns, included) == self._laid_out:
            return
        self._laid_out = (columns, included)
        for plot in self.plots:
            self._grid.removeWidget(plot)
        for cell, i in enumerate(included):
            self._grid.addWidget(self.plots[i], cell // columns, cell % columns)
        for i, plot in enumerate(self.plots):
            plot.setVisible(i in included)
        # A QGridLayout never shrinks: columns and rows of an earlier layout stay, and must not stretch any more.
        for column in range(MAX_COLUMNS):
            self._grid.setColumnStretch(column, 1 if column < columns else 0)
        rows = -(-len(included) // columns)
        for row in range(self._grid.rowCount() + 1):
            self._grid.setRowStretch(row, 1 if row == rows else 0)  # the row below the last takes the spare height
        self._stale |= set(included)
        self._turns.start()

    def _column_count(self) -> int:
        width = self.width() - theme.GUTTER + theme.SPACE
        fitting, comfortable = (
            width // (theme.scaled(least) + theme.SPACE) for least in (MIN_WIDTH, COMFORTABLE_WIDTH)
        )
        return max(1, min(MAX_COLUMNS, max(comfortable, min(fitting, MAX_COLUMNS - 1))))

    def _mark_step(self, step: int | None) -> None:
        for plot in self.plots:
            if plot.isVisible():
                plot.set_step(step)

    def _choose(self, step: int) -> None:
        self._clicked_step = step
        if self.span is None:
            self.step_chosen.emit(step)
        else:
            self._click.start(QApplication.doubleClickInterval())

    def _fit_height(self) -> None:
        """Give every plot the height with which whole rows fill the view."""
        height = self.viewport().height()
        rows = max(2, round(height / (theme.scaled(PLOT_HEIGHT) + theme.SPACE)))
        fitting = (height - (rows - 1) * theme.SPACE) // rows
        tall = min(max(theme.scaled(LOWEST), fitting), theme.scaled(PLOT_HEIGHT) * 5 // 4)
        for plot in self.plots:
            if plot.height() != tall:
                plot.setFixedHeight(tall)


class ZoomButton(QPushButton):
    """Says which steps the plots of a grid show while that is not all of them, and shows all again."""

    def __init__(self, grid: ChartGrid) -> None:
        super().__init__()
        self.setToolTip("Show all steps (Esc, or a double click on a chart)")
        self.clicked.connect(lambda: grid.zoom(None))
        grid.zoomed.connect(self._show_span)
        self._show_span(grid.span)

    def _show_span(self, span: tuple[float, float] | None) -> None:
        self.setVisible(span is not None)
        if span is not None:
            self.setText(f"Steps {span[0]:,.0f} – {span[1]:,.0f}  ✕")
            self.setAccessibleName(f"Only steps {span[0]:,.0f} to {span[1]:,.0f} are shown. Show all steps")
