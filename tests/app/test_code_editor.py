"""The editor of the reward file: indenting, comments, its own Ctrl+S, the marked line, Python in the theme's
colours."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QEvent, Qt
from PySide6.QtGui import QKeyEvent
from PySide6.QtTest import QTest

from app.pages.rewards.reward_file import CodeEditor

KEY, CONTROL = Qt.Key, Qt.KeyboardModifier.ControlModifier


@pytest.fixture
def editor(qtbot, qapp) -> CodeEditor:
    widget = qtbot.show(CodeEditor(), 500, 300)
    return widget


def set_text(editor: CodeEditor, text: str, at: int | None = None) -> None:
    editor.setPlainText(text)
    cursor = editor.textCursor()
    cursor.setPosition(len(text) if at is None else at)
    editor.setTextCursor(cursor)


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
