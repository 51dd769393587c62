"""The conversation: each prompt across the page, and below it the answers side by side, so that the same turn is at the same height."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QScrollArea, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.labels_and_buttons import label
from app.widgets.basic.layout import clear_layout
from app.widgets.chat.answer_view import AnswerView
from app.widgets.chat.text_blocks import GrowingText


class Transcript(QScrollArea):
    """Keeps the end in sight while answers grow, unless the user has scrolled away from it.

    Attributes:
        answers – by turn, side → its view.

    Signals:
        keep_requested(int, str) – keep the answer of this turn and side as a case.
    """

    keep_requested = Signal(int, str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.answers: list[dict[str, AnswerView]] = []
        self.setWidgetResizable(True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setAccessibleName("Conversation")
        content = QWidget()
        content.setObjectName("page")
        self._turns = QVBoxLayout()
        self._turns.setSpacing(2 * theme.SPACE)
        column = QVBoxLayout(content)
        column.setContentsMargins(0, 0, theme.SPACE, 0)
        column.addLayout(self._turns)
        column.addStretch(1)
        self.setWidget(content)
        self._follows = True
        bar = self.verticalScrollBar()
        bar.rangeChanged.connect(self._follow)
        bar.actionTriggered.connect(lambda _: self._note_place())

    def clear(self) -> None:
        clear_layout(self._turns)
        self.answers, self._follows = [], True

    def add_turn(self, prompt: str, expected: str, sides: Sequence[str], *, is_first: bool) -> None:
        """A prompt, with an empty answer for each side; `is_first` in a conversation, it is set apart from what stands above."""
        number, views = len(self.answers) + 1, dict[str, AnswerView]()
        turn, beside = QWidget(), QHBoxLayout()
        beside.setSpacing(12)
        for side in sides:
            view = views[side] = AnswerView(side, number)
            view.keep_requested.connect(lambda side=side: self.keep_requested.emit(number - 1, side))
            beside.addWidget(view, 1)
        column = QVBoxLayout(turn)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(theme.SPACE)
        if is_first and self.answers:
            column.addWidget(
                label("New conversation", theme.caption_font(), "caption", align=Qt.AlignmentFlag.AlignCenter)
            )
        column.addWidget(_prompt(prompt, expected, number))
        column.addLayout(beside)
        self._turns.addWidget(turn)
        self.answers.append(views)
        self._follows = True

    def _note_place(self) -> None:
        bar = self.verticalScrollBar()
        self._follows = bar.sliderPosition() >= bar.maximum() - theme.scaled(24)

    def _follow(self) -> None:
        if self._follows:
            self.verticalScrollBar().setValue(self.verticalScrollBar().maximum())


def _prompt(text: str, expected: str, number: int) -> QFrame:
    block = QFrame()
    block.setProperty("role", "banner")
    row = QHBoxLayout(block)
    row.setContentsMargins(12, theme.SPACE, 12, theme.SPACE)
    shown = GrowingText(f"Prompt {number}", theme.mono_font())
    shown.show_text(text)
    row.addWidget(shown, 1)
    if expected:
        answer = label(f"Answer: {expected}", theme.figures_font(12), "muted", selectable=True)
        row.addWidget(answer, 0, Qt.AlignmentFlag.AlignTop)
    return block
