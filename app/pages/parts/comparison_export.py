"""The menu that copies or saves the two tables of a comparison, as CSV or Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from PySide6.QtCore import QObject
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QMenu, QMessageBox, QWidget

from app.widgets.basic.file_dialogs import save_file
from backend.spec.disk_faults import DiskFault
from backend.spec.runs.run_comparison import as_csv, as_markdown
from backend.spec.whole_file import save_as

Tables = Sequence[Sequence[Sequence[str]]]
KIND = "tables"
"""What the preferences remember the folder for."""


class ComparisonExport(QObject):
    """`tables()` returns the tables as they are now."""

    def __init__(self, tables: Callable[[], Tables], parent: QWidget) -> None:
        super().__init__(parent)
        self._tables, self._window = tables, parent

    def menu(self, parent: QWidget) -> QMenu:
        menu = QMenu(parent)
        menu.addAction("Copy as Markdown", lambda: self.copy(as_markdown))
        menu.addAction("Copy as CSV", lambda: self.copy(as_csv))
        menu.addSeparator()
        menu.addAction("Save as Markdown…", lambda: self.save_as("Markdown", ".md", as_markdown))
        menu.addAction("Save as CSV…", lambda: self.save_as("CSV", ".csv", as_csv))
        return menu

    def copy(self, write: Callable[[Sequence[Sequence[str]]], str]) -> None:
        """Put both tables on the clipboard, with an empty line between them."""
        QGuiApplication.clipboard().setText("\n".join(map(write, self._tables())))

    def save_as(self, format: str, suffix: str, write: Callable[[Sequence[Sequence[str]]], str]) -> None:
        """Ask for a file, and write both tables into it."""
        name, pattern = f"comparison{suffix}", f"{format} (*{suffix})"
        if path := save_file(self._window, KIND, "Save the tables", name, pattern):
            self.save(path, write)

    def save(self, path: Path, write: Callable[[Sequence[Sequence[str]]], str]) -> None:
        try:
            save_as(path, "\n".join(map(write, self._tables())))
        except DiskFault as fault:
            QMessageBox.warning(self._window, "Not saved", fault.faults[0].sentence)
