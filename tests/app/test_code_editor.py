"""The editor of the reward file: indenting, comments, its own Ctrl+S, the marked line, Python in the theme's colours."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QEvent, Qt
from PySide6.QtGui import QKeyEvent
from PySide6.QtTest import QTest

from app import theme
from app.pages.rewards.reward_file import CodeEditor

KEY, CONTROL = Qt.Key, Qt.KeyboardModifier.ControlModifier


@pytest.fixture
def editor(qtbot, qapp) -> CodeEditor:
    theme.apply(qapp, "light")
    widget = CodeEditor()
    qtbot.addWidget(widget)
    widget.resize(500, 300)
    widget.show()
    return widget


def set_text(editor: CodeEditor, text: str, at: int | None = None) -> None:
    editor.setPlainText(text)
    cursor = editor.textCursor()
    cursor.setPosition(len(text) if at is None else at)
    editor.setTextCursor(cursor)


def test_return_keeps_the_indentation(editor: CodeEditor) -> None:
    set_text(editor, "    def f(x):")
    QTest.keyClick(editor, KEY.Key_Return)
    QTest.keyClicks(editor, "return 1")
    QTest.keyClick(editor, KEY.Key_Return)
    QTest.keyClicks(editor, "x")
    assert editor.toPlainText() == "    def f(x):\n        return 1\n        x"


def test_tab_indents_and_shift_tab_dedents(editor: CodeEditor) -> None:
    set_text(editor, "ab")
    QTest.keyClick(editor, KEY.Key_Tab)
    assert editor.toPlainText() == "ab  ", "to the next stop"
    set_text(editor, "a\n\nb")
    editor.selectAll()
    QTest.keyClick(editor, KEY.Key_Tab)
    assert editor.toPlainText() == "    a\n\n    b"
    editor.selectAll()
    QTest.keyClick(editor, KEY.Key_Backtab)
    assert editor.toPlainText() == "a\n\nb"


def test_comment_lines(editor: CodeEditor) -> None:
    set_text(editor, "  a\nb")
    editor.selectAll()
    QTest.keyClick(editor, KEY.Key_Slash, CONTROL)
    assert editor.toPlainText() == "#   a\n# b"
    editor.undo()
    assert editor.toPlainText() == "  a\nb"
    editor.redo()
    editor.selectAll()
    QTest.keyClick(editor, KEY.Key_Slash, CONTROL)
    assert editor.toPlainText() == "  a\nb"


def test_ctrl_s_saves_the_file(editor: CodeEditor, qtbot) -> None:
    event = QKeyEvent(QEvent.Type.ShortcutOverride, KEY.Key_S, CONTROL)
    event.ignore()
    editor.event(event)
    assert event.isAccepted()
    with qtbot.waitSignal(editor.save_requested):
        QTest.keyClick(editor, KEY.Key_S, CONTROL)
    with qtbot.waitSignal(editor.run_requested):
        QTest.keyClick(editor, KEY.Key_Return, CONTROL)
    with qtbot.waitSignal(editor.left):
        QTest.keyClick(editor, KEY.Key_Escape)


def test_the_error_line_is_marked(editor: CodeEditor) -> None:
    set_text(editor, "a\nb\nc")
    editor.show_problem(2, "It raised.")
    marked = [mark.cursor.blockNumber() for mark in editor.extraSelections()]
    assert marked == [2, 1] and editor.toolTip() == "It raised."
    editor.show_problem(9)
    assert len(editor.extraSelections()) == 1, "a line that is gone is no line"
    editor.show_problem(0)
    assert editor.toolTip() == ""


def test_python_syntax_is_coloured(editor: CodeEditor) -> None:
    editor.setPlainText('@reg("x")\ndef f(a=1):  # why\n    return """one\ntwo""" if None else 2.5e-3\n')
    colours = theme.palette()
    assert colour_at(editor, 0, 0) == colours.clip and colour_at(editor, 0, 5) == colours.good
    assert colour_at(editor, 1, 0) == colours.accent and colour_at(editor, 1, 4) == colours.kl
    assert colour_at(editor, 1, 8) == colours.length and colour_at(editor, 1, 13) == colours.muted
    assert colour_at(editor, 3, 0) == colours.good and colour_at(editor, 3, 7) == colours.accent
    assert colour_at(editor, 3, 10) == colours.length and colour_at(editor, 3, 20) == colours.length
    assert colour_at(editor, 1, 6) is None


def colour_at(editor: CodeEditor, line: int, column: int):
    block = editor.document().findBlockByNumber(line)
    looks = [span for span in block.layout().formats() if span.start <= column < span.start + span.length]
    return looks[-1].format.foreground().color() if looks else None
