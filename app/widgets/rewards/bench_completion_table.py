"""The completions on the bench: the completions table with narrow columns of scores, each headed by its function's dot.

The functions' names are in the table above it, with the same dots.
"""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import Qt

from app.widgets.basic.base_table import BaseTable
from app.widgets.completions.completion_model import CompletionModel
from app.widgets.completions.completion_table import CompletionTable

NARROW, TEXT = 54, 150
"""Width of a column of scores, and least width of the text, in pixels."""


class BenchCompletionModel(CompletionModel):
    """Headers of scores are dots without text; `label` has the text."""

    def label(self, column: int) -> str:
        """The header of a column as text, also where only a dot is shown."""
        return " ".join(str(super().headerData(column, Qt.Orientation.Horizontal)).split())

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        is_score = orientation == Qt.Orientation.Horizontal and 0 < section <= len(self.rewards)
        if is_score and role == Qt.ItemDataRole.DisplayRole:
            return ""
        if is_score and role in (Qt.ItemDataRole.ToolTipRole, Qt.ItemDataRole.AccessibleTextRole):
            return self.label(section)
        return super().headerData(section, orientation, role)


class BenchCompletionTable(CompletionTable):
    """The table view; copied rows have the functions' labels in their header line."""

    def __init__(self, model: BenchCompletionModel) -> None:
        super().__init__(model, max_score_width=NARROW, min_text_width=TEXT)
        self._scores = model

    def as_text(self, rows: list[int]) -> str:
        headers = [self._scores.label(column) for column in range(self._scores.columnCount())]
        return "\n".join(["\t".join(headers), *BaseTable.as_text(self, rows).split("\n")[1:]])
