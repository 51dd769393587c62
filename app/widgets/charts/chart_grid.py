"""A scrolling grid of plots. A refresh redraws only the visible ones, one per turn of the event loop.

It knows neither runs nor metrics: callbacks supply the traces of a plot when it is about to be drawn. A step that is
hovered in one plot is marked in all; a range of steps selected in one is shown in all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PySide6.QtCore import QEvent, QObject, QTimer
from PySide6.QtGui import QResizeEvent, QShowEvent
from PySide6.QtWidgets import QFrame, QGridLayout, QScrollArea, QWidget

from app import theme
from app.widgets.basic.layout import reserve_gutter
from app.widgets.charts.plot import Plot, Trace

PLOT_HEIGHT = 214
MIN_WIDTH, COMFORTABLE_WIDTH = 300, 440
"""Narrowest plot with up to three columns; and with four, which only a wide window gets."""
MAX_COLUMNS = 4
TURN_MS = 12
"""Pause between two plots of one refresh, in which the event loop handles input."""


@dataclass(frozen=True, slots=True)
class ChartContent:
    """What a plot shows: its traces, and the sentence in their place while none of them has a number."""

    traces: Sequence[Trace] = ()
    waiting: str = ""


class ChartGrid(QScrollArea):
    """Plots in rows of one to four.

    `content_of(i)` returns what plot `i` shows now, `is_included(i)` whether it is in the grid at all.

    Attributes:
        plots – all plots, in order.
    """

    def __init__(
        self, plots: Sequence[Plot], content_of: Callable[[int], ChartContent], is_included: Callable[[int], bool]
    ) -> None:
        super().__init__()
        self.plots = list(plots)
        self._content_of, self._is_included = content_of, is_included
        self._stale: set[int] = set()
        self._span: tuple[float, float] | None = None
        self._all_steps: tuple[float, float] | None = None
        self._laid_out: tuple[int, tuple[int, ...]] = (0, ())
        # One plot per timeout: all visible ones in a single handler would hold up input for the time of the whole refresh.
        self._turns = QTimer(self, interval=TURN_MS)
        self._turns.timeout.connect(self._draw_next)
        self._build()

    def _build(self) -> None:
        self._page = QWidget()
        self._page.setObjectName("page")
        self._grid = QGridLayout(self._page)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setSpacing(theme.SPACE)
        self.setWidget(self._page)
        self.setWidgetResizable(True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setAccessibleName("Charts")
        for plot in self.plots:
            plot.setParent(self._page)
            plot.setFixedHeight(theme.scaled(PLOT_HEIGHT))
            plot.hide()
            plot.hovered.connect(self._mark_step)
            plot.zoomed.connect(self._zoom)
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
        self._span = None

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        reserve_gutter(self, self._grid)
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
                self._stale.discard(i)
                content = self._content_of(i)
                plot.set_span(self._span, self._all_steps)
                plot.show_traces(content.traces, content.waiting)
                return
        self._turns.stop()

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

    def _zoom(self, span: tuple[float, float] | None) -> None:
        self._span = span
        self.refresh(self._all_steps)
