"""A simple editor for a Python file: line numbers, syntax colours, indenting, and a marked error line.

It reads and writes no file: text is set, and a signal asks to save it. It is not an IDE and does not aim to be one.
"""

from __future__ import annotations

from collections.abc import Callable

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
from app.widgets.basic.key_names import with_key_names
from app.widgets.basic.labels_and_buttons import plain_tip
from app.widgets.rewards.python_highlighter import PythonHighlighter

INDENT = "    "
_OPENERS = (":", "(", "[", "{")
_GUTTER_PADDING = 2 * theme.SPACE
"""Space beside the line numbers, in pixels."""


class LineNumbers(QWidget):
    """The line numbers beside the text. The editor paints them: only it knows where its lines are (see Qt's example
    “Code Editor”)."""

    def __init__(self, editor: CodeEditor) -> None:
        super().__init__(editor)
        self._editor = editor

    def sizeHint(self) -> QSize:
        return QSize(self._editor.gutter(), 0)

    def paintEvent(self, event: QPaintEvent) -> None:
        self._editor.paint_numbers(event)


class CodeEditor(QPlainTextEdit):
    """An editor for Python. Tab indents, so Escape leaves the editor.

    Attributes:
        colours – the syntax highlighter.

    Signals:
        save_requested – Ctrl+S.
        run_requested – Ctrl+Return.
        left – Escape.
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
        self.setAccessibleDescription(
            with_key_names("Python source. Tab indents; Escape leaves the editor; Ctrl+S saves and scores.")
        )
        self.colours = PythonHighlighter(self.document())
        self._numbers = LineNumbers(self)
        self._error_line = 0
        self._sentence = ""
        self.blockCountChanged.connect(lambda _count: self._fit())
        self.updateRequest.connect(self._scroll_numbers)
        self.cursorPositionChanged.connect(self._mark)
        theme.signals.changed.connect(self._mark)
        self._fit()
        self._mark()

    # Text

    def show_text(self, text: str) -> None:
        """Replace the text, unmodified; the cursor stays on its line as far as that exists."""
        if text == self.toPlainText():
            self.document().setModified(False)
            return
        line = self.textCursor().blockNumber()
        self.setPlainText(text)
        self.document().setModified(False)
        self._go(line + 1)

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

    # Keys

    def event(self, event: QEvent) -> bool:
        # The window's Ctrl+S saves the config. Accepting ShortcutOverride turns the shortcut into an ordinary key press,
        # so that while the editor has the focus Ctrl+S saves this file.
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
        """Insert a line break with this line's indentation, one level deeper after what opens a block."""
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
        self._each_line(lambda text: INDENT + text if by > 0 and text else _dedented(text) if by < 0 else text)

    def _comment(self) -> None:
        """Comment out the selected lines, or uncomment them if all of them are comments."""
        lines = [block.text() for block in self._selected_blocks()]
        commented = all(line.lstrip().startswith("#") for line in lines if line.strip())
        self._each_line(lambda text: _uncommented(text) if commented else f"# {text}" if text.strip() else text)

    def _selected_blocks(self) -> list[QTextBlock]:
        cursor, document = self.textCursor(), self.document()
        first, last = document.findBlock(cursor.selectionStart()), document.findBlock(cursor.selectionEnd())
        return [document.findBlockByNumber(number) for number in range(first.blockNumber(), last.blockNumber() + 1)]

    def _each_line(self, change: Callable[[str], str]) -> None:
        """Replace each selected line by `change(line)`, as one step of undo."""
        cursor = self.textCursor()
        cursor.beginEditBlock()
        for block in self._selected_blocks():
            line = QTextCursor(block)
            line.movePosition(QTextCursor.MoveOperation.EndOfBlock, QTextCursor.MoveMode.KeepAnchor)
            changed = change(block.text())
            if changed != block.text():
                line.insertText(changed)
        cursor.endEditBlock()

    # Numbers and marks

    def gutter(self) -> int:
        """Width of the line numbers, in pixels."""
        return self.fontMetrics().horizontalAdvance("9") * max(2, len(str(self.blockCount()))) + _GUTTER_PADDING

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        inside = self.contentsRect()
        self._numbers.setGeometry(QRect(inside.left(), inside.top(), self.gutter(), inside.height()))

    def _fit(self) -> None:
        self.setViewportMargins(self.gutter(), 0, 0, 0)

    def _scroll_numbers(self, rect: QRect, dy: int) -> None:
        """Follow the editor: scroll with it by `dy` pixels, or repaint beside what it repaints."""
        if dy:
            self._numbers.scroll(0, dy)
        else:
            self._numbers.update(0, rect.y(), self._numbers.width(), rect.height())

    def paint_numbers(self, event: QPaintEvent) -> None:
        """Paint the numbers of the visible lines: the current one darker, the error line in red with an edge."""
        colours, painter = theme.palette(), QPainter(self._numbers)
        painter.fillRect(event.rect(), colours.field)
        painter.setFont(theme.mono_font(theme.CAPTION))
        cursor_line = self.textCursor().blockNumber()
        block = self.firstVisibleBlock()
        top = self.blockBoundingGeometry(block).translated(self.contentOffset()).top()
        while block.isValid() and top <= event.rect().bottom():
            height = self.blockBoundingRect(block).height()
            if block.isVisible() and top + height >= event.rect().top():
                is_error, is_current = block.blockNumber() + 1 == self._error_line, block.blockNumber() == cursor_line
                painter.setPen(colours.bad if is_error else colours.text if is_current else colours.placeholder)
                box = QRect(0, round(top), self._numbers.width() - theme.SPACE, round(height))
                align = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
                painter.drawText(box, align, str(block.blockNumber() + 1))
                if is_error:
                    painter.fillRect(QRect(0, round(top), 3, round(height)), colours.bad)
            block, top = block.next(), top + height

    def _mark(self) -> None:
        """Shade the line with the cursor, and the error line in its colour."""
        colours = theme.palette()
        marks = [_full_width(self.textCursor(), colours.hover, 90)]
        block = self.document().findBlockByNumber(self._error_line - 1)
        if self._error_line and block.isValid():
            marks.append(_full_width(QTextCursor(block), colours.bad, 46))
        self.setExtraSelections(marks)
        self.setToolTip(plain_tip(self._sentence if self._error_line else ""))


def _full_width(cursor: QTextCursor, colour: QColor, alpha: int) -> QTextEdit.ExtraSelection:
    """A shade over the cursor's line from edge to edge."""
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


def _dedented(text: str) -> str:
    depth = len(text) - len(text.lstrip(" "))
    return text[min(depth, len(INDENT)) :]


def _uncommented(text: str) -> str:
    depth = len(text) - len(text.lstrip())
    rest = text[depth + 1 :] if text[depth : depth + 1] == "#" else text[depth:]
    return text[:depth] + rest.removeprefix(" ")
