"""A dialog of presets: each with its sentence and a preview of what it would change in the form.

It changes no setting itself: it emits the preset that the user applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import (
    QDialog,
    QDialogButtonBox,
    QHBoxLayout,
    QHeaderView,
    QListWidget,
    QListWidgetItem,
    QTableWidget,
    QTableWidgetItem,
    QVBoxLayout,
    QWidget,
)

from app import theme
from app.state.presets import Preset
from app.widgets.basic.labels_and_buttons import label, plain_tip
from app.widgets.basic.layout import on_screen, wrap_in_card
from app.widgets.form import value_text
from backend.config.setting import Setting

SIZE = (720, 480)
LIST_WIDTH = 176
MAX_CHARS = 60
"""Most characters of a value in the table."""


class PresetPanel(QDialog):
    """The dialog over `presets`; `values` are the form's present ones, which the preview compares with.

    Attributes:
        list, table – the presets, and the changes of the selected one: setting, value now, value then.
        title, sentence, keeps – labels: its title, its sentence, and what it leaves unchanged.
        buttons, apply – the button box, and its Apply button.

    Signals:
        taken(Preset) – the user applies it.
    """

    taken = Signal(object)

    def __init__(self, presets: Sequence[Preset], values: dict[str, Any], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.resize(on_screen(self, *SIZE))
        self.setWindowTitle("Presets")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)  # else every dialog lives on as a child of the window
        self._presets, self._values = list(presets), values
        self.list = QListWidget()
        self.list.setAccessibleName("Presets")
        self.list.setSpacing(3)
        self.list.addItems([preset.title for preset in presets])
        self.title, self.sentence = label(font=theme.title_font()), label(wrap=True, role="muted")
        self.keeps = label(wrap=True, role="muted")
        self.table = _change_table()
        self.buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Cancel)
        self.apply = self.buttons.addButton("Apply", QDialogButtonBox.ButtonRole.AcceptRole)
        self.apply.setProperty("role", "primary")
        self.apply.setDefault(True)
        self._lay_out()
        self._connect()
        self.list.setCurrentRow(0)

    @property
    def chosen(self) -> Preset:
        """The selected preset."""
        return self._presets[max(0, self.list.currentRow())]  # −1 while nothing is selected

    def _lay_out(self) -> None:
        choices, changes = wrap_in_card(self.list), wrap_in_card(self.table)
        choices.setFixedWidth(theme.scaled(LIST_WIDTH))
        preview = QVBoxLayout()
        preview.setSpacing(theme.SPACE)
        for part in (self.title, self.sentence, changes, self.keeps):
            preview.addWidget(part, 1 if part is changes else 0)
        across = QHBoxLayout()
        across.setSpacing(2 * theme.SPACE)
        across.addWidget(choices)
        across.addLayout(preview, 1)
        column = QVBoxLayout(self)
        column.setContentsMargins(*(2 * theme.SPACE,) * 4)
        column.setSpacing(2 * theme.SPACE)
        column.addLayout(across, 1)
        column.addWidget(self.buttons)

    def _connect(self) -> None:
        self.list.currentRowChanged.connect(self._show_chosen)
        self.list.itemActivated.connect(self._apply)
        self.buttons.accepted.connect(self._apply)
        self.buttons.rejected.connect(self.reject)

    def _show_chosen(self, _row: int = 0) -> None:
        preset = self.chosen
        changes = preset.changes(self._values)
        self.title.setText(preset.title)
        self.sentence.setText(preset.sentence)
        self.table.setRowCount(len(changes))
        for row, (setting, before, after) in enumerate(changes):
            for column, text in enumerate((setting.label, value_label(setting, before), value_label(setting, after))):
                item = QTableWidgetItem(text)
                item.setToolTip(plain_tip(text))  # the view elides what is wider than its column
                self.table.setItem(row, column, item)
        self.apply.setEnabled(bool(changes))
        self.keeps.setText(_kept_sentence(preset, len(changes)))

    def _apply(self, _item: QListWidgetItem | None = None) -> None:
        if (
            self.apply.isEnabled()
        ):  # activating a row of the list, by Return or a double click, does not go through the button
            self.taken.emit(self.chosen)
            self.accept()


def _change_table() -> QTableWidget:
    table = QTableWidget(0, 3)
    table.setHorizontalHeaderLabels(["Setting", "Now", "Then"])
    table.setAccessibleName("What the preset changes")
    table.verticalHeader().hide()
    table.setShowGrid(False)
    table.setEditTriggers(QTableWidget.EditTrigger.NoEditTriggers)
    table.setSelectionMode(QTableWidget.SelectionMode.NoSelection)
    # Reachable by Tab, to scroll it with the arrows; but Tab leads out of it again and not from cell to cell.
    table.setFocusPolicy(Qt.FocusPolicy.TabFocus)
    table.setTabKeyNavigation(False)
    header = table.horizontalHeader()
    header.setDefaultAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter)
    header.setSectionResizeMode(QHeaderView.ResizeMode.Stretch)
    header.setHighlightSections(False)
    return table


def _kept_sentence(preset: Preset, changes: int) -> str:
    if not changes:
        return "The form is like this already."
    if preset.replaces:
        return "It replaces the whole form: model, data and rewards too. Undo brings everything back."
    return "Model, data, columns and rewards stay as they are. Undo brings everything back."


def value_label(setting: Setting, value: Any) -> str:
    """A value as the form shows it, on one line of at most MAX_CHARS characters."""
    if setting.kind == "choice":
        text = next((choice.label for choice in setting.choices if choice.value == value), str(value))
    elif setting.kind == "bool":
        text = "On" if value is True else "Off"
    elif isinstance(value, list):
        text = value_text.list_text([str(item) for item in value])
    elif setting.kind in ("int", "float"):
        text = value_text.number_text(value)
    else:
        text = value_text.path_text(value) if value is not None else ""
    line = " ".join(text.split())
    return (line if len(line) <= MAX_CHARS else f"{line[: MAX_CHARS - 1]}…") or "empty"
