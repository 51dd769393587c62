"""Health findings of the run on show: a row for each, with its reason, its advice and what can be done about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtGui import QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QBoxLayout, QFrame, QVBoxLayout, QWidget

from app import theme
from app.state.completion_facts import FILTERS
from app.state.guide import place_of_rule
from app.state.messages import problems_to
from app.state.run import Run
from app.state.run_notices import findings_of, take_up
from app.state.session import Session
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.labels import label
from app.widgets.basic.layout import TabArea, clear_layout, column, configure, holder, paint_edge, row, set_shown
from app.widgets.basic.number_format import counted
from backend.config.config import SETTINGS
from backend.trainer.health.rules import RULES
from backend.trainer.health.watch import Episode

FOLDED = 2
NARROW = 860
ROWS_OF_CHARTS = 336
"""Height of the heading and two rows of charts, which stay in view."""
ROLES = {"error": "bad", "warning": "warning", "info": "accent"}


class HealthRow(QFrame):
    """One finding. `links` are its buttons."""

    def __init__(self, episode: Episode, actions: Sequence[tuple[str, str, Callable[[], object]]]) -> None:
        super().__init__()
        self.episode = episode
        self._is_current = episode.until is None
        self.setAccessibleName(f"{episode.title}, {when(episode)}")
        role = "" if self._is_current else "muted"
        title = label(episode.title, theme.heading_font(), role)
        advice = episode.advice if self._is_current else ""
        self.text = label(f"{episode.sentence} {advice}".strip(), role=role, wrap=True, selectable=True)
        self.links = [
            LinkButton(text, on_click=on_click, tip=tip, name=f"{text}: {episode.title}")
            for text, tip, on_click in actions
        ]
        head = row(title, (label(when(episode), theme.caption_font(), "caption"), 1))
        self._box = QBoxLayout(QBoxLayout.Direction.LeftToRight, self)
        self._box.setContentsMargins(theme.GUTTER, 4, 12, 4)
        self._box.setSpacing(theme.SPACE)
        self._box.addLayout(column(head, self.text, spacing=2), 1)
        links = holder(row(*self.links, spacing=2 * theme.SPACE))
        self._box.addWidget(links, 0, Qt.AlignmentFlag.AlignTop | Qt.AlignmentFlag.AlignLeft)

    def heightForWidth(self, width: int) -> int:
        directions = QBoxLayout.Direction
        self._box.setDirection(directions.TopToBottom if width < NARROW else directions.LeftToRight)
        return super().heightForWidth(width)

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        role = ROLES.get(self.episode.level, "warning") if self._is_current else "outline"
        paint_edge(self, getattr(theme.palette(), role), 6)


class HealthCards(QFrame):
    """The findings of a session's run, with what can be done about them. Hidden while there are none."""

    def __init__(self, session: Session, page: QWidget) -> None:
        super().__init__()
        self._session, self._page = session, page
        self._run: Run | None = None
        self._dismissed: set[tuple[str, int | None]] = set()  # code and first step
        self._episodes: list[Episode] = []
        self._rows: list[HealthRow] = []
        self._is_open = self._is_live = False
        self._room = self._open_room = 10_000
        self._layout: QVBoxLayout = column(spacing=0)
        content = holder(self._layout)
        self._area = TabArea(horizontalScrollBarPolicy=Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self._area.setWidget(content)
        for part in (self._area.viewport(), content):
            part.setAutoFillBackground(False)  # the card's own colour
        self.more = LinkButton("", on_click=lambda: self.unfold(not self._is_open))
        foot = row(self.more, None, margins=(theme.GUTTER, 0, 12, 2))
        column(self._area, foot, into=self, spacing=0, margins=(1, 2, 1, 2))
        configure(self, role="card", name="Health findings", shown=False)

    def show_episodes(self, episodes: Sequence[Episode], *, live: bool = False) -> None:
        if (list(episodes), live) != (self._episodes, self._is_live):  # new rows would take the button from the mouse
            self._episodes, self._is_live = list(episodes), live
            self._show_rows()

    def set_room(self, folded: int, unfolded: int) -> None:
        """Pixels that the cards may take, folded and unfolded."""
        if (folded, unfolded) != (self._room, self._open_room):
            self._room, self._open_room = folded, unfolded
            self._fit()

    def unfold(self, is_open: bool) -> None:
        if is_open != self._is_open:
            self._is_open = is_open
            self._show_rows()

    def rows(self) -> list[HealthRow]:
        return [row for row in self._rows if not row.isHidden()]

    def _show_rows(self) -> None:
        clear_layout(self._layout)
        current = [episode for episode in self._episodes if episode.until is None]
        self._rows = [
            HealthRow(episode, self._actions(episode))
            for episode in (self._episodes if self._is_open else current[:FOLDED])
        ]
        for shown in self._rows:
            self._layout.addWidget(shown)
        set_shown(self, bool(self._episodes))
        self._fit()

    def _actions(self, episode: Episode) -> list[tuple[str, str, Callable[[], object]]]:
        actions: list[tuple[str, str, Callable[[], object]]] = []
        is_current, session = episode.until is None, self._session
        if episode.since is not None:
            step = episode.since if episode.until is None else episode.until
            read = f"Read the completions of step {step}"
            # Filters that show just what a rule is about have its name.
            wanted = episode.rule if episode.rule in FILTERS else None
            actions.append(("Read completions", read, lambda: session.completions_requested.emit(step, wanted)))
        if is_current and episode.setting:
            show = f"Show {SETTINGS[episode.setting].label} in the form"
            actions.append(("Go to the setting", show, lambda: session.show_setting(episode.setting)))
        if is_current and episode.settings:
            text, full = f"Do it: {proposal(episode.settings)}", f"Set {proposal(episode.settings, full=True)}"
            actions.append((text, full, lambda: self._take_up(dict(episode.settings))))
        if episode.rule in RULES:  # an old event log may name a rule that was removed
            place, tip = place_of_rule(episode.rule), "What it means and what to do, step by step"
            actions.append(("Guide", tip, lambda: session.guide_requested.emit(place)))
        if episode.rule == "solved" and is_current and self._is_live:
            actions.append(("Stop the run", "Stops after this step and saves", lambda: session.send("stop")))
        actions.append(("Dismiss", "Hide this finding", lambda: self._dismiss(episode)))
        return actions

    def _fit(self) -> None:
        heights = [row.heightForWidth(max(1, self.width() - 2)) for row in self._rows]
        foot, count, total = theme.scaled(22), len(heights), len(self._episodes)
        while count and not self._is_open and sum(heights[:count]) + foot * (count < total) > self._room:
            count -= 1
        for index, shown in enumerate(self._rows):
            set_shown(shown, index < count)
        set_shown(self._area, count > 0)
        most = max(0, self._open_room - foot) if self._is_open else 10_000
        self._area.setFixedHeight(min(sum(heights[:count]), most))
        set_shown(self.more, self._is_open or count < total)
        if self._is_open:
            self.more.setText("Show less")
        elif count:
            self.more.setText(f"{total - count} more")
        else:
            what = counted(total, "finding")
            worst = next((episode for episode in self._episodes if episode.until is None), None)
            self.more.setText(
                f"{what}, the worst: {worst.title} {when(worst)}" if worst else f"{what} of earlier steps"
            )

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def show_run(self, run: Run | None, beside: Sequence[QWidget] = ()) -> None:
        """Show the findings of this run. `beside`: the page's other widgets above and below the charts."""
        if run is not self._run:
            self._run, self._dismissed = run, set()
            self.unfold(False)
        if beside:
            width = self._page.width() - 2 * theme.GUTTER
            heights = [
                part.heightForWidth(width) if part.hasHeightForWidth() else part.sizeHint().height()
                for part in beside
                if not part.isHidden()
            ]
            charts = theme.scaled(ROWS_OF_CHARTS)
            taken = sum(heights) + theme.SPACE * (len(heights) + 1) + charts // 2 + 2 * theme.GUTTER
            room = self._page.height() - taken
            self.set_room(room - charts // 2, max(room, charts // 4))
        live = run is not None and run.is_live
        self.show_episodes(findings_of(run, self._dismissed) if run is not None else [], live=live)

    def _take_up(self, settings: dict[str, object]) -> None:
        with problems_to(self._session.message.emit):
            take_up(self._session, self._run, settings)

    def _dismiss(self, episode: Episode) -> None:
        self._dismissed.add((episode.code, episode.since))
        self.show_run(self._run)


def when(episode: Episode) -> str:
    """“since step 12”, “step 12 until step 40”."""
    if episode.since is None:
        return ""
    since = f"step {episode.since:,}"
    return f"since {since}" if episode.until is None else f"{since} until step {episode.until:,}"


def proposal(settings: Mapping[str, Any], *, full: bool = False) -> str:
    """“Learning Rate 5e-05”; of a long text its label alone, unless `full`."""
    parts = []
    for key, value in settings.items():
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        is_short = full or not isinstance(value, str) or len(value) < 16
        parts.append(f"{SETTINGS[key].label} {shown}" if is_short else SETTINGS[key].label)
    return ", ".join(parts)
