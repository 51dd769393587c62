"""The desktop's dialogs for files and folders. Each kind of thing (a config, a dataset, a model, …) begins in the folder where one was
last chosen, at first in Documents: never in the folder that the app happens to run in.

Every dialog of the window is opened here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from PySide6.QtCore import QStandardPaths, QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QFileDialog, QWidget


class FolderMemory(Protocol):
    """Where the folders are kept between launches; `app.state.prefs.Prefs` is one."""

    def folder_of(self, kind: str) -> Path | None:
        """The folder in which a thing of this kind was last chosen."""
        ...

    def remember_folder(self, kind: str, folder: Path) -> None: ...


_memory: list[FolderMemory] = []


def keep_folders_in(memory: FolderMemory) -> None:
    """Keep the folders there from now on."""
    _memory[:] = [memory]


def first_folder(kind: str) -> Path:
    """Where a dialog for this kind of thing begins."""
    remembered = _memory[0].folder_of(kind) if _memory else None
    if remembered is not None and remembered.is_dir():
        return remembered
    documents = Path(QStandardPaths.writableLocation(QStandardPaths.StandardLocation.DocumentsLocation))
    return documents if documents.is_dir() else Path.home()


def open_file(parent: QWidget, kind: str, title: str, pattern: str, near: Path | None = None) -> Path | None:
    """Have the user choose a file; None where that is cancelled. `near`: the file chosen now, whose folder goes before the last one."""
    chosen, _ = QFileDialog.getOpenFileName(parent, title, str(_beginning(kind, near)), pattern)
    return _remembered(kind, chosen)


def save_file(parent: QWidget, kind: str, title: str, name: str, pattern: str, near: Path | None = None) -> Path | None:
    """Have the user choose where to save; `name` is proposed."""
    chosen, _ = QFileDialog.getSaveFileName(parent, title, str(_beginning(kind, near) / name), pattern)
    return _remembered(kind, chosen)


def open_folder(parent: QWidget, kind: str, title: str, near: Path | None = None) -> Path | None:
    """Have the user choose a folder."""
    return _remembered(kind, QFileDialog.getExistingDirectory(parent, title, str(_beginning(kind, near))))


def _beginning(kind: str, near: Path | None) -> Path:
    return near.parent if near is not None and near.parent.is_dir() else first_folder(kind)


def _remembered(kind: str, chosen: str) -> Path | None:
    """The path that was chosen; its folder is where the next dialog of this kind begins."""
    if not chosen:
        return None
    if _memory:
        _memory[0].remember_folder(kind, Path(chosen).parent)
    return Path(chosen)


def open_path(path: Path) -> None:
    """Open a file or folder in the program that the desktop associates with it."""
    QDesktopServices.openUrl(QUrl.fromLocalFile(str(path)))


def open_link(link: str) -> bool:
    """Hand a link over to the program that is registered for it; whether there is one."""
    return QDesktopServices.openUrl(QUrl(link))
