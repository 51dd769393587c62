"""What the doctor finds in the run on show: one row a finding, with its reason, its advice and what can be done about it.

Nothing is cut off. At most two findings that hold are shown, fewer where there is less room; the others fold into “3 more”, and behind
the same button are those that no longer hold, grey, with the step until which they held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PySide6.QtCore import QRectF, Qt, Signal
from PySide6.QtGui import QFont, QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.labels import label
from app.widgets.basic.layout import TabArea, set_shown
from backend.config.config import SETTINGS
from backend.trainer.health.rules import RULES
from backend.trainer.health.watch import Episode

FOLDED = 2
"""Findings that are shown at most while the rest is folded."""
NARROW = 860
"""Width in pixels below which a row's buttons go under its text."""
FOOT = 22
"""Height of the line with the button that unfolds."""
ROLES = {"error": "bad", "warning": "warning", "info": "accent"}
"""Level → palette role of a row's edge."""


class HealthRow(QFrame):
    """One finding.

    Signals:
        completions_requested(int, str) – read the completions of this step; the rule that found something in them.
        setting_requested(str) – show this setting in the form.
        proposal_taken(dict) – set these settings.
        guide_requested(str) – show what the guide says about this rule.
        dismissed() – hide this finding.
    """

    completions_requested = Signal(int, str)
    setting_requested = Signal(str)
    proposal_taken = Signal(dict)
    guide_requested = Signal(str)
    dismissed = Signal()

    def __init__(self, episode: Episode, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.episode = episode
        self._holds = episode.until is None
        self.setAccessibleName(f"{episode.title}, {when(episode)}")
        self._title = label(episode.title, theme.body_font(), "" if self._holds else "muted")
        font = self._title.font()
        font.setWeight(QFont.Weight.DemiBold)
        self._title.setFont(font)
        self._text = label(_text(episode), role="" if self._holds else "muted", wrap=True, selectable=True)
        self._buttons = QWidget()
        self._links = QHBoxLayout(self._buttons)
        self._links.setContentsMargins(0, 0, 0, 0)
        self._links.setSpacing(theme.SPACE * 2)
        self._add_buttons()
        self._lay_out()

    def _lay_out(self) -> None:
        head = QHBoxLayout()
        head.setSpacing(theme.SPACE)
        head.addWidget(self._title)
        head.addWidget(label(when(self.episode), theme.caption_font(), "caption"), 1)
        self._top = QHBoxLayout()
        self._top.setSpacing(theme.SPACE * 2)
        self._top.addLayout(head, 1)
        self._top.addWidget(self._buttons)
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(theme.GUTTER, 4, 12, 4)
        self._column.setSpacing(2)
        self._column.addLayout(self._top)
        self._column.addWidget(self._text)

    def _add_buttons(self) -> None:
        episode = self.episode
        if episode.since is not None:
            step = episode.since if episode.until is None else episode.until
            self._add(
                "Read completions",
                f"Read the completions of step {step}",
                lambda: self.completions_requested.emit(step, episode.rule),
            )
        if self._holds and episode.setting:
            name = SETTINGS[episode.setting].label
            self._add(
                "Go to the setting", f"Show {name} in the form", lambda: self.setting_requested.emit(episode.setting)
            )
        if self._holds and episode.settings:
            self._add(
                f"Do it: {proposal(episode.settings)}", f"Set {proposal(episode.settings, full=True)}",
                lambda: self.proposal_taken.emit(dict(episode.settings)),
            )  # fmt: skip
        if episode.rule in RULES:  # an old event log may tell of a rule that there is no more
            tip = "What it means and what to do, step by step"
            self._add("Guide", tip, lambda: self.guide_requested.emit(episode.rule))
        self._add("Dismiss", "Hide this finding", self.dismissed.emit)

    def _add(self, text: str, tip: str, on_click: Any) -> None:
        link = LinkButton(text)
        link.setToolTip(tip)
        link.setAccessibleName(f"{text}: {self.episode.title}")
        link.clicked.connect(lambda _checked=False: on_click())
        self._links.addWidget(link)

    def links(self) -> list[LinkButton]:
        """The buttons, from the left."""
        return self.findChildren(LinkButton)

    def heightForWidth(self, width: int) -> int:
        self._arrange(width)
        return super().heightForWidth(width)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._arrange(self.width())

    def _arrange(self, width: int) -> None:
        """Put the buttons beside the title, or below the text where there is no room beside it."""
        is_narrow = width < NARROW
        if is_narrow != (self._column.indexOf(self._buttons) >= 0):
            if is_narrow:
                self._column.addWidget(self._buttons, 0, Qt.AlignmentFlag.AlignLeft)
            else:
                self._top.addWidget(self._buttons)

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(
            getattr(theme.palette(), ROLES.get(self.episode.level, "warning") if self._holds else "outline")
        )
        painter.drawRoundedRect(QRectF(6, 6, 3, self.height() - 12), 1.5, 1.5)


class HealthCards(QFrame):
    """The findings of a run. Hidden while there are none.

    Signals: as those of a row, and dismissed(Episode).
    """

    completions_requested = Signal(int, str)
    setting_requested = Signal(str)
    proposal_taken = Signal(dict)
    guide_requested = Signal(str)
    dismissed = Signal(object)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.setAccessibleName("What the doctor finds")
        self._episodes: list[Episode] = []
        self._is_open = False
        self._room = self._open_room = 10_000
        self._rows = QVBoxLayout()
        self._rows.setContentsMargins(0, 0, 0, 0)
        self._rows.setSpacing(0)
        self._content = QWidget()
        self._content.setLayout(self._rows)
        self._area = TabArea()
        self._area.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self._area.setWidget(self._content)
        for part in (self._area.viewport(), self._content):
            part.setAutoFillBackground(False)  # the card's own colour
        self._more = LinkButton("")
        self._more.clicked.connect(lambda _checked=False: self.unfold(not self._is_open))
        foot = QHBoxLayout()
        foot.setContentsMargins(theme.GUTTER, 0, 12, 2)
        foot.addWidget(self._more)
        foot.addStretch(1)
        column = QVBoxLayout(self)
        column.setContentsMargins(1, 2, 1, 2)
        column.setSpacing(0)
        column.addWidget(self._area)
        column.addLayout(foot)
        self.hide()

    def show_episodes(self, episodes: Sequence[Episode]) -> None:
        """Show these findings, in this order. Does nothing where they are those on show."""
        if list(episodes) == self._episodes:
            return  # called at every refresh: new rows would take the button from under the mouse, and the focus
        self._episodes = list(episodes)
        self._show_rows()

    def set_room(self, folded: int, unfolded: int) -> None:
        """The pixels that the cards may take, folded and unfolded. Unfolded rows scroll where they need more."""
        if (folded, unfolded) != (self._room, self._open_room):
            self._room, self._open_room = folded, unfolded
            self._fit()

    def unfold(self, is_open: bool) -> None:
        """Show all findings, or the first of those that hold."""
        if is_open != self._is_open:
            self._is_open = is_open
            self._show_rows()

    def rows(self) -> list[HealthRow]:
        """The rows on show, from the top."""
        return [row for row in self._all_rows() if not row.isHidden()]

    def _all_rows(self) -> list[HealthRow]:
        items = (self._rows.itemAt(index) for index in range(self._rows.count()))
        return [widget for item in items if item and isinstance(widget := item.widget(), HealthRow)]

    def _show_rows(self) -> None:
        for row in self._all_rows():
            self._rows.removeWidget(row)
            row.hide()
            row.deleteLater()
        for episode in self._episodes if self._is_open else self._current()[:FOLDED]:
            self._rows.addWidget(self._row(episode))
        set_shown(self, bool(self._episodes))
        self._fit()

    def _current(self) -> list[Episode]:
        return [episode for episode in self._episodes if episode.until is None]

    def _fit(self) -> None:
        """Show as many rows as there is room for, as high as they are at this width: their text wraps."""
        rows, width = self._all_rows(), max(1, self.width() - 2)
        heights = [row.heightForWidth(width) for row in rows]
        foot = theme.scaled(FOOT)
        count = len(rows)
        while count and not self._is_open and sum(heights[:count]) + foot * (count < len(self._episodes)) > self._room:
            count -= 1
        for index, row in enumerate(rows):
            set_shown(row, index < count)
        set_shown(self._area, count > 0)
        self._area.setFixedHeight(
            min(sum(heights[:count]), max(0, self._open_room - foot) if self._is_open else 10_000)
        )
        set_shown(self._more, self._is_open or count < len(self._episodes))
        self._more.setText(self._more_text(count))

    def _more_text(self, shown: int) -> str:
        folded, current = len(self._episodes) - shown, self._current()
        if self._is_open:
            return "Show less"
        if shown:
            return f"{folded} more"
        what = f"{folded} {'finding' if folded == 1 else 'findings'}"
        return f"{what}, the worst: {current[0].title} {when(current[0])}" if current else f"{what} of earlier steps"

    def _row(self, episode: Episode) -> HealthRow:
        row = HealthRow(episode)
        row.completions_requested.connect(self.completions_requested)
        row.setting_requested.connect(self.setting_requested)
        row.proposal_taken.connect(self.proposal_taken)
        row.guide_requested.connect(self.guide_requested)
        row.dismissed.connect(lambda: self.dismissed.emit(episode))
        return row

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()


def when(episode: Episode) -> str:
    """“since step 12”, “step 12 to 40”."""
    if episode.since is None:
        return ""
    return (
        f"since step {episode.since:,}"
        if episode.until is None
        else f"step {episode.since:,} until step {episode.until:,}"
    )


def proposal(settings: Mapping[str, Any], *, full: bool = False) -> str:
    """“Learning Rate 5e-05”; of a text its label alone, unless `full`."""
    parts = []
    for key, value in settings.items():
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        parts.append(
            f"{SETTINGS[key].label} {shown}"
            if full or not isinstance(value, str) or len(value) < 16
            else SETTINGS[key].label
        )
    return ", ".join(parts)


def _text(episode: Episode) -> str:
    return " ".join(filter(None, (episode.sentence, episode.advice if episode.until is None else "")))
