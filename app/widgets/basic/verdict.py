"""What a run came to, and what to do next: a title, before → after, a sentence, buttons. Empty states look the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PySide6.QtCore import QRectF, Qt, Signal
from PySide6.QtGui import QFont, QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QBoxLayout, QFrame, QHBoxLayout, QPushButton, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.labels_and_buttons import button, label
from app.widgets.basic.numbers import figure

_EDGE = 3
NARROW = 860
"""Below this width the buttons stand under the words."""


@dataclass(frozen=True, slots=True)
class Action:
    """A button: its words, what it does, whether it is the obvious one."""

    text: str
    do: Callable[[], object]
    primary: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """A figure before and after the run."""

    label: str
    before: float | None
    after: float | None


class Verdict(QFrame):
    """A card with an edge in the colour of a palette role."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._role = "muted"
        self._told: tuple[object, ...] = ()
        self.setProperty("role", "card")
        self._title = label(font=theme.heading_font())
        self._changes = QHBoxLayout()
        self._changes.setSpacing(theme.SPACE * 4)
        self._sentence = label(wrap=True, selectable=True)
        self._advice = label(role="muted", wrap=True, selectable=True)
        self._buttons = QHBoxLayout()
        self._buttons.setSpacing(theme.SPACE)
        self._buttons.addStretch(1)
        words = QVBoxLayout()
        words.setSpacing(4)
        words.addWidget(self._title)
        words.addLayout(self._changes)
        words.addWidget(self._sentence)
        words.addWidget(self._advice)
        self._row = QBoxLayout(QBoxLayout.Direction.LeftToRight, self)
        self._row.setContentsMargins(theme.GUTTER, 12, 12, 12)
        self._row.addLayout(words, 1)
        self._row.addLayout(self._buttons)

    def tell(
        self,
        title: str,
        role: str,
        sentence: str = "",
        advice: str = "",
        changes: Sequence[Change] = (),
        actions: Sequence[Action] = (),
    ) -> None:
        """Say it, unless that is what stands here: a button that is being pressed must not be made anew."""
        words = tuple((action.text, action.primary) for action in actions)
        told = (title, role, sentence, advice, tuple(changes), words)
        if told == self._told:
            return
        self._told = told
        self._role = role
        self._title.setText(title)
        for line, text in ((self._sentence, sentence), (self._advice, advice)):
            line.setText(text)
            line.setVisible(bool(text))
        _empty(self._changes)
        for change in changes:
            self._changes.addWidget(_change(change))
        if changes:
            self._changes.addStretch(1)
        _empty(self._buttons)
        self._buttons.addStretch(1)
        for action in actions:
            made = button(action.text, action.do, primary=action.primary)
            self._buttons.addWidget(made, 0, Qt.AlignmentFlag.AlignVCenter)
        self.update()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        narrow = self.width() < NARROW
        direction = QBoxLayout.Direction.TopToBottom if narrow else QBoxLayout.Direction.LeftToRight
        if self._row.direction() != direction:
            self._row.setDirection(direction)
        self._row.setSpacing(12 if narrow else theme.SPACE * 3)

    def buttons(self) -> list[QPushButton]:
        items = [self._buttons.itemAt(place) for place in range(self._buttons.count())]
        return [one for one in (item.widget() for item in items if item) if isinstance(one, QPushButton)]

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(getattr(theme.palette(), self._role))
        painter.drawRoundedRect(QRectF(6, 10, _EDGE, self.height() - 20), _EDGE / 2, _EDGE / 2)


class Nothing(QWidget):
    """An empty state: what there is not, what to do about it, one button.

    Signals: wanted – the button was pressed.
    """

    wanted = Signal()

    def __init__(self, title: str, sentence: str, word: str) -> None:
        super().__init__()
        centre = Qt.AlignmentFlag.AlignCenter
        head = label(title, theme.title_font(), align=centre)
        said = label(sentence, role="muted", align=centre, wrap=True)
        press = button(word, self.wanted.emit, primary=True)
        column = QVBoxLayout(self)
        column.setSpacing(theme.SPACE * 2)
        column.addStretch(2)
        column.addWidget(head)
        column.addWidget(said)
        column.addWidget(press, 0, Qt.AlignmentFlag.AlignCenter)
        column.addStretch(3)


def _change(change: Change) -> QWidget:
    """“1.48 → 2.17” over its caption; the figure before is the quieter one."""
    whole = QWidget()
    column, figures = QVBoxLayout(whole), QHBoxLayout()
    column.setContentsMargins(0, 0, 0, 0)
    column.setSpacing(0)
    figures.setSpacing(6)
    if change.before is not None:
        figures.addWidget(label(f"{figure(change.before)} →", theme.figures_font(theme.TITLE), "muted"))
    figures.addWidget(label(figure(change.after), theme.figures_font(theme.TITLE, QFont.Weight.DemiBold)), 1)
    column.addLayout(figures)
    column.addWidget(label(change.label, theme.caption_font(), "caption"))
    return whole


def _empty(layout: QHBoxLayout) -> None:
    while (item := layout.takeAt(0)) is not None:
        widget = item.widget()
        if widget is not None:
            widget.hide()  # at once; deleting waits, for it may be its own click that brought us here
            widget.deleteLater()
