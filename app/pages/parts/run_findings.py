"""The health cards of the run on show, connected: what they show, how much room they take, and what their buttons do."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QWidget

from app import theme
from app.model.completions.filters import FILTERS
from app.model.guide import place_of_rule
from app.model.runs.findings import Findings, take_up
from app.model.runs.run import Run
from app.model.session import Session
from app.widgets.monitor.health_cards import HealthCards
from backend.spec.faults import Mistake
from backend.spec.health.episodes import Episode

ROW_OF_CHARTS = 176
"""Pixels of a row of charts at its lowest."""
TALL_PAGE = 680
"""Height of a page from which on two rows of charts stay in view beside the cards; below it one does."""


class RunFindings(QObject):
    """Fills `cards` with the findings of a run.

    Attributes:
        cards – the widget that a page places.
    """

    def __init__(self, session: Session, page: QWidget) -> None:
        super().__init__(page)
        self._session = session
        self._page = page
        self._run: Run | None = None
        self._findings = Findings()
        self.cards = HealthCards()
        self.cards.completions_requested.connect(self._read_completions)
        self.cards.setting_requested.connect(self._show_setting)
        self.cards.proposal_taken.connect(self._take_up)
        self.cards.guide_requested.connect(lambda code: self._session.guide_requested.emit(place_of_rule(code)))
        self.cards.dismissed.connect(self._dismiss)

    def show_run(self, run: Run | None, beside: Sequence[QWidget] = ()) -> None:
        """Show what is found in this run. `beside`: the page's other widgets above and below the charts."""
        if run is not self._run:
            self._run, self._findings = run, Findings()
            self.cards.unfold(False)
        if beside:
            self._fit(beside)
        self.cards.show_episodes(self._findings.of(run) if run is not None else [])

    def _fit(self, beside: Sequence[QWidget]) -> None:
        width = self._page.width() - 2 * theme.GUTTER
        taken = sum(_height(widget, width) + theme.SPACE for widget in beside if not widget.isHidden())
        row = theme.scaled(ROW_OF_CHARTS)
        room = self._page.height() - 2 * theme.GUTTER - theme.SPACE - taken - row
        second = row + theme.SPACE if self._page.height() >= TALL_PAGE else 0
        self.cards.set_room(room - second, max(room, row // 2))

    def _read_completions(self, step: int, rule: str) -> None:
        self._session.page_requested.emit("completions")
        # Filters that show just what a rule is about have its name.
        self._session.completions_requested.emit(step, rule if rule in FILTERS else None)

    def _show_setting(self, key: str) -> None:
        self._session.page_requested.emit("train")
        self._session.field_requested.emit(key)

    def _take_up(self, settings: dict[str, object]) -> None:
        try:
            take_up(self._session, self._run, settings)
        except Mistake as mistake:
            self._session.message.emit(mistake.faults[0].sentence)

    def _dismiss(self, episode: Episode) -> None:
        self._findings.dismiss(episode)
        self.show_run(self._run)


def _height(widget: QWidget, width: int) -> int:
    return widget.heightForWidth(width) if widget.hasHeightForWidth() else widget.sizeHint().height()
