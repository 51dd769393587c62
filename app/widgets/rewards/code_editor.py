"""A simple editor for a Python file: line numbers, colours, indenting, and a mark where something went wrong.

It opens and writes nothing: text comes in, and whoever listens saves it. Not an IDE, and no wish to be one.
"""

from __future__ import annotations

from PySide6.QtCore import QEvent, QRect, QSize, Qt, Signal
from PySide6.QtGui import (
    QColor,
    QKeyEvent,
    QKeySequence,
    QPainter,
    QPaintEvent,
    QResizeEvent,
    QTextBlock,
    QTextCursor,
    QTextFormat,
)
from PySide6.QtWidgets import QPlainTextEdit, QTextEdit, QWidget

from app import theme
from app.widgets.rewards.python_highlighter import PythonHighlighter

INDENT = "    "
_OPENERS = (":", "(", "[", "{")
_FOLDED = 2 * theme.SPACE
"""Room beside the numbers."""


class LineNumbers(QWidget):
    """The line numbers, drawn by the editor beside its text."""

    def __init__(self, editor: CodeEditor) -> None:
        super().__init__(editor)
        self._editor = editor

    def sizeHint(self) -> QSize:
        return QSize(self._editor.gutter(), 0)

    def paintEvent(self, event: QPaintEvent) -> None:
        self._editor.paint_numbers(event)


class CodeEditor(QPlainTextEdit):
    """Python being edited. Tab indents, so Escape leads out of it.

    Signals: save_wanted – Ctrl+S; run_wanted – Ctrl+Return; left – Escape.
    """

    save_requested = Signal()
    run_requested = Signal()
    left = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFont(theme.mono_font())
        self.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
        self.setTabStopDistance(self.fontMetrics().horizontalAdvance(" ") * len(INDENT))
        self.setAccessibleName("Reward file")
        self.setAccessibleDescription("Python source. Tab indents; Escape leaves the editor; Ctrl+S saves and scores.")
        self.colours = PythonHighlighter(self.document())
        self._numbers = LineNumbers(self)
        self._wrong = 0
        self._sentence = ""
        self.blockCountChanged.connect(lambda _count: self._fit())
        self.updateRequest.connect(self._follow)
        self.cursorPositionChanged.connect(self._mark)
        theme.signals.changed.connect(self._mark)
        self._fit()
        self._mark()

    # Text

    def show_text(self, text: str) -> None:
        """Show another text; the cursor stays on its line as far as there is one."""
        if text == self.toPlainText():
            self.document().setModified(False)
            return
        line = self.textCursor().blockNumber()
        self.setPlainText(text)
        self.document().setModified(False)
        self._go(line + 1)

    def show_problem(self, line: int, sentence: str = "") -> None:
        """Mark a line, counted from 1, as where something went wrong; 0 takes the mark away."""
        self._wrong, self._sentence = line, sentence
        self._mark()
        self._numbers.update()

    def reveal(self, line: int) -> None:
        """Put the cursor on a line, counted from 1, and bring it into sight."""
        self._go(line)
        self.centerCursor()
        self.setFocus(Qt.FocusReason.ShortcutFocusReason)

    def _go(self, line: int) -> None:
        block = self.document().findBlockByNumber(min(line, self.blockCount()) - 1)
        if block.isValid():
            self.setTextCursor(QTextCursor(block))

    # Keys

    def event(self, event: QEvent) -> bool:
        # The window saves its config with Ctrl+S; while the cursor is in here, what is saved is this file.
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
            self._indent(1)
        elif key == Qt.Key.Key_Backtab:
            self._indent(-1)
        elif key == Qt.Key.Key_Slash and control:
            self._comment()
        else:
            super().keyPressEvent(event)

    def _break_line(self) -> None:
        """A new line, as deep as this one, or one deeper after what opens a block."""
        cursor = self.textCursor()
        before = cursor.block().text()[: cursor.positionInBlock()]
        depth = before[: len(before) - len(before.lstrip())]
        cursor.insertText("\n" + depth + (INDENT if before.rstrip().endswith(_OPENERS) else ""))
        self.ensureCursorVisible()

    def _indent(self, by: int) -> None:
        cursor = self.textCursor()
        if by > 0 and not cursor.hasSelection():
            cursor.insertText(" " * (len(INDENT) - cursor.positionInBlock() % len(INDENT)))
            return
        self._each_line(lambda text: INDENT + text if by > 0 and text else _outdented(text) if by < 0 else text)

    def _comment(self) -> None:
        """Turn the chosen lines into comments, or back if all of them are."""
        lines = [block.text() for block in self._chosen()]
        commented = all(line.lstrip().startswith("#") for line in lines if line.strip())
        self._each_line(lambda text: _uncommented(text) if commented else f"# {text}" if text.strip() else text)

    def _chosen(self) -> list[QTextBlock]:
        cursor, document = self.textCursor(), self.document()
        first, last = document.findBlock(cursor.selectionStart()), document.findBlock(cursor.selectionEnd())
        return [document.findBlockByNumber(number) for number in range(first.blockNumber(), last.blockNumber() + 1)]

    def _each_line(self, change) -> None:
        cursor = self.textCursor()
        cursor.beginEditBlock()
        for block in self._chosen():
            line = QTextCursor(block)
            line.movePosition(QTextCursor.MoveOperation.EndOfBlock, QTextCursor.MoveMode.KeepAnchor)
            changed = change(block.text())
            if changed != block.text():
                line.insertText(changed)
        cursor.endEditBlock()

    # Numbers and marks

    def gutter(self) -> int:
        """Width of the numbers, in pixels."""
        return self.fontMetrics().horizontalAdvance("9") * max(2, len(str(self.blockCount()))) + _FOLDED

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        inside = self.contentsRect()
        self._numbers.setGeometry(QRect(inside.left(), inside.top(), self.gutter(), inside.height()))

    def _fit(self) -> None:
        self.setViewportMargins(self.gutter(), 0, 0, 0)

    def _follow(self, rect: QRect, by: int) -> None:
        if by:
            self._numbers.scroll(0, by)
        else:
            self._numbers.update(0, rect.y(), self._numbers.width(), rect.height())

    def paint_numbers(self, event: QPaintEvent) -> None:
        colours, painter = theme.palette(), QPainter(self._numbers)
        painter.fillRect(event.rect(), colours.field)
        painter.setFont(theme.mono_font(theme.CAPTION))
        here = self.textCursor().blockNumber()
        block = self.firstVisibleBlock()
        top = self.blockBoundingGeometry(block).translated(self.contentOffset()).top()
        while block.isValid() and top <= event.rect().bottom():
            height = self.blockBoundingRect(block).height()
            if block.isVisible() and top + height >= event.rect().top():
                wrong, current = block.blockNumber() + 1 == self._wrong, block.blockNumber() == here
                painter.setPen(colours.bad if wrong else colours.text if current else colours.faint)
                box = QRect(0, round(top), self._numbers.width() - theme.SPACE, round(height))
                painter.drawText(
                    box, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, str(block.blockNumber() + 1)
                )
                if wrong:
                    painter.fillRect(QRect(0, round(top), 3, round(height)), colours.bad)
            block, top = block.next(), top + height

    def _mark(self) -> None:
        """The line with the cursor a shade darker, the line that went wrong in its colour."""
        colours = theme.palette()
        marks = [_across(self.textCursor(), colours.hover, 90)]
        block = self.document().findBlockByNumber(self._wrong - 1)
        if self._wrong and block.isValid():
            marks.append(_across(QTextCursor(block), colours.bad, 46))
        self.setExtraSelections(marks)
        self.setToolTip(self._sentence if self._wrong else "")


def _across(cursor: QTextCursor, colour: QColor, strength: int) -> QTextEdit.ExtraSelection:
    mark = QTextEdit.ExtraSelection()
    shade = QColor(colour)
    shade.setAlpha(strength)
    mark.format.setBackground(shade)  # type: ignore[attr-defined]
    mark.format.setProperty(QTextFormat.Property.FullWidthSelection, True)  # type: ignore[attr-defined]
    cursor.clearSelection()
    mark.cursor = cursor  # type: ignore[attr-defined]
    return mark


def _is_save(event: QKeyEvent) -> bool:
    return event.matches(QKeySequence.StandardKey.Save)


def _outdented(text: str) -> str:
    depth = len(text) - len(text.lstrip(" "))
    return text[min(depth, len(INDENT)) :]


def _uncommented(text: str) -> str:
    depth = len(text) - len(text.lstrip())
    rest = text[depth + 1 :] if text[depth : depth + 1] == "#" else text[depth:]
    return text[:depth] + rest.removeprefix(" ")
