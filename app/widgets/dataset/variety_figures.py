"""What is known of the variety of a dataset's prompts: figures in two columns, names and values."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QGridLayout, QLabel, QWidget

from app import theme
from app.widgets.basic.controls import ElidedLabel
from app.widgets.basic.labels_and_buttons import label, plain_tip

COLUMNS = 2
"""Figures in a line."""


class VarietyFigures(QWidget):
    """Shows (name, value, help) of each figure; a placeholder while there are none."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setAccessibleName("Variety of the prompts")
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(theme.SPACE)
        self._grid.setVerticalSpacing(0)
        self._cells: list[tuple[QLabel, ElidedLabel]] = []
        self._instead = label(font=theme.caption_font(), role="muted", wrap=True, align=Qt.AlignmentFlag.AlignCenter)
        self._grid.addWidget(self._instead, 0, 0, 1, 2 * COLUMNS)
        for column in range(COLUMNS):
            self._grid.setColumnStretch(2 * column + 1, 1)

    def show_figures(self, figures: Sequence[tuple[str, str, str]], placeholder: str = "") -> None:
        """Show these instead of those before. `placeholder`: the text where there are none."""
        self._instead.setText(placeholder)
        self._instead.setVisible(not figures)
        for _ in range(len(self._cells), len(figures)):
            self._add()
        for place, cells in enumerate(self._cells):
            for widget in cells:
                widget.setVisible(place < len(figures))
        for (named, shown), (name, value, tip) in zip(self._cells, figures, strict=False):
            named.setText(name)
            shown.setText(value)
            shown.setAccessibleName(f"{name}: {value}")
            for widget in (named, shown):
                widget.setToolTip(plain_tip(f"{value}\n{tip}"))

    def _add(self) -> None:
        named, shown = label(font=theme.caption_font(), role="caption"), ElidedLabel()
        shown.setFont(theme.figures_font(theme.CAPTION))
        line, column = divmod(len(self._cells), COLUMNS)
        for offset, widget in enumerate((named, shown)):
            self._grid.addWidget(widget, line, 2 * column + offset)
        self._cells.append((named, shown))
