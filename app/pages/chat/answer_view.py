"""One answer: who gave it, its text as it was sampled, with long thinking folded away, how the rewards scored it, how long it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import QSizeF, Qt, Signal
from PySide6.QtGui import QFont, QKeyEvent, QTextCursor, QTextOption
from PySide6.QtWidgets import QFrame, QHBoxLayout, QPlainTextEdit, QScrollArea, QTextEdit, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.labels import label
from app.widgets.basic.layout import clear_layout, set_shown
from app.widgets.basic.number_format import figure
from app.widgets.completions.completion_detail import TagHighlighter, scores_html

# Read-only text as high as its content, and the box that a prompt is typed in.

FEWEST_LINES, MOST_LINES = 3, 8
"""Height of the prompt box: it grows with its text between these."""
_MARGINS = 18
"""What the frame of a text edit takes in height, in pixels."""


class GrowingText(QTextEdit):
    """Selectable plain text without a frame, as high as what it holds. Text is appended without setting the rest again, so a long answer
    that is being written costs no more than a short one, and a selection stays."""

    def __init__(self, name: str, font: QFont, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAccessibleName(name)
        self.setProperty("role", "plain")
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setReadOnly(True)
        self.setTabChangesFocus(True)
        self.setFont(font)
        self.setAcceptRichText(False)
        self.setWordWrapMode(QTextOption.WrapMode.WrapAtWordBoundaryOrAnywhere)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.document().setDocumentMargin(0)
        self.document().documentLayout().documentSizeChanged.connect(self._fit)
        self._fit(self.document().size())

    def show_text(self, text: str) -> None:
        """Show `text`; where it begins with what is shown, only the rest is appended."""
        shown = self.toPlainText()
        if text == shown:
            return
        if shown and text.startswith(shown):
            cursor = QTextCursor(self.document())
            cursor.movePosition(QTextCursor.MoveOperation.End)
            cursor.insertText(text[len(shown) :])
        else:
            self.setPlainText(text)

    def _fit(self, size: QSizeF) -> None:
        self.setFixedHeight(max(self.fontMetrics().lineSpacing(), round(size.height())) + 1)


class PromptBox(QPlainTextEdit):
    """Enter sends, Shift+Enter begins a line, Escape stops.

    Signals:
        sent – Enter was pressed.
        stopped – Escape was pressed.
    """

    sent = Signal()
    stopped = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setTabChangesFocus(True)
        self.setAccessibleName("Prompt")
        self.textChanged.connect(self._fit)
        self._fit()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        is_enter = event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter)
        if is_enter and not event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
            self.sent.emit()
        elif event.key() == Qt.Key.Key_Escape:
            self.stopped.emit()
        else:
            super().keyPressEvent(event)

    def _fit(self) -> None:
        # A plain text edit's document counts its height in lines, wrapped ones included.
        lines = min(MOST_LINES, max(FEWEST_LINES, round(self.document().size().height())))
        self.setFixedHeight(lines * self.fontMetrics().lineSpacing() + _MARGINS)


# ── answer view ──────────────────────────────────────────────────────────────────────────────────────────────────────

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


# ── transcript ───────────────────────────────────────────────────────────────────────────────────────────────────────

# The conversation: each prompt across the page, and below it the answers side by side, so that the same turn is at
# the same height.


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
