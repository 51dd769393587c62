"""The base of our dialogs, questions, the desktop's file dialogs, and opening files and links in other programs."""

from collections.abc import Mapping
from html import escape
from pathlib import Path

from PySide6.QtCore import QStandardPaths, Qt, QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QFileDialog, QMessageBox, QPushButton, QTextBrowser, QWidget

from app import theme
from app.state.prefs import Prefs
from app.widgets.basic.layout import column, configure, on_screen

memory: list[Prefs] = []  # the window's preferences, which remember the folders of file dialogs


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
    """Shows HTML of our own. Not modal."""

    def __init__(self, title: str, html: str, parent: QWidget | None = None) -> None:
        super().__init__(title, parent, (640, 560))
        self.text = configure(QTextBrowser(), name=title, font=theme.body_font())
        self.text.document().setDocumentMargin(2 * theme.SPACE)
        self.text.setHtml(html)
        column((self.text, 1), self.close_box(), into=self, margins=2 * theme.SPACE)


def show_details(trace: str, parent: QWidget) -> None:
    TextDialog("Details", f"<pre>{escape(trace)}</pre>", parent.window()).show()


def first_folder(kind: str) -> Path:
    remembered = memory[0].folder_of(kind) if memory else None
    if remembered is not None and remembered.is_dir():
        return remembered
    documents = Path(QStandardPaths.writableLocation(QStandardPaths.StandardLocation.DocumentsLocation))
    return documents if documents.is_dir() else Path.home()


def open_file(parent: QWidget, kind: str, title: str, pattern: str, near: Path | None = None) -> Path | None:
    return _remember(kind, QFileDialog.getOpenFileName(parent, title, str(_begin(kind, near)), pattern)[0])


def save_file(parent: QWidget, kind: str, title: str, name: str, pattern: str, near: Path | None = None) -> Path | None:
    return _remember(kind, QFileDialog.getSaveFileName(parent, title, str(_begin(kind, near) / name), pattern)[0])


def open_folder(parent: QWidget, kind: str, title: str, near: Path | None = None) -> Path | None:
    return _remember(kind, QFileDialog.getExistingDirectory(parent, title, str(_begin(kind, near))))


def _begin(kind: str, near: Path | None) -> Path:
    return near.parent if near is not None and near.parent.is_dir() else first_folder(kind)


def _remember(kind: str, chosen: str) -> Path | None:
    if not chosen:
        return None
    if memory:
        memory[0].remember_folder(kind, Path(chosen).parent)
    return Path(chosen)


def open_path(path: Path) -> None:
    QDesktopServices.openUrl(QUrl.fromLocalFile(str(path)))


def open_link(link: str) -> bool:
    """Open a link in the program that is registered for it; False if there is none."""
    return QDesktopServices.openUrl(QUrl(link))


SAVING = {"save": "Save", "discard": "Do not save", "cancel": "Cancel"}  # answers to the question what becomes of edits


def ask(parent: QWidget, question: str, detail: str, answers: Mapping[str, str]) -> str:
    box = QuestionBox(parent, question, detail, answers)
    box.exec()
    return box.answer


class QuestionBox(QMessageBox):
    """`answer`: key of the button that was clicked, the last if it was closed."""

    def __init__(self, parent: QWidget, question: str, detail: str, answers: Mapping[str, str]) -> None:
        super().__init__(QMessageBox.Icon.NoIcon, "", question, parent=parent)
        self.setTextFormat(Qt.TextFormat.PlainText)  # names of runs and files are in them
        self.setInformativeText(detail)
        role = QMessageBox.ButtonRole
        roles = [role.AcceptRole, role.DestructiveRole, role.RejectRole]
        self._keys = list(answers)
        self._buttons = [self.addButton(text, kind) for text, kind in zip(answers.values(), roles, strict=True)]
        self.setDefaultButton(self._buttons[0])
        self.setEscapeButton(self._buttons[-1])

    @property
    def answer(self) -> str:
        clicked = self.clickedButton()
        return next((key for key, own in zip(self._keys, self._buttons, strict=True) if own is clicked), self._keys[-1])
