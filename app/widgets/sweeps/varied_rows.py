"""The settings that vary in a sweep, a row each: the setting, its values as text, and in a random search how they are drawn."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import ComboBox
from app.widgets.basic.labels_and_buttons import button
from app.widgets.basic.layout import set_shown, set_style_property
from backend.spec.setting import Setting

DRAWS = {"list": "any of", "log_uniform": "between, in decades", "uniform": "between, evenly"}
HINTS = {"list": "1e-5, 3e-5, 1e-4", "uniform": "0.5, 1.5", "log_uniform": "1e-6, 1e-3"}


class VariedRow(QWidget):
    """One setting.

    Signals:
        edited – any of its fields was changed.
        removed – its button was pressed.
    """

    edited = Signal()
    removed = Signal()

    def __init__(self, offered: Sequence[Setting], key: str, text: str, draw: str) -> None:
        super().__init__()
        self.setting, self.draw, self.values = ComboBox(), ComboBox(), QLineEdit(text)
        for about in offered:
            self.setting.addItem(about.label, about.key)
            self.setting.setItemData(self.setting.count() - 1, about.help, Qt.ItemDataRole.ToolTipRole)
        for value, words in DRAWS.items():
            self.draw.addItem(words, value)
        self.setting.choose(key)
        self.draw.choose(draw)
        self.setting.setAccessibleName("Setting that varies")
        self.draw.setAccessibleName("How its values are drawn")
        self.values.setAccessibleName("Its values")
        self.values.setFont(theme.figures_font())
        self.remove = button("Remove", self.removed.emit)
        self.remove.setAccessibleName("Remove this setting")
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(theme.SPACE)
        row.addWidget(self.setting, 2)
        row.addWidget(self.draw, 2)
        row.addWidget(self.values, 3)
        row.addWidget(self.remove)
        self.setting.currentIndexChanged.connect(lambda _: self.edited.emit())
        self.draw.currentIndexChanged.connect(lambda _: self._on_draw())
        self.values.textChanged.connect(lambda _: self.edited.emit())
        self._on_draw()

    @property
    def key(self) -> str:
        return self.setting.currentData()

    def content(self) -> tuple[str, str, str]:
        """(setting, text of its values, how they are drawn)."""
        return self.key, self.values.text(), self.draw.currentData()

    def _on_draw(self) -> None:
        self.values.setPlaceholderText(HINTS[self.draw.currentData()])
        self.edited.emit()


class VariedRows(QWidget):
    """All of them, and a button for one more.

    Signals:
        edited – any was changed, added or removed.
    """

    edited = Signal()

    def __init__(self, offered: Sequence[Setting]) -> None:
        super().__init__()
        self._offered = offered
        self._is_random = False
        self.rows: list[VariedRow] = []
        self.add_button = button("Add a setting", self.add_next)
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(theme.SPACE)
        self._column.addWidget(self.add_button, 0, Qt.AlignmentFlag.AlignLeft)

    def add(self, key: str, text: str, draw: str = "list") -> VariedRow:
        row = VariedRow(self._offered, key, text, draw)
        row.edited.connect(self.edited)
        row.removed.connect(lambda: self.remove(row))
        self.rows.append(row)
        self._column.insertWidget(len(self.rows) - 1, row)
        self._show()
        self.edited.emit()
        return row

    def add_next(self) -> None:
        """A row for the first setting that has none, ready to be typed in."""
        used = {row.key for row in self.rows}
        key = next((about.key for about in self._offered if about.key not in used), self._offered[0].key)
        self.add(key, "").values.setFocus(Qt.FocusReason.OtherFocusReason)

    def remove(self, row: VariedRow) -> None:
        self.rows.remove(row)
        self._column.removeWidget(row)
        row.hide()
        row.deleteLater()  # its button is what is being handled
        self._show()
        self.edited.emit()

    def show_draws(self, is_random: bool) -> None:
        """Whether rows say how values are drawn."""
        self._is_random = is_random
        self._show()

    def show_problems(self, keys: set[str]) -> None:
        """Mark the rows of these settings."""
        for row in self.rows:
            set_style_property(row.values, "problem", row.key in keys)

    def _show(self) -> None:
        for row in self.rows:
            set_shown(row.draw, self._is_random)
            row.remove.setEnabled(len(self.rows) > 1)
