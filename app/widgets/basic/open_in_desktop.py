"""Hand files and folders over to the desktop's own programs."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QUrl
from PySide6.QtGui import QDesktopServices


def open_path(path: Path) -> None:
    """Open a file or folder in the program that the desktop associates with it."""
    QDesktopServices.openUrl(QUrl.fromLocalFile(str(path)))


def open_link(link: str) -> bool:
    """Hand a link over to the program that is registered for it; whether there is one."""
    return QDesktopServices.openUrl(QUrl(link))
