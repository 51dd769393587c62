"""The conversation: prompts, and below each the answers side by side with their scores and times."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from PySide6.QtCore import QMimeData, QSizeF, Qt, Signal
from PySide6.QtGui import QKeyEvent, QTextCursor, QTextOption
from PySide6.QtWidgets import QAbstractButton, QFrame, QPlainTextEdit, QScrollArea, QTextEdit, QWidget

from app import theme
from app.state import charts
from app.state.chat import ChatAnswer, ChatTurn
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.icons import IconButton
from app.widgets.basic.labels import label
from app.widgets.basic.layout import FlowLayout, card, clear_layout, column, configure, holder, row, set_shown
from app.widgets.basic.number_format import counted, figure, short_duration
from app.widgets.completion_detail import TagHighlighter, scores_html, show_conversation
from app.widgets.completion_table import STOP_LABELS
from app.widgets.pictures import PictureButton, PictureDialog

FEWEST_LINES, MOST_LINES = 3, 8  # height of the prompt box: it grows with its text between these
SHORT = 240
TITLES = {"base": "Base", "tuned": "Tuned"}
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
SIDE = 72


class PromptBox(QPlainTextEdit):
    """Enter sends, Shift+Enter begins a line, Escape stops. Files of pictures can be dropped and pasted."""

    sent = Signal()
    stopped = Signal()
    pictures_given = Signal(list)  # list[str]

    def __init__(self) -> None:
        super().__init__()
        hint = "Prompt. Enter sends, Shift+Enter begins a new line, Escape stops."
        configure(self, tabChangesFocus=True, accessibleName="Prompt", placeholderText=hint, textChanged=self._fit)
        self._fit()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        is_enter = event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter)
        if is_enter and not event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
            self.sent.emit()
        elif event.key() == Qt.Key.Key_Escape:
            self.stopped.emit()
        else:
            super().keyPressEvent(event)

    def canInsertFromMimeData(self, source: QMimeData) -> bool:
        return bool(picture_files(source)) or super().canInsertFromMimeData(source)

    def insertFromMimeData(self, source: QMimeData) -> None:
        if files := picture_files(source):
            self.pictures_given.emit(files)
        else:
            super().insertFromMimeData(source)

    def _fit(self) -> None:
        # A plain text edit's document counts its height in lines, wrapped ones included.
        lines = min(MOST_LINES, max(FEWEST_LINES, round(self.document().size().height())))
        self.setFixedHeight(lines * self.fontMetrics().lineSpacing() + 18)


class GrowingText(QTextEdit):
    """Selectable plain text without a frame, as high as its content. Text can be appended cheaply."""

    def __init__(self, name: str) -> None:
        super().__init__()
        wrap, no_bar = QTextOption.WrapMode.WrapAtWordBoundaryOrAnywhere, Qt.ScrollBarPolicy.ScrollBarAlwaysOff
        configure(self, name=name, role="plain", font=theme.mono_font(), frameShape=QFrame.Shape.NoFrame)
        configure(self, readOnly=True, tabChangesFocus=True, acceptRichText=False, wordWrapMode=wrap)
        configure(self, verticalScrollBarPolicy=no_bar, horizontalScrollBarPolicy=no_bar)
        self.document().setDocumentMargin(0)
        self.document().documentLayout().documentSizeChanged.connect(self._fit)
        self._fit(self.document().size())

    def show_text(self, text: str) -> None:
        shown = self.toPlainText()
        if shown and text.startswith(shown):
            cursor = QTextCursor(self.document())
            cursor.movePosition(QTextCursor.MoveOperation.End)
            cursor.insertText(text[len(shown) :])
        else:
            self.setPlainText(text)

    def _fit(self, size: QSizeF) -> None:
        self.setFixedHeight(max(self.fontMetrics().lineSpacing(), round(size.height())) + 1)


class AnswerView(QFrame):
    def __init__(self, side: str, number: int) -> None:
        super().__init__()
        self.setProperty("role", "card")
        self._shown = ChatAnswer()
        self._folds: bool | None = None
        self._is_folded = False
        self.fold = LinkButton("", on_click=self._turn_fold)
        self.calls = GrowingText(f"{TITLES[side]}, calls of answer {number}")
        self.text = GrowingText(f"{TITLES[side]}, answer {number}")
        TagHighlighter(self.text)
        rich = Qt.TextFormat.RichText
        self.scores = label(font=theme.figures_font(12), role="muted", wrap=True, selectable=True, textFormat=rich)
        self.problem = label(role="problem", wrap=True, selectable=True)
        self.status = label(font=theme.figures_font(theme.CAPTION), role="caption", wrap=True)
        foot = row((self.status, 1), (self.fold, 0, Qt.AlignmentFlag.AlignBottom), spacing=2 * theme.SPACE)
        title = label(TITLES[side], theme.heading_font())
        parts = (title, self.calls, self.text, self.scores, self.problem, None, foot)
        column(*parts, into=self, spacing=6, margins=(12, theme.SPACE, 12, theme.SPACE))
        self.show_answer(self._shown)
        theme.signals.changed.connect(self._recolour)

    def show_answer(self, answer: ChatAnswer) -> None:
        self._shown = answer
        thinking, rest = split_thinking(answer.text)
        is_long = bool(rest) and len(thinking) > SHORT  # shown while it is being written, or short
        self._is_folded = is_long if self._folds is None else self._folds
        self.text.show_text(rest if self._is_folded else answer.text)
        with_calls = [turn for turn in answer.turns if turn["calls"]]
        show_conversation(self.calls, {"turns": with_calls})
        words = figure(len(thinking.split()))
        self.fold.setText(f"Show thinking ({words} words)" if self._is_folded else "Hide thinking")
        names = list(answer.scores)
        chips = scores_html(names, [charts.label_of(name) for name in names], list(answer.scores.values()))
        self.scores.setText(f"<b>Reward {figure(answer.reward)}</b> &nbsp;&nbsp; {chips}")
        self.problem.setText(answer.problem)
        self.status.setText(status_text(answer))
        texts = ((self.scores, answer.scores), (self.problem, answer.problem))
        for part, is_shown in ((self.calls, with_calls), (self.fold, is_long), *texts):
            set_shown(part, bool(is_shown))

    def _turn_fold(self) -> None:
        self._folds = not self._is_folded
        self.show_answer(self._shown)

    def _recolour(self) -> None:
        self.show_answer(self._shown)


def status_text(answer: ChatAnswer) -> str:
    """“23 tokens, ended, the first after 50 ms, then 190 tokens/s”."""
    if answer.state == "writing" and answer.turns and not (answer.text or answer.turns[-1]["results"]):
        return f"Running {', '.join(call['name'] for call in answer.turns[-1]['calls'])}…"
    if answer.state != "done":
        return {"waiting": "Reading the prompt…", "writing": "Writing…", "stopped": "Stopped"}.get(answer.state, "")
    figures = answer.figures
    later, seconds = figures["tokens"] - 1, figures["seconds"] - figures["first_token_s"]
    rate = f", then {figure(later / seconds)} tokens/s" if later and seconds > 0 else ""
    first = short_duration(figures["first_token_s"])
    return f"{counted(figures['tokens'], 'token')}, {STOP_LABELS[figures['stop']]}, the first after {first}{rate}"


def split_thinking(text: str) -> tuple[str, str]:
    """(thinking, answer); ("", text) without thinking, (thinking so far, "") while it is being written."""
    before, tag, after = text.partition("</think>")
    head, opening, thinking = before.partition("<think>")
    thinking = thinking if opening else head if tag else ""
    if not thinking.strip():
        return "", text
    return thinking.strip(), after.lstrip("\n") if tag else ""


class Transcript(QScrollArea):
    """The turns of the conversation. It stays scrolled to the end unless the user has scrolled away from it."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[dict[str, AnswerView]] = []
        configure(self, accessibleName="Conversation", widgetResizable=True, frameShape=QFrame.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self._turns = column(spacing=2 * theme.SPACE)
        self.setWidget(holder(column(self._turns, None, margins=(0, 0, theme.SPACE, 0)), objectName="page"))
        self._follows = True
        bar = self.verticalScrollBar()
        bar.rangeChanged.connect(lambda: self._follows and bar.setValue(bar.maximum()))
        bar.actionTriggered.connect(self._note_place)

    def clear(self) -> None:
        clear_layout(self._turns)
        self.answers, self._follows = [], True

    def add_turn(self, turn: ChatTurn) -> None:
        number = len(self.answers) + 1
        views = {side: AnswerView(side, number) for side in turn.answers}
        beside = row(*((view, 1) for view in views.values()), spacing=12)
        shown = GrowingText(f"Prompt {number}")
        shown.show_text(turn.prompt)
        top = Qt.AlignmentFlag.AlignTop
        answer = label(f"Answer: {turn.expected}", theme.figures_font(12), "muted", selectable=True)
        answers = [(answer, 0, top)] if turn.expected else []
        asked = column(PromptPictures(turn.images, can_remove=False), shown, spacing=0)
        block = card(row((asked, 1), *answers, spacing=6, margins=(12, theme.SPACE, 12, theme.SPACE)), "banner")
        more = label("The conversation continues", theme.caption_font(), "caption")
        self._turns.addWidget(holder(column(*([] if turn.is_first else [more]), block, beside)))
        self.answers.append(views)
        self._follows = True

    def _note_place(self) -> None:
        bar = self.verticalScrollBar()
        self._follows = bar.sliderPosition() >= bar.maximum() - theme.scaled(24)


def picture_files(mime: QMimeData) -> list[str]:
    """Paths of the files that are dragged or in the clipboard, if all are pictures; else []."""
    files = [url.toLocalFile() for url in mime.urls()]
    return files if all(file.lower().endswith(SUFFIXES) for file in files) else []


class PromptPictures(QWidget):
    """Thumbnails of a prompt's pictures above its text. `can_remove`: each has a button that removes it."""

    def __init__(self, paths: Sequence[str] = (), *, can_remove: bool = True) -> None:
        super().__init__()
        self._can_remove, self._places = can_remove, FlowLayout(self)
        self.fill(paths)

    def fill(self, paths: Sequence[str]) -> None:
        self.paths = list(paths)
        clear_layout(self._places)
        for place, path in enumerate(paths):
            picture = PictureButton(path, f"Picture {place + 1} of {len(paths)}", SIDE)
            picture.clicked.connect(lambda _, place=place: PictureDialog(self.paths, place, self.window()).show())
            parts: list[tuple[QAbstractButton, int, Qt.AlignmentFlag]] = [(picture, 0, Qt.AlignmentFlag.AlignTop)]
            if self._can_remove:
                others = [*self.paths[:place], *self.paths[place + 1 :]]
                remove = IconButton("close", tip=f"Remove {Path(path).name}", clicked=partial(self.fill, others))
                parts.append((remove, 0, Qt.AlignmentFlag.AlignTop))
            self._places.addWidget(holder(row(*parts, spacing=0, margins=(0, 0, 0, 6))))
