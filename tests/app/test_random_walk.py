"""A random walk over the window and real runs: whatever is visible and enabled is clicked, typed into, chosen,
scrolled.

An exception that reaches `sys.excepthook` fails the walk. The suite walks a little way; the proof goes 2,000 actions
for each seed, which take 20 to 40 seconds.
"""

from __future__ import annotations

import random
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import QEvent, QFile, QPoint, QProcess, Qt
from PySide6.QtGui import QAction, QDesktopServices
from PySide6.QtTest import QTest
from PySide6.QtWidgets import (
    QAbstractButton,
    QAbstractItemView,
    QAbstractSlider,
    QAbstractSpinBox,
    QApplication,
    QComboBox,
    QDialog,
    QFileDialog,
    QInputDialog,
    QLineEdit,
    QListView,
    QMenu,
    QMessageBox,
    QPlainTextEdit,
    QTabBar,
    QTextEdit,
    QWidget,
)

from app import theme
from app.pages import PAGES
from app.state.prefs import Prefs
from app.state.session import Session
from app.window import Window
from tests.support.windows import SilentService

ACTIONS, FEW_ACTIONS = 2_000, 120
TEXTS = ["", "0", "-1", "1e999", "abc", "lora", "reward >= 1", "ü🙂\u202e"]
TEXTS += ["/", "~", "x" * 300, "0.5", "[1, 2]", "*", "("]
KEYS = [Qt.Key.Key_Return, Qt.Key.Key_Escape, Qt.Key.Key_Tab, Qt.Key.Key_Up, Qt.Key.Key_Down, Qt.Key.Key_Space]
ENABLED = Qt.ItemFlag.ItemIsEnabled
NEVER = ("quit", "close window", "&quit")


def type_into(widget: Any, dice: random.Random) -> None:
    widget.selectAll()
    text = dice.choice(TEXTS)
    if text.isascii():  # QTest types no other keys
        QTest.keyClicks(widget, text)
    else:
        (widget.insert if isinstance(widget, QLineEdit) else widget.insertPlainText)(text)
    if dice.random() < 0.5:
        QTest.keyClick(widget, dice.choice(KEYS))


def choose_row(view: QAbstractItemView, dice: random.Random) -> None:
    model = view.model()
    if model is None or (rows := model.rowCount(view.rootIndex())) < 1:
        return
    columns = 1 if isinstance(view, QListView) else model.columnCount(view.rootIndex())
    index = model.index(dice.randrange(rows), dice.randrange(max(1, columns)))
    view.scrollTo(index, QAbstractItemView.ScrollHint.EnsureVisible)
    button = Qt.MouseButton.RightButton if dice.random() < 0.15 else Qt.MouseButton.LeftButton
    click = QTest.mouseDClick if dice.random() < 0.2 else QTest.mouseClick
    click(view.viewport(), button, pos=view.visualRect(index).center())


def choose_item(box: QComboBox, dice: random.Random) -> None:
    model, column, root = box.model(), box.modelColumn(), box.rootModelIndex()
    if rows := [row for row in range(box.count()) if model.flags(model.index(row, column, root)) & ENABLED]:
        box.setCurrentIndex(dice.choice(rows))
        box.activated.emit(box.currentIndex())


def press_tab(bar: QTabBar, dice: random.Random) -> None:
    if bar.count():
        QTest.mouseClick(bar, Qt.MouseButton.LeftButton, pos=bar.tabRect(dice.randrange(bar.count())).center())


def click_somewhere(widget: QWidget, dice: random.Random) -> None:
    place = QPoint(dice.randrange(max(1, widget.width())), dice.randrange(max(1, widget.height())))
    QTest.mouseMove(widget, place)
    QTest.mouseClick(widget, dice.choice([Qt.MouseButton.LeftButton, Qt.MouseButton.RightButton]), pos=place)


DEEDS: list[tuple[type[QWidget], Callable[[Any, random.Random], None]]] = [
    (QAbstractButton, lambda button, dice: QTest.mouseClick(button, Qt.MouseButton.LeftButton)),
    (QComboBox, choose_item),
    (QTabBar, press_tab),
    (QAbstractItemView, choose_row),
    (QLineEdit, type_into),
    (QPlainTextEdit, type_into),
    (QTextEdit, type_into),
    (QAbstractSpinBox, lambda box, dice: box.stepBy(dice.choice([-100, -1, 1, 100]))),
    (QAbstractSlider, lambda slider, dice: slider.setValue(dice.randint(slider.minimum(), slider.maximum()))),
]


def step(window: Window, dice: random.Random) -> str:
    """One action on whatever is in front; returns what it was."""
    popup = QApplication.activePopupWidget()
    if isinstance(popup, QMenu):
        actions = [action for action in popup.actions() if is_harmless(action)]
        if actions and dice.random() < 0.6:
            action = dice.choice(actions)
            popup.close()
            action.trigger()
            return f"menu {action.text()}"
        popup.close()
        return "menu closed"
    front = popup or QApplication.activeModalWidget() or window
    if isinstance(front, QDialog) and dice.random() < 0.1:
        front.reject()
        return f"dialog {front.windowTitle()} closed"
    if front is window and dice.random() < 0.1:
        key = dice.choice(PAGES).key
        window.show_page(key)
        return f"page {key}"
    if front is window and dice.random() < 0.05:
        menus = window.menuBar().findChildren(QMenu)
        actions = [action for menu in menus for action in menu.actions() if action.text() and is_harmless(action)]
        action = dice.choice(actions)
        action.trigger()
        return f"action {action.text()}"
    kind, deed = dice.choice(DEEDS) if dice.random() < 0.9 else (QWidget, click_somewhere)
    widgets = [widget for widget in front.findChildren(kind) if widget.isVisible() and widget.isEnabled()]
    if not widgets:
        return "nothing"
    widget = dice.choice(widgets)
    described = f"{type(widget).__name__} {widget.accessibleName() or widget.objectName()}"[:80]
    deed(widget, dice)
    return described


def is_harmless(action: QAction) -> bool:
    return action.isEnabled() and action.isVisible() and action.text().replace("&", "").strip().lower() not in NEVER


@pytest.fixture
def tame(monkeypatch, tmp_path: Path) -> None:
    """No process is started, no native dialog blocks, and nothing outside the runs folder is touched."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(QProcess, "startDetached", lambda *_: (False, 0))
    monkeypatch.setattr(QProcess, "start", lambda *_: None)
    monkeypatch.setattr(QFile, "moveToTrash", lambda *_: False)
    monkeypatch.setattr(QDesktopServices, "openUrl", lambda *_: True)
    for name in ("getOpenFileName", "getSaveFileName"):
        monkeypatch.setattr(QFileDialog, name, lambda *_: ("", ""))
    monkeypatch.setattr(QFileDialog, "getExistingDirectory", lambda *_: "")
    monkeypatch.setattr(QInputDialog, "getText", lambda *_: ("", False))
    monkeypatch.setattr(QMessageBox, "exec", lambda *_: int(QMessageBox.StandardButton.Cancel))
    monkeypatch.setattr(QMessageBox, "warning", lambda *_: QMessageBox.StandardButton.Ok)
    monkeypatch.setattr(QDialog, "exec", lambda *_: int(QDialog.DialogCode.Rejected))


@pytest.mark.parametrize(
    ("seed", "actions"),
    [(5, FEW_ACTIONS), *(pytest.param(seed, ACTIONS, marks=pytest.mark.proof) for seed in range(5))],
)
@pytest.mark.usefixtures("tame")
def test_a_random_walk(
    seed: int, actions: int, qapp: QApplication, real_runs: Path, tmp_path: Path, monkeypatch
) -> None:
    shutil.copytree(real_runs, tmp_path / "runs")
    monkeypatch.setenv("GRPO_STUDIO_RUNS", str(tmp_path / "runs"))
    dice = random.Random(seed)
    deeds, errors, problems = list[str](), list[str](), list[str]()
    monkeypatch.setattr(sys, "excepthook", lambda *error: errors.append("".join(traceback.format_exception(*error))))
    theme.apply(qapp, "light" if seed % 2 else "dark")
    session = Session(Prefs(tmp_path / "prefs"))
    window = Window(session)
    session.service = SilentService(session)
    session.restore()
    window.resize(1280, 800)
    window.show()
    for _ in range(actions):
        deeds.append(step(window, dice))
        qapp.processEvents()
        if not window.isVisible():
            window.show()
        if errors:
            problems += [*deeds[-5:], *errors]
            errors.clear()
    for dialog in window.findChildren(QDialog):
        dialog.reject()
    window.close()
    qapp.sendPostedEvents(None, QEvent.Type.DeferredDelete.value)
    assert not problems + errors, "\n".join(problems + errors)
    assert len(set(deeds)) > min(100, actions // 4)
