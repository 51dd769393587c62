"""The window as a person has it: shown, active, and with its processes ended afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from PySide6.QtCore import (
    QAbstractItemModel,
    QEvent,
    QMimeData,
    QObject,
    QPoint,
    QPointF,
    QSize,
    Qt,
    QTimer,
    QUrl,
    Signal,
)
from PySide6.QtGui import QDragEnterEvent, QDropEvent, QMouseEvent
from PySide6.QtWidgets import QAbstractButton, QApplication, QComboBox, QLabel, QLineEdit, QStyleOptionComboBox, QWidget
from pytestqt.qtbot import QtBot
from shiboken6 import isValid

from app.state.processes import ProcessOutcome
from app.state.session import Session
from app.widgets.basic.controls import ElidedLabel, ElidedLink
from app.widgets.run_header import Switcher
from app.window import Window
from backend.serve.questions import QUESTIONS, QuestionCall, handler
from backend.utils.errors import ConfigProblem, UserError

PATIENCE_MS = 60_000
ELIDED = (ElidedLabel, ElidedLink, Switcher)
W = TypeVar("W", bound=QWidget)


@dataclass
class Asked:
    """A question that waits for its answer."""

    name: str
    arguments: dict[str, Any]
    answer: Callable[[Any], None]
    refuse: Callable[[list[ConfigProblem]], None]
    report: Callable[[dict[str, Any]], None]


class ServiceByHand(QObject):
    """Remembers questions; the test answers them."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.asked: list[Asked] = []
        self.cancelled: list[int] = []
        self.is_running, self.retired = True, False

    def ask(
        self, question: str, on_answer: Any, *, on_refused: Any = None, on_progress: Any = None, **more: Any
    ) -> int:
        more.pop("owner", None)
        self.asked.append(Asked(question, more, on_answer, on_refused, on_progress))
        return len(self.asked)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def close(self, *, wait: bool = True) -> None:
        self.retired = True

    def last(self, name: str) -> Asked:
        return next(asked for asked in reversed(self.asked) if asked.name == name)


class ServiceHere(ServiceByHand):
    """Answers in this process on the next turn of the event loop. Questions in `held` wait until the test calls them;
    `canned` replaces what a question would answer."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, list[Callable[[], None]]] = {}
        self.canned: dict[str, Any] = {}

    def ask(self, question: str, on_answer, *, on_progress=None, owner=None, **more: Any) -> int:
        number = super().ask(question, on_answer, on_progress=on_progress, **more)
        asked = self.asked[-1]

        def work() -> None:
            if number in self.cancelled or (owner is not None and not isValid(owner)):
                return
            call = QuestionCall(on_progress or (lambda progress: None))
            try:
                if question in self.canned:
                    answer = self.canned[question]
                else:
                    answer = handler(question, *QUESTIONS[question])(call, **json.loads(json.dumps(asked.arguments)))
            except UserError as mistake:
                asked.refuse(mistake.faults)
            else:
                on_answer(answer)

        if question in self.held:
            self.held[question].append(work)
        else:
            QTimer.singleShot(0, self, work)
        return number

    def of(self, question: str) -> list[dict[str, Any]]:
        return [asked.arguments for asked in self.asked if asked.name == question]


class ProcessByHand(QObject):
    """Stands in for `VerbProcess`; the test says what it prints."""

    line = Signal(str)
    done = Signal(object)
    made: ClassVar[list[ProcessByHand]] = []

    def __init__(self, command: list[str], parent: QObject) -> None:
        super().__init__(parent)
        self.command, self.is_started, self.is_cancelled = command, False, False
        self.made.append(self)

    def start(self) -> None:
        self.is_started = True

    def cancel(self) -> None:
        self.is_cancelled = True
        self.done.emit(ProcessOutcome(False, "Cancelled.", ""))


class PatientQtBot(QtBot):
    """A QtBot that waits for up to a minute."""

    def show(self, widget: W, width: int = 0, height: int = 0) -> W:
        """Show a widget, which is closed after the test."""
        self.addWidget(widget)
        if width:
            widget.resize(width, height)
        widget.show()
        return widget

    def waitUntil(self, callback: Callable[[], bool | None], *, timeout: int = PATIENCE_MS) -> None:
        super().waitUntil(callback, timeout=timeout)

    def waitSignal(self, signal: Any, *, timeout: int = PATIENCE_MS, **how: Any) -> Any:
        return super().waitSignal(signal, timeout=timeout, **how)

    def waitActive(self, widget: QWidget, *, timeout: int = PATIENCE_MS) -> Any:
        return super().waitActive(widget, timeout=timeout)


def point_at(widget: QWidget, at: QPoint) -> None:
    """Move the pointer within a widget, also where a window that another test has left lies above it."""
    none = (Qt.MouseButton.NoButton, Qt.MouseButton.NoButton, Qt.KeyboardModifier.NoModifier)
    place = QPointF(at), QPointF(widget.mapToGlobal(at))
    QApplication.sendEvent(widget, QMouseEvent(QEvent.Type.MouseMove, *place, *none))


def drop(on: QWidget, *files: Path) -> None:
    """Drop files as a file manager does: the widget takes them, or the first of its parents that accepts them."""
    mime = QMimeData()
    mime.setUrls([QUrl.fromLocalFile(str(file)) for file in files])
    mime.setText(files[0].as_uri())  # and line edits accept text
    rest = (Qt.DropAction.CopyAction, mime, Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier)
    while True:
        event = QDragEnterEvent(QPoint(5, 5), *rest)
        event.ignore()
        if on.acceptDrops() and QApplication.sendEvent(on, event) and event.isAccepted():
            QApplication.sendEvent(on, QDropEvent(QPointF(5, 5), *rest))
            return
        if on.isWindow():
            return
        on = on.parentWidget()


def table_texts(model: QAbstractItemModel) -> list[list[str]]:
    """What the cells of a table say, by row."""
    columns = range(model.columnCount())
    return [[str(model.index(row, column).data()) for column in columns] for row in range(model.rowCount())]


def cut_texts(window: QWidget) -> list[str]:
    """The labels, buttons and menus of a window that have less room than their texts, unless they elide it."""
    cut = []
    for each in window.findChildren(QWidget):
        if not each.isVisible() or each.window() is not window or isinstance(each, ELIDED):
            continue
        room, needed, text = each.size(), each.sizeHint(), ""
        if isinstance(each, QComboBox):
            option, style, text = QStyleOptionComboBox(), each.style(), each.currentText()
            each.initStyleOption(option)
            part = style.SubControl.SC_ComboBoxEditField
            room.setWidth(style.subControlRect(style.ComplexControl.CC_ComboBox, option, part).width())
            needed.setWidth(each.fontMetrics().horizontalAdvance(text))
        elif isinstance(each, QLabel | QAbstractButton) and not isinstance(each.parent(), QLineEdit):
            text = each.text()
            if isinstance(each, QLabel) and each.wordWrap():
                needed = QSize(0, each.heightForWidth(each.width()))
        if text and room.expandedTo(needed) != room:
            cut.append(f"{text!r}: {room.toTuple()} of {needed.toTuple()}")
    return cut


@contextmanager
def active_window(session: Session, qtbot: Any, *, restored: bool = False) -> Iterator[Window]:
    """The window of a session, 1280 × 800, with the keyboard's focus."""
    window = Window(session)
    if restored:
        session.restore()
    qtbot.addWidget(window)
    window.resize(1280, 800)
    with qtbot.waitActive(window):
        window.show()
        window.activateWindow()
    yield window
