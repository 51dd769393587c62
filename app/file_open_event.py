"""A config that is double-clicked in Finder comes to the running application as an event, and not as an argument."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QEvent, QObject
from PySide6.QtGui import QFileOpenEvent


class FileOpener(QObject):
    """An event filter of the application: hands every file that the desktop wants opened to `take`."""

    def __init__(self, take: Callable[[Path], None], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.open_path = take

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.FileOpen and isinstance(event, QFileOpenEvent) and event.file():
            self.open_path(Path(event.file()))
            return True
        return super().eventFilter(watched, event)
