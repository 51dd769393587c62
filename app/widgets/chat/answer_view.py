"""One answer: who gave it, its text as it was sampled, with long thinking folded away, how the rewards scored it, how long it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.labels_and_buttons import label
from app.widgets.basic.layout import set_shown
from app.widgets.basic.number_format import figure
from app.widgets.chat.text_blocks import GrowingText
from app.widgets.completions.completion_detail import TagHighlighter, scores_html

OPEN_TAG, CLOSE_TAG = "<think>", "</think>"
SHORT = 240
"""Characters of thinking that stay unfolded."""
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
        fold – the button that folds the thinking away, or shows it again.

    Signals:
        keep_requested – keep it as a case.
    """

    keep_requested = Signal()

    def __init__(self, side: str, number: int, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.side = side
        self._shown: ShownAnswer | None = None
        self._is_folded = False
        self._chosen: bool | None = None
        """Whether the user has folded the thinking away; None before the first click."""
        name = f"{TITLES[side]}, answer {number}"
        self.fold = LinkButton("")
        self.fold.clicked.connect(lambda _checked=False: self._turn_fold())
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
        foot = QHBoxLayout()
        foot.setSpacing(2 * theme.SPACE)
        foot.addWidget(self.status, 1)
        for link in (self.fold, self.keep):
            foot.addWidget(link, 0, Qt.AlignmentFlag.AlignBottom)
        column = QVBoxLayout(self)
        column.setContentsMargins(12, theme.SPACE, 12, theme.SPACE)
        column.setSpacing(6)
        column.addWidget(label(TITLES[self.side], theme.heading_font()))
        for part in (self.text, self.scores, self.problem):
            column.addWidget(part)
        column.addStretch(1)  # beside a longer answer the foot stays at the bottom
        column.addLayout(foot)

    def show_answer(self, shown: ShownAnswer) -> None:
        self._shown = shown
        thinking, answer = split_thinking(shown.text)
        # In sight while it is being written, and as long as it is short.
        self._is_folded = bool(answer) and len(thinking) > SHORT if self._chosen is None else self._chosen
        self.text.show_text(answer if self._is_folded else shown.text)
        self.fold.setText(
            f"Show thinking ({figure(len(thinking.split()))} words)" if self._is_folded else "Hide thinking"
        )
        set_shown(self.fold, bool(answer) and len(thinking) > SHORT)
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

    def _turn_fold(self) -> None:
        self._chosen = not self._is_folded
        if self._shown is not None:
            self.show_answer(self._shown)

    def _recolour(self) -> None:
        # Colours are written into the rich text and the formats, which do not follow a change of the palette.
        self._highlighter.rehighlight()
        if self._shown is not None:
            self.show_answer(self._shown)


def split_thinking(text: str) -> tuple[str, str]:
    """(the thinking, what follows it); ("", text) without thinking, (the thinking so far, "") while it is being written.

    The opening tag may be missing: some chat templates end the prompt with it.
    """
    before, tag, after = text.partition(CLOSE_TAG)
    head, opening, thinking = before.partition(OPEN_TAG)
    thinking = thinking if opening else head if tag else ""
    if not thinking.strip():
        return "", text
    return thinking.strip(), after.lstrip("\n") if tag else ""
