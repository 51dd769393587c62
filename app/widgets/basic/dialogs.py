"""The base of our dialogs, the desktop's file dialogs, and opening files and links in other programs."""

from __future__ import annotations

from html import escape
from pathlib import Path

from PySide6.QtCore import QStandardPaths, Qt, QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QFileDialog, QPushButton, QTextBrowser, QWidget

from app import theme
from app.state.prefs import Prefs
from app.widgets.basic.layout import column, configure, on_screen

_memory: list[Prefs] = []


class Dialog(QDialog):
    """A dialog that is deleted when it is closed, else it would live on as a child of the window."""

    def __init__(self, title: str, parent: QWidget | None = None, size: tuple[int, int] | None = None) -> None:
        """`size` in pixels before scaling."""
        super().__init__(parent)
        self.setWindowTitle(title)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        if size is not None:
            self.resize(on_screen(self, *size))

    def close_box(self, *others: QPushButton) -> QDialogButtonBox:
        """The button Close, which Return presses, and others beside it."""
        box = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        box.rejected.connect(self.reject)
        for other in others:
            other.setAutoDefault(False)
            box.addButton(other, QDialogButtonBox.ButtonRole.ActionRole)
        return box


class TextDialog(Dialog):
    """Shows Markdown, or HTML of our own. Not modal."""

    def __init__(self, title: str, text: str, parent: QWidget | None = None, *, is_html: bool = False) -> None:
        super().__init__(title, parent, (640, 560))
        # Links between documents of ours lead nowhere here.
        self.text = configure(QTextBrowser(openLinks=False), name=title, font=theme.body_font())
        self.text.document().setDocumentMargin(2 * theme.SPACE)
        self.text.setHtml(text) if is_html else self.text.setMarkdown(text)
        column((self.text, 1), self.close_box(), into=self, margins=2 * theme.SPACE)


def show_details(trace: str, parent: QWidget) -> None:
    """Show the traceback of the user's own code."""
    TextDialog("Details", f"<pre>{escape(trace)}</pre>", parent.window(), is_html=True).show()


def keep_folders_in(prefs: Prefs) -> None:
    """Remember the folders of file dialogs between launches."""
    _memory[:] = [prefs]


def first_folder(kind: str) -> Path:
    """The folder in which a dialog for this kind of file begins."""
    remembered = _memory[0].folder_of(kind) if _memory else None
    if remembered is not None and remembered.is_dir():
        return remembered
    documents = Path(QStandardPaths.writableLocation(QStandardPaths.StandardLocation.DocumentsLocation))
    return documents if documents.is_dir() else Path.home()


def open_file(parent: QWidget, kind: str, title: str, pattern: str, near: Path | None = None) -> Path | None:
    """Ask for a file; None when cancelled."""
    return _remember(kind, QFileDialog.getOpenFileName(parent, title, str(_begin(kind, near)), pattern)[0])


def save_file(parent: QWidget, kind: str, title: str, name: str, pattern: str, near: Path | None = None) -> Path | None:
    """Ask where to save; `name` is the proposed file name."""
    return _remember(kind, QFileDialog.getSaveFileName(parent, title, str(_begin(kind, near) / name), pattern)[0])


def open_folder(parent: QWidget, kind: str, title: str, near: Path | None = None) -> Path | None:
    return _remember(kind, QFileDialog.getExistingDirectory(parent, title, str(_begin(kind, near))))


def _begin(kind: str, near: Path | None) -> Path:
    return near.parent if near is not None and near.parent.is_dir() else first_folder(kind)


def _remember(kind: str, chosen: str) -> Path | None:
    if not chosen:
        return None
    if _memory:
        _memory[0].remember_folder(kind, Path(chosen).parent)
    return Path(chosen)


def open_path(path: Path) -> None:
    """Open a file or folder in the desktop's program for it."""
    QDesktopServices.openUrl(QUrl.fromLocalFile(str(path)))


def open_link(link: str) -> bool:
    """Open a link in the program that is registered for it; False if there is none."""
    return QDesktopServices.openUrl(QUrl(link))
