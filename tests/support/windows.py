"""The window as a person has it: shown, active, and with its processes ended afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from PySide6.QtWidgets import QWidget
from pytestqt.qtbot import QtBot

from app.state.processes import Service
from app.state.session import Session
from app.window import Window

PATIENCE_MS = 60_000


class SilentService(Service):
    """Takes questions and answers none, without a process: for a window whose pages ask what the test does not wait
    for."""

    def _start(self) -> bool:
        self._process = None
        return True


class PatientQtBot(QtBot):
    """A QtBot that waits for up to a minute."""

    def waitUntil(self, callback: Callable[[], bool | None], *, timeout: int = PATIENCE_MS) -> None:
        super().waitUntil(callback, timeout=timeout)

    def waitSignal(self, signal: Any, *, timeout: int = PATIENCE_MS, **how: Any) -> Any:
        return super().waitSignal(signal, timeout=timeout, **how)

    def waitSignals(self, signals: Any, *, timeout: int = PATIENCE_MS, **how: Any) -> Any:
        return super().waitSignals(signals, timeout=timeout, **how)

    def waitActive(self, widget: QWidget, *, timeout: int = PATIENCE_MS) -> Any:
        return super().waitActive(widget, timeout=timeout)


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
    if "service" in vars(session):
        session.service.close()
