"""The user's reward file: an editor with syntax colours, the last error with its traceback, saving and creating."""

import html
import keyword
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from PySide6.QtCore import QEvent, QFileSystemWatcher, QRect, Qt, Signal
from PySide6.QtGui import (
    QColor,
    QFont,
    QKeyEvent,
    QKeySequence,
    QPainter,
    QPaintEvent,
    QResizeEvent,
    QSyntaxHighlighter,
    QTextCharFormat,
    QTextCursor,
    QTextDocument,
    QTextFormat,
)
from PySide6.QtWidgets import QFrame, QPlainTextEdit, QTextEdit, QWidget

from app import theme
from app.state.messages import problems_to
from app.state.session import Session
from app.widgets.basic.controls import ElidedLabel
from app.widgets.basic.dialogs import SAVING, ask, open_file, save_file, show_details
from app.widgets.basic.labels import EmptyState, button, label, plain_tip, show_text, with_key_names
from app.widgets.basic.layout import column, configure, holder, row, stack
from backend.rewards.allowed_code import Rights, read_code
from backend.utils.disk import save_as
from backend.utils.errors import UserError
from backend.utils.files import read_text

SETTING = "reward_functions_file"
INDENT = "    "
TEMPLATE = '''"""Reward functions: each gets all completions of a step and returns a number for each, or None."""

from backend.rewards import register_reward_function


@register_reward_function("concise", label="Concise")
def concise(completions, **kwargs):
    """1.0 for short answers, falling to 0 at 200 words."""
    return [max(0.0, 1.0 - len(text.split()) / 200) for text in completions]


@register_reward_function("mentions_answer", label="Mentions Answer")
def mentions_answer(completions, answer, **kwargs):
    """1.0 when the dataset's answer stands anywhere in the completion."""
    return [1.0 if right and right in text else 0.0 for text, right in zip(completions, answer)]
'''
"""The contents of a new file: two functions that work."""
_TOKENS = re.compile(
    r"""(?P<comment>\#.*)
    |(?P<triple>[rbfuRBFU]{0,2}(?:'''|\"\"\"))
    |(?P<string>[rbfuRBFU]{0,2}(?:'(?:\\.|[^'\\])*'?|"(?:\\.|[^"\\])*"?))
    |(?P<decorator>^\s*@[\w.]+)
    |(?P<defined>(?<=\bdef\ )\w+|(?<=\bclass\ )\w+)
    |(?P<number>\b(?:0[xob][\da-fA-F_]+|\d[\d_]*(?:\.\d*)?(?:[eE][+-]?\d+)?)\b)
    |(?P<word>[A-Za-z_]\w*)""",
    re.VERBOSE,
)
_ROLES = {
    "comment": "muted",
    "string": "good",
    "triple": "good",
    "decorator": "clip",
    "defined": "kl",
    "number": "length",
    "keyword": "accent",
    "constant": "length",
}
_FENCES = {1: "'''", 2: '"""'}


class PythonHighlighter(QSyntaxHighlighter):
    def __init__(self, document: QTextDocument) -> None:
        super().__init__(document)
        theme.signals.changed.connect(self.rehighlight)

    def highlightBlock(self, text: str) -> None:
        self.setCurrentBlockState(0)
        fence = _FENCES.get(self.previousBlockState())
        position = self._format_string(text, 0, 0, fence) if fence else 0
        while (match := _TOKENS.search(text, position)) is not None:
            kind, word, position = str(match.lastgroup), match.group(), match.end()
            if kind == "triple":
                position = self._format_string(text, match.start(), match.end(), word[-3:])
            elif kind != "word":
                self.setFormat(match.start(), len(word), _char_format(kind))
            elif keyword.iskeyword(word):
                is_constant = word in ("None", "True", "False")
                self.setFormat(match.start(), len(word), _char_format("constant" if is_constant else "keyword"))

    def _format_string(self, text: str, start: int, search_from: int, fence: str) -> int:
        close = text.find(fence, search_from)
        end = len(text) if close < 0 else close + 3
        self.setFormat(start, end - start, _char_format("triple"))
        if close < 0:
            self.setCurrentBlockState(next(state for state, each in _FENCES.items() if each == fence))
        return end


def _char_format(kind: str) -> QTextCharFormat:
    made = QTextCharFormat()
    made.setForeground(getattr(theme.palette(), _ROLES[kind]))
    if kind == "defined":
        made.setFontWeight(QFont.Weight.DemiBold)
    made.setFontItalic(kind == "comment")
    return made


class CodeEditor(QPlainTextEdit):
    """An editor for Python with line numbers and a marked error line. Tab indents, so Escape leaves the editor."""

    save_requested = Signal()
    run_requested = Signal()
    left = Signal()

    def __init__(self) -> None:
        super().__init__()
        keys = with_key_names("Python source. Tab indents; Escape leaves the editor; Ctrl+S saves and scores.")
        configure(self, name="Reward file", accessibleDescription=keys, font=theme.mono_font())
        self.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
        self.setTabStopDistance(self.fontMetrics().horizontalAdvance(" ") * len(INDENT))
        PythonHighlighter(self.document())
        # The line numbers beside the text, painted by the editor: see Qt's example “Code Editor”.
        self._numbers = QWidget(self)
        self._numbers.paintEvent = self._paint_numbers
        self._error_line = 0
        self._sentence = ""
        self.blockCountChanged.connect(lambda _: self.setViewportMargins(self.gutter(), 0, 0, 0))
        configure(self, updateRequest=lambda *_: self._numbers.update(), cursorPositionChanged=self._mark)
        theme.signals.changed.connect(self._mark)
        self.setViewportMargins(self.gutter(), 0, 0, 0)
        self._mark()

    def show_text(self, text: str) -> None:
        if text != self.toPlainText():
            line = self.textCursor().blockNumber() + 1
            self.setPlainText(text)
            self._go(line)
        self.document().setModified(False)

    def show_problem(self, line: int, sentence: str = "") -> None:
        """Mark a line (from 1) as the place of an error, with the sentence as tool tip; 0 removes the mark."""
        self._error_line, self._sentence = line, sentence
        self._mark()

    def reveal(self, line: int) -> None:
        self._go(line)
        self.centerCursor()
        self.setFocus(Qt.FocusReason.ShortcutFocusReason)

    def _go(self, line: int) -> None:
        block = self.document().findBlockByNumber(min(line, self.blockCount()) - 1)
        if block.isValid():
            self.setTextCursor(QTextCursor(block))

    def event(self, event: QEvent) -> bool:
        # Accepting ShortcutOverride makes Ctrl+S a key press of the editor instead of the window's shortcut.
        is_override = event.type() == QEvent.Type.ShortcutOverride
        if is_override and isinstance(event, QKeyEvent) and event.matches(QKeySequence.StandardKey.Save):
            event.accept()
            return True
        return super().event(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        key, control = event.key(), event.modifiers() & Qt.KeyboardModifier.ControlModifier
        cursor = self.textCursor()
        if event.matches(QKeySequence.StandardKey.Save):
            self.save_requested.emit()
        elif key in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and control:
            self.run_requested.emit()
        elif key in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            before = cursor.block().text()[: cursor.positionInBlock()]
            depth = before[: len(before) - len(before.lstrip())]
            cursor.insertText("\n" + depth + (INDENT if before.rstrip().endswith((":", "(", "[", "{")) else ""))
            self.ensureCursorVisible()
        elif key == Qt.Key.Key_Escape:
            self.left.emit()
        elif key == Qt.Key.Key_Tab and cursor.hasSelection():
            self._change_lines(lambda text: INDENT + text if text else text)
        elif key == Qt.Key.Key_Tab:
            cursor.insertText(" " * (len(INDENT) - cursor.positionInBlock() % len(INDENT)))
        elif key == Qt.Key.Key_Backtab:
            self._change_lines(lambda text: text[min(len(text) - len(text.lstrip(" ")), len(INDENT)) :])
        else:
            super().keyPressEvent(event)

    def _change_lines(self, change: Callable[[str], str]) -> None:
        cursor, document = self.textCursor(), self.document()
        first, last = document.findBlock(cursor.selectionStart()), document.findBlock(cursor.selectionEnd())
        cursor.beginEditBlock()
        for number in range(first.blockNumber(), last.blockNumber() + 1):
            block = document.findBlockByNumber(number)
            changed = change(block.text())
            if changed != block.text():
                line = QTextCursor(block)
                line.movePosition(QTextCursor.MoveOperation.EndOfBlock, QTextCursor.MoveMode.KeepAnchor)
                line.insertText(changed)
        cursor.endEditBlock()

    def gutter(self) -> int:
        return self.fontMetrics().horizontalAdvance("9") * max(2, len(str(self.blockCount()))) + 2 * theme.SPACE

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        inside = self.contentsRect()
        self._numbers.setGeometry(QRect(inside.left(), inside.top(), self.gutter(), inside.height()))

    def _paint_numbers(self, event: QPaintEvent) -> None:
        colours, painter = theme.palette(), QPainter(self._numbers)
        painter.fillRect(event.rect(), colours.field)
        painter.setFont(theme.mono_font(theme.CAPTION))
        align = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
        block, current = self.firstVisibleBlock(), self.textCursor().blockNumber()
        top = self.blockBoundingGeometry(block).translated(self.contentOffset()).top()
        while block.isValid() and top <= event.rect().bottom():
            height, number = self.blockBoundingRect(block).height(), block.blockNumber() + 1
            is_error = number == self._error_line
            painter.setPen(colours.bad if is_error else colours.text if number == current + 1 else colours.placeholder)
            place = QRect(0, round(top), self._numbers.width() - theme.SPACE, round(height))
            painter.drawText(place, align, str(number))
            if is_error:
                painter.fillRect(QRect(0, round(top), 3, round(height)), colours.bad)
            block, top = block.next(), top + height

    def _mark(self) -> None:
        colours = theme.palette()
        lines = [(self.textCursor(), colours.hover, 90)]
        block = self.document().findBlockByNumber(self._error_line - 1)
        if self._error_line and block.isValid():
            lines.append((QTextCursor(block), colours.bad, 46))
        marks = []
        for cursor, colour, alpha in lines:
            mark, shade = QTextEdit.ExtraSelection(), QColor(colour)
            shade.setAlpha(alpha)
            mark.format.setBackground(shade)  # type: ignore[attr-defined]
            mark.format.setProperty(QTextFormat.Property.FullWidthSelection, True)  # type: ignore[attr-defined]
            cursor.clearSelection()
            mark.cursor = cursor  # type: ignore[attr-defined]
            marks.append(mark)
        self.setExtraSelections(marks)
        self.setToolTip(plain_tip(self._sentence if self._error_line else ""))


class RewardFilePanel(QFrame):
    opened = Signal(str)  # name

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.session, self.draft, self.bench = session, session.draft, session.reward_bench
        self.file: Path | None = None
        self._text = ""  # as it was read or written last
        self._trace = ""
        self._watcher = configure(QFileSystemWatcher(self), fileChanged=self._check_disk)
        self.editor = CodeEditor()
        self.path = ElidedLabel(Qt.TextElideMode.ElideMiddle)
        save = button("Save and score", self.save_file, tip="Write the file and score again (Ctrl+S)")
        self.trouble = label(role="problem", wrap=True, selectable=True)
        self.reload = button("Reload", self._reload)
        self.details = button("Details", lambda: show_details(self._trace, self), tip="The whole traceback")
        links = Qt.TextInteractionFlag.LinksAccessibleByMouse | Qt.TextInteractionFlag.LinksAccessibleByKeyboard
        rich, small = Qt.TextFormat.RichText, theme.mono_font(theme.CAPTION)
        self.frames = label(font=small, wrap=True, name="Traceback", textFormat=rich, textInteractionFlags=links)
        self.frames.linkActivated.connect(lambda line: self.editor.reveal(int(line)))
        configure(self.editor, save_requested=self.save_file, run_requested=self.bench.score)
        configure(self.editor, left=lambda: save.setFocus(Qt.FocusReason.TabFocusReason))
        self.editor.document().modificationChanged.connect(self._show_state)
        self.new = button("New file…", self.create, primary=True)
        text = "Write your own functions in Python and see their scores at once. Or drop a file here."
        more = (self.new, button("Open…", self.choose))
        below = row((self.trouble, 1), *((each, 0, Qt.AlignmentFlag.AlignTop) for each in (self.details, self.reload)))
        parts = (row((self.path, 1), save), (self.editor, 1), below, self.frames)
        nothing = EmptyState("No reward file", text, "", theme.heading_font(), *more)
        self._stack = stack(nothing, holder(column(*parts, margins=(12, theme.SPACE, 12, 12))), into=self)
        self._show_state()
        self.mark(None)

    @property
    def is_edited(self) -> bool:
        return self._stack.currentIndex() == 1 and self.editor.document().isModified()

    def may_leave(self) -> bool:
        """Ask what becomes of edits; False if they stay in the editor."""
        if self.file is None or not self.is_edited:
            return True
        answer = ask(self.window(), f"Save the changes to {self.file.name}?", "They are lost otherwise.", SAVING)
        return self._write(self.file) if answer == "save" else answer == "discard"

    def open(self) -> None:
        path = self.bench.reward_file
        if (path == self.file and path is not None) or not self.may_leave():
            return
        if self._watcher.files():
            self._watcher.removePaths(self._watcher.files())
        self.file, self._text = None, ""
        if path is not None:
            with problems_to(self.session.message.emit):
                self._text = read_text(path, SETTING)
                self.file = path
                self._watcher.addPath(str(path))
                self.editor.show_text(self._text)
        self._stack.setCurrentIndex(1 if self.file else 0)
        self._show_state()
        self.opened.emit(path.name if path else "")

    def mark(self, error: Mapping[str, Any] | None) -> bool:
        """Show an error of this file with its line and the user's own frames; False if it is in another file."""
        is_ours = error is not None and self.file is not None and Path(error["file"]) == self.file.resolve()
        shown = error if error is not None and is_ours else {"line": 0, "sentence": "", "frames": []}
        self.editor.show_problem(shown["line"], shown["sentence"])
        self._say(shown["sentence"])
        frames, colour = [], theme.palette().accent.name()
        for frame in shown["frames"]:
            text = f"line {frame['line']}, in {html.escape(frame['function'])}"
            link = f'<a style="color:{colour}" href="{frame["line"]}">{text}</a>'
            frames.append(f"{link}&nbsp;&nbsp;{html.escape(frame['code'])}")
        show_text(self.frames, "<br>".join(frames))
        self._trace = shown.get("traceback", "")
        self.details.setVisible(bool(self._trace))
        return is_ours

    def _say(self, sentence: str, *, reload: bool = False) -> None:
        show_text(self.trouble, sentence)
        self.reload.setVisible(reload)

    def _show_state(self) -> None:
        name = str(self.file or "")
        configure(self.path, text=f"{name} – edited" if self.is_edited else name, toolTip=plain_tip(name))

    def _matches_disk(self) -> bool:
        with suppress(UserError):
            return self.file is not None and read_text(self.file, SETTING) == self._text
        return False

    def save_file(self) -> None:
        if self.file is not None and self._write(self.file):
            self.draft.changed.emit(SETTING)  # its functions may have changed
            self.bench.score()

    def _write(self, path: Path) -> bool:
        consent = self.session.consent
        if not self._matches_disk() and self.reload.isHidden():
            self._say(f"{path.name} was changed by another program. Save again to overwrite it.", reload=True)
            return False
        rights, text = None, self.editor.toPlainText()
        with suppress(UserError):
            rights = consent.code.rights(read_code(path.resolve()))
        with problems_to(self._say):
            save_as(path, text)
            self._text = text
            self._watcher.addPath(str(path))  # saved by rename, it is a new inode
            if rights is not None:
                consent.allow(read_code(path.resolve()), rights)
            self._say("")
            self.editor.document().setModified(False)
            return True
        return False

    def _check_disk(self) -> None:
        if self.file is None or not self.file.exists():
            return
        self._watcher.addPath(str(self.file))
        if self._matches_disk():
            return
        if self.is_edited:
            self._say(f"{self.file} was changed by another program.", reload=True)
        else:
            self._reload()

    def _reload(self) -> None:
        self._say("")
        self.file = None
        self.open()
        self.draft.changed.emit(SETTING)
        self.bench.score_quietly()

    def create(self) -> None:
        if (path := save_file(self, SETTING, "New reward file", "my_rewards.py", "Python (*.py)")) is not None:
            with problems_to(self.session.message.emit):
                save_as(path, TEMPLATE)
                self.session.consent.allow(read_code(path.resolve()), Rights())
                self.file = None
                self.draft.use_reward_file(str(path))

    def choose(self) -> None:
        if (path := open_file(self, SETTING, "Open reward file", "Python (*.py *.txt)")) is not None:
            self.draft.use_reward_file(str(path))
