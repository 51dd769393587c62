"""On macOS a config that is double-clicked in the Finder, or a run folder that is dropped on the Dock icon, reaches the running
application as a QFileOpenEvent, not as an argument."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QEvent, QObject
from PySide6.QtGui import QFileOpenEvent


class FileOpener(QObject):
    """An event filter of the application: calls `open_path` with every file that the desktop asks to open."""

    def __init__(self, open_path: Callable[[Path], None], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._open_path = open_path

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.FileOpen and isinstance(event, QFileOpenEvent) and event.file():
            self._open_path(Path(event.file()))
            return True
        return super().eventFilter(watched, event)
