"""The window as a person has it: shown, active, and with its processes ended afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from app.model.service import Service
from app.model.session import Session
from app.window import Window


class SilentService(Service):
    """Takes questions and answers none, without a process: for a window whose pages ask what the test does not wait for."""

    def _start(self) -> bool:
        self._process = None
        return True


@contextmanager
def active_window(session: Session, qtbot: Any, *, restored: bool = False) -> Iterator[Window]:
    """The window of a session, 1280 × 800, with the keyboard's focus. `restored`: with the draft that was left, as at a start of the app."""
    window = Window(session)
    if restored:
        session.restore()
    qtbot.addWidget(window)
    window.resize(1280, 800)
    with qtbot.waitActive(window):
        window.show()
        window.activateWindow()
    yield window
    if session._service is not None:
        session._service.close()
