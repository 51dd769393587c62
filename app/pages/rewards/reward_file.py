"""The user's reward file: an editor with syntax colours, the last error with its traceback, saving and creating."""

from __future__ import annotations

import html
import keyword
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from PySide6.QtCore import QEvent, QFileSystemWatcher, QObject, QRect, QSize, Qt, Signal
from PySide6.QtGui import (
    QColor,
    QFont,
    QKeyEvent,
    QKeySequence,
    QPainter,
    QPaintEvent,
    QResizeEvent,
    QSyntaxHighlighter,
    QTextBlock,
    QTextCharFormat,
    QTextCursor,
    QTextDocument,
    QTextFormat,
)
from PySide6.QtWidgets import QFrame, QPlainTextEdit, QStackedLayout, QTextEdit, QWidget

from app import theme
from app.state.consent import Consent
from app.state.session import Session
from app.widgets.basic.controls import ElidedLabel
from app.widgets.basic.dialogs import open_file, save_file
from app.widgets.basic.labels import button, label, plain_tip, with_key_names
from app.widgets.basic.layout import column, holder, row
from backend.rewards.allowed_code import Rights, read_code
from backend.utils.errors import UserError
from backend.utils.files import read_text
from backend.utils.whole_file import save_as

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
    """Colours keywords, defined names, decorators, strings, numbers and comments."""

    def __init__(self, document: QTextDocument) -> None:
        super().__init__(document)
        theme.signals.changed.connect(self.rehighlight)

    def highlightBlock(self, text: str) -> None:
        self.setCurrentBlockState(0)
        fence = _FENCES.get(self.previousBlockState())
        position = self._format_string(text, 0, 0, fence) if fence else 0
        while (match := _TOKENS.search(text, position)) is not None:
            kind, word = str(match.lastgroup), match.group()
            if kind == "triple":
                position = self._format_string(text, match.start(), match.end(), word[-3:])
                continue
            if kind == "word":
                is_constant = word in ("None", "True", "False")
                kind = "constant" if is_constant else "keyword" if keyword.iskeyword(word) else ""
            if kind:
                self.setFormat(match.start(), len(word), _char_format(kind))
            position = match.end()

    def _format_string(self, text: str, start: int, search_from: int, fence: str) -> int:
        close = text.find(fence, search_from)
        end = len(text) if close < 0 else close + 3
        self.setFormat(start, end - start, _char_format("triple"))
        if close < 0:
            self.setCurrentBlockState(next(state for state, each in _FENCES.items() if each == fence))
        return end


def _char_format(kind: str) -> QTextCharFormat:
    made = QTextCharFormat()
    colour: QColor = getattr(theme.palette(), _ROLES[kind])
    made.setForeground(colour)
    if kind == "defined":
        made.setFontWeight(QFont.Weight.DemiBold)
    made.setFontItalic(kind == "comment")
    return made


class LineNumbers(QWidget):
    """The line numbers beside the text, painted by the editor (see Qt's example “Code Editor”)."""

    def __init__(self, editor: CodeEditor) -> None:
        super().__init__(editor)
        self._editor = editor

    def sizeHint(self) -> QSize:
        return QSize(self._editor.gutter(), 0)

    def paintEvent(self, event: QPaintEvent) -> None:
        self._editor.paint_numbers(event)


class CodeEditor(QPlainTextEdit):
    """An editor for Python with line numbers and a marked error line. Tab indents, so Escape leaves the editor."""

    save_requested = Signal()
    run_requested = Signal()
    left = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFont(theme.mono_font())
        self.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
        self.setTabStopDistance(self.fontMetrics().horizontalAdvance(" ") * len(INDENT))
        self.setAccessibleName("Reward file")
        keys = "Python source. Tab indents; Escape leaves the editor; Ctrl+S saves and scores."
        self.setAccessibleDescription(with_key_names(keys))
        self.colours = PythonHighlighter(self.document())
        self._numbers = LineNumbers(self)
        self._error_line = 0
        self._sentence = ""
        self.blockCountChanged.connect(lambda _: self.setViewportMargins(self.gutter(), 0, 0, 0))
        self.updateRequest.connect(self._scroll_numbers)
        self.cursorPositionChanged.connect(self._mark)
        theme.signals.changed.connect(self._mark)
        self.setViewportMargins(self.gutter(), 0, 0, 0)
        self._mark()

    def show_text(self, text: str) -> None:
        """Replace the text, unmodified."""
        if text != self.toPlainText():
            line = self.textCursor().blockNumber() + 1
            self.setPlainText(text)
            self._go(line)
        self.document().setModified(False)

    def show_problem(self, line: int, sentence: str = "") -> None:
        """Mark a line (from 1) as the place of an error, with the sentence as tool tip; 0 removes the mark."""
        self._error_line, self._sentence = line, sentence
        self._mark()
        self._numbers.update()

    def reveal(self, line: int) -> None:
        """Move the cursor to a line (from 1), scroll it to the middle, and focus the editor."""
        self._go(line)
        self.centerCursor()
        self.setFocus(Qt.FocusReason.ShortcutFocusReason)

    def _go(self, line: int) -> None:
        block = self.document().findBlockByNumber(min(line, self.blockCount()) - 1)
        if block.isValid():
            self.setTextCursor(QTextCursor(block))

    def event(self, event: QEvent) -> bool:
        # Accepting ShortcutOverride makes Ctrl+S a key press of the editor instead of the window's shortcut.
        if event.type() == QEvent.Type.ShortcutOverride and isinstance(event, QKeyEvent) and _is_save(event):
            event.accept()
            return True
        return super().event(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        key, control = event.key(), event.modifiers() & Qt.KeyboardModifier.ControlModifier
        if _is_save(event):
            self.save_requested.emit()
        elif key in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self.run_requested.emit() if control else self._break_line()
        elif key == Qt.Key.Key_Escape:
            self.left.emit()
        elif key == Qt.Key.Key_Tab:
            self._indent()
        elif key == Qt.Key.Key_Backtab:
            self._change_lines(lambda text: text[min(len(text) - len(text.lstrip(" ")), len(INDENT)) :])
        elif key == Qt.Key.Key_Slash and control:
            self._comment()
        else:
            super().keyPressEvent(event)

    def _break_line(self) -> None:
        cursor = self.textCursor()
        before = cursor.block().text()[: cursor.positionInBlock()]
        depth = before[: len(before) - len(before.lstrip())]
        cursor.insertText("\n" + depth + (INDENT if before.rstrip().endswith((":", "(", "[", "{")) else ""))
        self.ensureCursorVisible()

    def _indent(self) -> None:
        cursor = self.textCursor()
        if cursor.hasSelection():
            self._change_lines(lambda text: INDENT + text if text else text)
        else:
            cursor.insertText(" " * (len(INDENT) - cursor.positionInBlock() % len(INDENT)))

    def _comment(self) -> None:
        lines = [block.text() for block in self._selected_blocks()]
        if all(line.lstrip().startswith("#") for line in lines if line.strip()):
            self._change_lines(lambda text: re.sub(r"^(\s*)# ?", r"\1", text))
        else:
            self._change_lines(lambda text: f"# {text}" if text.strip() else text)

    def _selected_blocks(self) -> list[QTextBlock]:
        cursor, document = self.textCursor(), self.document()
        first, last = document.findBlock(cursor.selectionStart()), document.findBlock(cursor.selectionEnd())
        return [document.findBlockByNumber(number) for number in range(first.blockNumber(), last.blockNumber() + 1)]

    def _change_lines(self, change: Callable[[str], str]) -> None:
        cursor = self.textCursor()
        cursor.beginEditBlock()
        for block in self._selected_blocks():
            changed = change(block.text())
            if changed != block.text():
                line = QTextCursor(block)
                line.movePosition(QTextCursor.MoveOperation.EndOfBlock, QTextCursor.MoveMode.KeepAnchor)
                line.insertText(changed)
        cursor.endEditBlock()

    def gutter(self) -> int:
        """Width of the line numbers, in pixels."""
        return self.fontMetrics().horizontalAdvance("9") * max(2, len(str(self.blockCount()))) + 2 * theme.SPACE

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        inside = self.contentsRect()
        self._numbers.setGeometry(QRect(inside.left(), inside.top(), self.gutter(), inside.height()))

    def _scroll_numbers(self, rect: QRect, dy: int) -> None:
        if dy:
            self._numbers.scroll(0, dy)
        else:
            self._numbers.update(0, rect.y(), self._numbers.width(), rect.height())

    def paint_numbers(self, event: QPaintEvent) -> None:
        """Paint the numbers of the visible lines: the current one darker, the error line in red with an edge."""
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
            painter.drawText(
                QRect(0, round(top), self._numbers.width() - theme.SPACE, round(height)), align, str(number)
            )
            if is_error:
                painter.fillRect(QRect(0, round(top), 3, round(height)), colours.bad)
            block, top = block.next(), top + height

    def _mark(self) -> None:
        colours = theme.palette()
        marks = [_full_width(self.textCursor(), colours.hover, 90)]
        block = self.document().findBlockByNumber(self._error_line - 1)
        if self._error_line and block.isValid():
            marks.append(_full_width(QTextCursor(block), colours.bad, 46))
        self.setExtraSelections(marks)
        self.setToolTip(plain_tip(self._sentence if self._error_line else ""))


def _full_width(cursor: QTextCursor, colour: QColor, alpha: int) -> QTextEdit.ExtraSelection:
    mark = QTextEdit.ExtraSelection()
    shade = QColor(colour)
    shade.setAlpha(alpha)
    mark.format.setBackground(shade)  # type: ignore[attr-defined]
    mark.format.setProperty(QTextFormat.Property.FullWidthSelection, True)  # type: ignore[attr-defined]
    cursor.clearSelection()
    mark.cursor = cursor  # type: ignore[attr-defined]
    return mark


def _is_save(event: QKeyEvent) -> bool:
    return event.matches(QKeySequence.StandardKey.Save)


class RewardFilePanel(QFrame):
    """A card with the editor, or with two buttons while no file is chosen. It reads and writes no file."""

    save_requested = Signal()
    score_requested = Signal()
    new_requested = Signal()
    open_requested = Signal()
    reload_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self._name = ""
        self.editor = CodeEditor()
        self.path = ElidedLabel(Qt.TextElideMode.ElideMiddle)
        self.save = button("Save and score", self.save_requested.emit, tip="Write the file and score again (Ctrl+S)")
        self.trouble = label(role="problem", wrap=True, selectable=True)
        self.reload = button("Reload", self.reload_requested.emit)
        self.frames = label(font=theme.mono_font(theme.CAPTION), wrap=True)
        self.frames.setTextFormat(Qt.TextFormat.RichText)
        links = Qt.TextInteractionFlag
        self.frames.setTextInteractionFlags(links.LinksAccessibleByMouse | links.LinksAccessibleByKeyboard)
        self.frames.setAccessibleName("Traceback")
        self.frames.linkActivated.connect(lambda line: self.editor.reveal(int(line)))
        self.editor.save_requested.connect(self.save_requested)
        self.editor.run_requested.connect(self.score_requested)
        self.editor.left.connect(lambda: self.save.setFocus(Qt.FocusReason.TabFocusReason))
        self.editor.document().modificationChanged.connect(lambda _: self._show_state())
        centre = Qt.AlignmentFlag.AlignCenter
        self.new = button("New file…", self.new_requested.emit, primary=True)
        self.open = button("Open…", self.open_requested.emit)
        title = label("No reward file", theme.heading_font(), align=centre)
        text = "Write your own functions in Python and see their scores at once. Or drop a file here."
        sentence = label(text, role="muted", wrap=True, align=centre)
        empty = ((None, 2), title, sentence, row(None, self.new, self.open, None), (None, 3))
        below = row((self.trouble, 1), (self.reload, 0, Qt.AlignmentFlag.AlignTop))
        parts = (row((self.path, 1), self.save), (self.editor, 1), below, self.frames)
        self._stack = QStackedLayout(self)
        self._stack.addWidget(holder(column(*empty, spacing=12, margins=3 * theme.SPACE)))
        self._stack.addWidget(holder(column(*parts, margins=(12, theme.SPACE, 12, 12))))
        self.show_file("", None)
        self.show_error(None)

    def show_file(self, name: str, text: str | None) -> None:
        """Show a file's path and text; text None means that no file is chosen."""
        self._name = name
        self._stack.setCurrentIndex(0 if text is None else 1)
        if text is not None:
            self.editor.show_text(text)
        self._show_state()

    def show_error(self, error: Mapping[str, Any] | None) -> None:
        """Show an error of the file: mark its line, show its message and the user's own traceback frames."""
        self.editor.show_problem(error["line"] if error else 0, error["sentence"] if error else "")
        self.say(error["sentence"] if error else "")
        frames = [_frame_html(frame) for frame in error["frames"]] if error else []
        self.frames.setText("<br>".join(frames))
        self.frames.setVisible(bool(frames))

    def say(self, sentence: str, *, reload: bool = False) -> None:
        """Show a sentence below the editor, "" for none; `reload` adds a button to read the file again."""
        self.trouble.setText(sentence)
        self.trouble.setVisible(bool(sentence))
        self.reload.setVisible(reload)

    @property
    def is_edited(self) -> bool:
        return self._stack.currentIndex() == 1 and self.editor.document().isModified()

    def _show_state(self) -> None:
        self.path.setText(f"{self._name} – edited" if self.is_edited else self._name)
        self.path.setToolTip(plain_tip(self._name))


def _frame_html(frame: Mapping[str, Any]) -> str:
    text = f"line {frame['line']}, in {html.escape(frame['function'])}"
    link = f'<a style="color:{theme.palette().accent.name()}" href="{frame["line"]}">{text}</a>'
    return f"{link}&nbsp;&nbsp;{html.escape(frame['code'])}"


class EditedRewardFile(QObject):
    """The file being edited: written atomically, and watched for changes by other programs."""

    changed_elsewhere = Signal()

    def __init__(self, consent: Consent, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.path: Path | None = None
        self.text = ""
        self._consent = consent
        self._watcher = QFileSystemWatcher(self)
        self._watcher.fileChanged.connect(lambda _path: self._check_disk())

    def open(self, path: Path | None) -> None:
        """Switch to another file, or to none. Raises UserError when it cannot be read."""
        if self._watcher.files():
            self._watcher.removePaths(self._watcher.files())
        self.path, self.text = None, ""
        if path is not None:
            self.text = read_text(path, SETTING)
            self.path = path
            self._watcher.addPath(str(path))

    @property
    def matches_disk(self) -> bool:
        """True if the file on disk still holds `text`."""
        try:
            return self.path is not None and read_text(self.path, SETTING) == self.text
        except UserError:
            return False

    def save(self, text: str) -> None:
        """Write the file; a file that was allowed to run stays allowed. Raises UserError."""
        assert self.path is not None
        try:
            rights = self._consent.rights(read_code(self.path.resolve()))
        except UserError:
            rights = None
        save_as(self.path, text)
        self.text = text
        self._watcher.addPath(str(self.path))  # saved by rename, it is a new inode
        if rights is not None:
            self._consent.allow(read_code(self.path.resolve()), rights)

    def create(self, path: Path) -> None:
        """Write a new file from the template, allow it to run, as its code is ours, and open it. Raises UserError."""
        save_as(path, TEMPLATE)
        self._consent.allow(read_code(path.resolve()), Rights())
        self.open(path)

    def _check_disk(self) -> None:
        if self.path is not None and self.path.exists():
            self._watcher.addPath(str(self.path))
            if not self.matches_disk:
                self.changed_elsewhere.emit()


class RewardEditing(QObject):
    """Connects the file on disk, its panel, the setting that names it and the bench that scores with it."""

    opened = Signal(str)  # str

    def __init__(self, session: Session, panel: RewardFilePanel, parent: QObject) -> None:
        super().__init__(parent)
        self.session, self.draft, self.bench, self.panel = session, session.draft, session.reward_bench, panel
        self.file = EditedRewardFile(session.consent, self)
        panel.save_requested.connect(self.save)
        panel.new_requested.connect(self.create)
        panel.open_requested.connect(self.choose)
        panel.reload_requested.connect(self._reload)
        self.file.changed_elsewhere.connect(self._on_changed_elsewhere)

    def open(self) -> None:
        """Show the file that the settings name, unless it is shown already."""
        path = self.bench.reward_file
        if path == self.file.path and path is not None:
            return
        try:
            self.file.open(path)
        except UserError as error:
            self.session.message.emit(error.faults[0].sentence)
        self.panel.show_file(str(self.file.path or ""), self.file.text if self.file.path else None)
        self.opened.emit(path.name if path else "")

    def mark(self, error: Mapping[str, Any] | None) -> bool:
        """Mark the line of an error; False if it is in another file."""
        is_ours = error is not None and self.file.path is not None and Path(error["file"]) == self.file.path.resolve()
        self.panel.show_error(error if is_ours else None)
        return is_ours

    def save(self) -> None:
        if self.file.path is None:
            return
        if not self.file.matches_disk and self.panel.reload.isHidden():
            name = self.file.path.name
            self.panel.say(f"{name} was changed by another program. Save again to overwrite it.", reload=True)
            return
        try:
            self.file.save(self.panel.editor.toPlainText())
        except UserError as error:
            self.panel.say(error.faults[0].sentence)
            return
        self.panel.say("")
        self.panel.editor.document().setModified(False)
        self.draft.changed.emit(SETTING)  # its functions may have changed
        self.bench.score()

    def _reload(self) -> None:
        self.panel.say("")
        path, self.file.path = self.file.path, None
        if path is not None:
            self.open()
            self.draft.changed.emit(SETTING)
            self.bench.score_quietly()

    def _on_changed_elsewhere(self) -> None:
        if self.panel.is_edited:
            self.panel.say(f"{self.file.path} was changed by another program.", reload=True)
        else:
            self._reload()

    def create(self) -> None:
        """Create a file from the template at a path that the user chooses."""
        path = self.choose_new_file()
        if path is None:
            return
        try:
            self.file.create(path)
        except UserError as error:
            self.session.message.emit(error.faults[0].sentence)
            return
        self.file.path = None
        self.draft.use_reward_file(str(path))

    def choose(self) -> None:
        path = self.choose_file()
        if path is not None:
            self.draft.use_reward_file(str(path))

    # Dialogs, which tests replace by an answer

    def choose_file(self) -> Path | None:
        return open_file(self.panel, SETTING, "Open reward file", "Python (*.py *.txt)")

    def choose_new_file(self) -> Path | None:
        return save_file(self.panel, SETTING, "New reward file", "my_rewards.py", "Python (*.py)")
