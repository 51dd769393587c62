"""One answer: who gave it, its thinking folded away, its text, how the rewards scored it, how long it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QToolButton, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.labels_and_buttons import label
from app.widgets.basic.layout import set_shown
from app.widgets.basic.number_format import figure
from app.widgets.chat.text_blocks import GrowingText
from app.widgets.completions.completion_detail import TagHighlighter, scores_html

OPEN_TAG, CLOSE_TAG = "<think>", "</think>"
SHORT = 240
"""Characters of thinking that stay unfolded: they are no longer than the line that would hide them is worth."""
TITLES = {"base": "Base", "tuned": "Tuned"}


@dataclass(frozen=True, slots=True)
class ShownScore:
    """A reward function's score; `colour` is the function's index among the run's."""

    label: str
    score: float | None
    colour: int


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """`status` is a line below the text (“23 tokens, ended, 0.2 s”, “Stopped”), `problem` a sentence about what went wrong."""

    text: str
    is_writing: bool = False
    status: str = ""
    reward: float | None = None
    scores: Sequence[ShownScore] = ()
    problem: str = ""
    can_keep: bool = False


class AnswerView(QFrame):
    """A card.

    Attributes:
        side – base or tuned.
        fold – the button that unfolds the thinking.

    Signals:
        keep_requested – keep it as a case.
    """

    keep_requested = Signal()

    def __init__(self, side: str, number: int, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.side = side
        self._shown: ShownAnswer | None = None
        self._is_unfolded: bool | None = None
        """What the user has chosen; None before."""
        name = f"{TITLES[side]}, answer {number}"
        self.fold = QToolButton()
        self.fold.setProperty("role", "disclosure")
        self.fold.setCheckable(True)
        self.fold.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
        self.fold.setAccessibleName(f"{name}: thinking")
        self.fold.clicked.connect(self._unfold)
        self.thinking = GrowingText(f"{name}: thinking", theme.mono_font())
        self.thinking.setProperty("role", "plain")
        self.text = GrowingText(name, theme.mono_font())
        self._highlighter = TagHighlighter(self.text)
        self.scores = label(font=theme.figures_font(12), role="muted", wrap=True, selectable=True)
        self.scores.setTextFormat(Qt.TextFormat.RichText)
        self.problem = label(role="problem", wrap=True, selectable=True)
        self.status = label(font=theme.figures_font(theme.CAPTION), role="caption", wrap=True)
        self.keep = LinkButton("Keep as case")
        self.keep.setToolTip(
            "With the scores that the run's reward file gives it now, to be checked at every later scoring"
        )
        self.keep.clicked.connect(lambda _checked=False: self.keep_requested.emit())
        self._lay_out()
        self.show_answer(ShownAnswer(""))
        theme.signals.changed.connect(self._recolour)

    def _lay_out(self) -> None:
        head = QHBoxLayout()
        head.addWidget(label(TITLES[self.side], theme.heading_font()))
        head.addStretch(1)
        head.addWidget(self.fold)
        foot = QHBoxLayout()
        foot.addWidget(self.status, 1)
        foot.addWidget(self.keep)
        column = QVBoxLayout(self)
        column.setContentsMargins(12, theme.SPACE, 12, theme.SPACE)
        column.setSpacing(6)
        column.addLayout(head)
        for part in (self.thinking, self.text, self.scores, self.problem):
            column.addWidget(part)
        column.addStretch(1)  # beside a longer answer the foot stays at the bottom
        column.addLayout(foot)

    def show_answer(self, shown: ShownAnswer) -> None:
        self._shown = shown
        thinking, answer, is_thinking = split_thinking(shown.text)
        unfolded = self._is_unfolded
        if unfolded is None:  # in sight while it is being written, and as long as it is short
            unfolded = is_thinking or len(thinking) <= SHORT
        self.thinking.show_text(thinking)
        self.text.show_text(answer)
        self.fold.setText("Hide thinking" if unfolded else f"Show thinking ({figure(len(thinking.split()))} words)")
        self.fold.setChecked(unfolded)
        set_shown(self.fold, bool(thinking))
        set_shown(self.thinking, bool(thinking) and unfolded)
        set_shown(self.text, bool(answer) or not thinking)
        self.scores.setText(self._scores_html(shown))
        set_shown(self.scores, bool(shown.scores))
        self.problem.setText(shown.problem)
        set_shown(self.problem, bool(shown.problem))
        self.status.setText(shown.status)
        set_shown(self.keep, shown.can_keep)

    def _scores_html(self, shown: ShownAnswer) -> str:
        chips = scores_html(
            [score.label for score in shown.scores],
            [score.score for score in shown.scores],
            [score.colour for score in shown.scores],
        )
        return f"<b>Reward {figure(shown.reward)}</b> &nbsp;&nbsp; {chips}"

    def _unfold(self, checked: bool) -> None:
        self._is_unfolded = checked
        if self._shown is not None:
            self.show_answer(self._shown)

    def _recolour(self) -> None:
        # Colours are written into the rich text and the formats, which do not follow a change of the palette.
        self._highlighter.rehighlight()
        if self._shown is not None:
            self.show_answer(self._shown)


def split_thinking(text: str) -> tuple[str, str, bool]:
    """(the thinking without its tags, the rest, whether the thinking is still being written).

    The opening tag may be missing: some chat templates end the prompt with it.
    """
    before, tag, after = text.partition(CLOSE_TAG)
    if tag:
        head, opening, thinking = before.partition(OPEN_TAG)
        return (thinking if opening else head).strip(), ((head if opening else "") + after).lstrip("\n"), False
    head, opening, thinking = text.partition(OPEN_TAG)
    return (thinking.strip(), head, True) if opening else ("", text, False)
