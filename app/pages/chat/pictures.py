"""The pictures of a prompt, and files of pictures that are dropped or pasted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from PySide6.QtCore import QMimeData, Qt
from PySide6.QtWidgets import QAbstractButton, QWidget

from app.widgets.basic.icons import IconButton
from app.widgets.basic.layout import FlowLayout, clear_layout, holder, row
from app.widgets.pictures import PictureButton, PictureDialog

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
SIDE = 72


def picture_files(mime: QMimeData) -> list[str]:
    """Paths of the files that are dragged or in the clipboard, if all are pictures; else []."""
    files = [url.toLocalFile() for url in mime.urls()]
    return files if all(file.lower().endswith(SUFFIXES) for file in files) else []


class PromptPictures(QWidget):
    """Thumbnails of a prompt's pictures above its text. `can_remove`: each has a button that removes it."""

    def __init__(self, paths: Sequence[str] = (), *, can_remove: bool = True) -> None:
        super().__init__()
        self._can_remove, self._places = can_remove, FlowLayout(self)
        self.fill(paths)

    def fill(self, paths: Sequence[str]) -> None:
        self.paths = list(paths)
        clear_layout(self._places)
        for place, path in enumerate(paths):
            picture = PictureButton(path, f"Picture {place + 1} of {len(paths)}", SIDE)
            picture.clicked.connect(partial(self._show, place))
            parts: list[tuple[QAbstractButton, int, Qt.AlignmentFlag]] = [(picture, 0, Qt.AlignmentFlag.AlignTop)]
            if self._can_remove:
                remove = IconButton("close", tip=f"Remove {Path(path).name}", clicked=partial(self._remove, place))
                parts.append((remove, 0, Qt.AlignmentFlag.AlignTop))
            self._places.addWidget(holder(row(*parts, spacing=0, margins=(0, 0, 0, 6))))

    def _show(self, place: int) -> None:
        PictureDialog(self.paths, place, self.window()).show()

    def _remove(self, place: int) -> None:
        self.fill([path for i, path in enumerate(self.paths) if i != place])
