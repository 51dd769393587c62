"""The card with a run's result: a title, figures before → after, a sentence, advice, and buttons for what to do next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PySide6.QtCore import QRectF, Qt
from PySide6.QtGui import QFont, QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QBoxLayout, QFrame, QHBoxLayout, QPushButton, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.labels import button, label
from app.widgets.basic.layout import clear_layout
from app.widgets.basic.number_format import figure

_EDGE = 3
NARROW = 860
"""Width in pixels below which the buttons go under the text."""


@dataclass(frozen=True, slots=True)
class CardAction:
    """A button of the card: its text, its callback, and whether it is the primary one."""

    text: str
    callback: Callable[[], object]
    primary: bool = False


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """A metric before and after the run; `before` None shows the second figure alone."""

    label: str
    before: float | None
    after: float | None
    unit: str = ""


class ResultCard(QFrame):
    """A card whose left edge has the colour of a palette role."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._role = "muted"
        self._content: tuple[object, ...] = ()
        self.setProperty("role", "card")
        self._title = label(font=theme.heading_font())
        self._changes = QHBoxLayout()
        self._changes.setSpacing(theme.SPACE * 4)
        self._sentence = label(wrap=True, selectable=True)
        self._advice = label(role="muted", wrap=True, selectable=True)
        self._buttons = QHBoxLayout()
        self._buttons.setSpacing(theme.SPACE)
        self._buttons.addStretch(1)
        text = QVBoxLayout()
        text.setSpacing(4)
        text.addWidget(self._title)
        text.addLayout(self._changes)
        text.addWidget(self._sentence)
        text.addWidget(self._advice)
        self._row = QBoxLayout(QBoxLayout.Direction.LeftToRight, self)
        self._row.setContentsMargins(theme.GUTTER, 12, 12, 12)
        self._row.addLayout(text, 1)
        self._row.addLayout(self._buttons)

    def show_result(
        self,
        title: str,
        role: str,
        sentence: str = "",
        advice: str = "",
        changes: Sequence[BeforeAfter] = (),
        actions: Sequence[CardAction] = (),
    ) -> None:
        """Fill the card; `role` names the palette colour of its edge. Does nothing when the content is the same."""
        # The page calls this at every refresh. Rebuilding the buttons then would delete the one under the mouse button.
        texts = tuple((action.text, action.primary) for action in actions)
        content = (title, role, sentence, advice, tuple(changes), texts)
        if content == self._content:
            return
        self._content = content
        self._role = role
        self._title.setText(title)
        for line, text in ((self._sentence, sentence), (self._advice, advice)):
            line.setText(text)
            line.setVisible(bool(text))
        clear_layout(self._changes)
        for change in changes:
            self._changes.addWidget(_before_after(change))
        if changes:
            self._changes.addStretch(1)
        clear_layout(self._buttons)
        self._buttons.addStretch(1)
        for action in actions:
            widget = button(action.text, action.callback, primary=action.primary)
            self._buttons.addWidget(widget, 0, Qt.AlignmentFlag.AlignVCenter)
        self.update()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        narrow = self.width() < NARROW
        direction = QBoxLayout.Direction.TopToBottom if narrow else QBoxLayout.Direction.LeftToRight
        if self._row.direction() != direction:
            self._row.setDirection(direction)
        self._row.setSpacing(12 if narrow else theme.SPACE * 3)

    def buttons(self) -> list[QPushButton]:
        """The action buttons, from the left."""
        items = [self._buttons.itemAt(i) for i in range(self._buttons.count())]
        return [widget for item in items if item and isinstance(widget := item.widget(), QPushButton)]

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(getattr(theme.palette(), self._role))
        painter.drawRoundedRect(QRectF(6, 10, _EDGE, self.height() - 20), _EDGE / 2, _EDGE / 2)


def _before_after(change: BeforeAfter) -> QWidget:
    """“1.48 → 2.17” over its caption; the figure before is muted."""
    widget = QWidget()
    column, figures = QVBoxLayout(widget), QHBoxLayout()
    column.setContentsMargins(0, 0, 0, 0)
    column.setSpacing(0)
    figures.setSpacing(6)
    if change.before is not None:
        figures.addWidget(label(f"{figure(change.before, change.unit)} →", theme.figures_font(theme.TITLE), "muted"))
    figures.addWidget(
        label(figure(change.after, change.unit), theme.figures_font(theme.TITLE, QFont.Weight.DemiBold)), 1
    )
    column.addLayout(figures)
    column.addWidget(label(change.label, theme.caption_font(), "caption"))
    return widget
