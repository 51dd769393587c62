"""The menu that copies or saves the two tables of a comparison, as CSV or Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from PySide6.QtCore import QObject
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QFileDialog, QMenu, QMessageBox, QWidget

from backend.spec.run_comparison import as_csv, as_markdown

Tables = Sequence[Sequence[Sequence[str]]]
FILTERS = "Markdown (*.md);;CSV (*.csv)"


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
        menu.addAction("Save as…", self.save_as)
        return menu

    def copy(self, write: Callable[[Sequence[Sequence[str]]], str]) -> None:
        """Put both tables on the clipboard, with an empty line between them."""
        QGuiApplication.clipboard().setText("\n".join(map(write, self._tables())))

    def save_as(self) -> None:
        path, chosen = QFileDialog.getSaveFileName(self._window, "Save the tables", "comparison.md", FILTERS)
        if path:
            self.save(Path(path), as_csv if path.endswith(".csv") or (chosen and "csv" in chosen) else as_markdown)

    def save(self, path: Path, write: Callable[[Sequence[Sequence[str]]], str]) -> None:
        try:
            path.write_text("\n".join(map(write, self._tables())), encoding="utf-8")
        except OSError as error:
            QMessageBox.warning(self._window, "Not saved", f"{path} cannot be written: {error.strerror}.")
