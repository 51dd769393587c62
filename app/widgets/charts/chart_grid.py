"""A scrolling grid of plots that stays quick: only what can be seen is redrawn, one plot at a time, and only for news.

It knows neither runs nor metrics: somebody supplies the traces of a plot when it is its turn. Pointing at a step in one
plot marks it in all; a span of steps chosen in one is shown in all.
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
NARROWEST, USUAL = 300, 440
"""Width below which a plot has no use for one column more; and below which three columns are enough."""
MAX_COLUMNS = 4
TURN_MS = 12
"""Between two plots of one refresh: the event loop gets a turn after each."""


@dataclass(frozen=True, slots=True)
class ChartContent:
    """What a plot is to show now; `waiting` is its sentence while there is nothing to draw."""

    traces: Sequence[Trace] = ()
    waiting: str = ""


class ChartGrid(QScrollArea):
    """Plots in rows of one to four.

    `supply(place)` says what the plot at a place is to show, `wanted(place)` whether it takes part at all.
    """

    def __init__(
        self, plots: Sequence[Plot], supply: Callable[[int], ChartContent], wanted: Callable[[int], bool]
    ) -> None:
        super().__init__()
        self.plots = list(plots)
        self._supply, self._wanted = supply, wanted
        self._stale: set[int] = set()
        self._span: tuple[float, float] | None = None
        self._whole: tuple[float, float] | None = None
        self._placed: tuple[int, tuple[int, ...]] = (0, ())
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
            plot.hovered.connect(self._mark)
            plot.zoomed.connect(self._zoom)
            plot.installEventFilter(self)

    def refresh(self, whole: tuple[float, float] | None = None) -> None:
        """There is news: draw again what can be seen, and the rest when it comes into view. `whole` is the run's steps."""
        self._whole = whole
        self._place()
        self._stale = set(range(len(self.plots)))
        self._turns.start()

    def set_smoothing(self, weight: float) -> None:
        for plot in self.plots:
            plot.set_smoothing(weight)
        self.refresh(self._whole)

    def forget_span(self) -> None:
        """Show all steps again."""
        self._span = None

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        reserve_gutter(self, self._grid)
        self._place()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._turns.start()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        # A plot that scrolls into view is painted; should it be stale, its turn comes now.
        if event.type() in (QEvent.Type.Paint, QEvent.Type.Resize) and self._stale and not self._turns.isActive():
            self._turns.start()
        return False

    def _draw_next(self) -> None:
        for place in sorted(self._stale):
            plot = self.plots[place]
            if plot.isVisible() and not plot.visibleRegion().isEmpty():
                self._stale.discard(place)
                shown = self._supply(place)
                plot.set_span(self._span, self._whole)
                plot.show_traces(shown.traces, shown.waiting)
                return
        self._turns.stop()

    def _place(self) -> None:
        """Put the wanted plots into as many columns as the width allows; nothing moves when nothing changed."""
        columns = self._columns()
        wanted = tuple(place for place in range(len(self.plots)) if self._wanted(place))
        if (columns, wanted) == self._placed:
            return
        self._placed = (columns, wanted)
        for plot in self.plots:
            self._grid.removeWidget(plot)
        for at, place in enumerate(wanted):
            self._grid.addWidget(self.plots[place], at // columns, at % columns)
        for place, plot in enumerate(self.plots):
            plot.setVisible(place in wanted)
        for column in range(MAX_COLUMNS):
            self._grid.setColumnStretch(column, 1 if column < columns else 0)
        rows = -(-len(wanted) // columns)
        for row in range(self._grid.rowCount() + 1):
            self._grid.setRowStretch(row, 1 if row == rows else 0)
        self._stale |= set(wanted)
        self._turns.start()

    def _columns(self) -> int:
        room = self.width() - theme.GUTTER + theme.SPACE
        fitting, roomy = (room // (theme.scaled(least) + theme.SPACE) for least in (NARROWEST, USUAL))
        return max(1, min(MAX_COLUMNS, max(roomy, min(fitting, MAX_COLUMNS - 1))))

    def _mark(self, step: int | None) -> None:
        for plot in self.plots:
            if plot.isVisible():
                plot.set_step(step)

    def _zoom(self, span: tuple[float, float] | None) -> None:
        self._span = span
        self.refresh(self._whole)
