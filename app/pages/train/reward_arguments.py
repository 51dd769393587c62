"""The detail of the current row of the reward table: all of what the function scores, and a field for each of its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QGridLayout, QLineEdit, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import ComboBox, ElidedLabel
from app.widgets.basic.labels_and_buttons import label, plain_tip
from app.widgets.basic.layout import clear_layout
from app.widgets.form import value_text
from backend.rewards.catalogue.entry import RewardCall, read_call
from backend.rewards.catalogue.parse import Parameter, RewardEntry
from backend.utils.errors import UserError

COLUMNS = 3
"""Fields side by side."""
_YES_NO = {"true": "Yes", "false": "No"}
_KIND_WORDS = (("bool", "yes or no"), ("int", "whole number"), ("float", "number"), ("list", "list"), ("str", "text"))


class RewardArguments(QWidget):
    """What a function scores, and its arguments as typed fields; an empty field stands for the default.

    Signals:
        changed(entry as it was, entry as it is now) – the user changed an argument.
    """

    changed = Signal(str, str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._entry: RewardEntry | None = None
        self.fields: dict[str, QLineEdit | ComboBox] = {}
        self._about = label(font=theme.caption_font(), role="muted", wrap=True, selectable=True)
        self._grid = QGridLayout()
        self._grid.setHorizontalSpacing(2 * theme.SPACE)
        self._grid.setVerticalSpacing(4)
        for column in range(COLUMNS):
            self._grid.setColumnStretch(column, 1)
        column = QVBoxLayout(self)
        column.setContentsMargins(theme.SPACE, 0, theme.SPACE, theme.SPACE)
        column.setSpacing(theme.SPACE)
        column.addWidget(self._about)
        column.addLayout(self._grid)
        self.hide()

    def show_entry(self, entry: RewardEntry | None) -> None:
        """Show this function; None hides it all."""
        if entry == self._entry:
            return
        # Rebuilt only for another function: after a change the next field has the focus already, and must keep it.
        is_same = entry is not None and self._entry is not None and _signature(entry) == _signature(self._entry)
        self._entry = entry
        self.setVisible(entry is not None)
        if entry is None:
            return
        scores = entry.scores.replace("`", "") or "Its docstring does not say what it scores."
        self._about.setText(f"{entry.label}: {scores}")
        if not is_same:
            clear_layout(self._grid)
            self.fields = {}
            for index, parameter in enumerate(entry.parameters):
                self._add_field(index, parameter)
        self._show_values(_call(entry).arguments)

    def tab_stops(self) -> list[QWidget]:
        return list(self.fields.values())

    def _show_values(self, given: Mapping[str, Any]) -> None:
        for name, field in self.fields.items():
            value = given.get(name)
            if isinstance(field, ComboBox):
                field.setCurrentIndex(max(0, field.findData("" if value is None else str(value).lower())))
            elif field.text() != _text(value):
                field.setText(_text(value))

    def _add_field(self, index: int, parameter: Parameter) -> None:
        kind = next((words for name, words in _KIND_WORDS if name in parameter.kind), "")
        title = ElidedLabel()  # a long name must not make the page wider than the window
        title.setText(" · ".join(filter(None, [parameter.name.replace("_", " "), kind])))
        title.setToolTip(plain_tip(title.text()))
        field = self._editor(parameter)
        field.setAccessibleName(f"{parameter.name} of {self._entry.label if self._entry else ''}")
        field.setToolTip(
            plain_tip("It must be given." if parameter.default is None else f"Default: {parameter.default}")
        )
        title.setBuddy(field)
        row, column = divmod(index, COLUMNS)
        self._grid.addWidget(title, 2 * row, column)
        self._grid.addWidget(field, 2 * row + 1, column)
        self.fields[parameter.name] = field

    def _editor(self, parameter: Parameter) -> QLineEdit | ComboBox:
        if parameter.kind == "bool":
            menu = ComboBox()
            default = _YES_NO.get((parameter.default or "").lower(), "")
            menu.addItem(f"Default ({default.lower()})" if default else "Choose", "")
            for key, word in _YES_NO.items():
                menu.addItem(word, key)
            menu.activated.connect(self._emit_changed)
            return menu
        line = QLineEdit()
        line.setPlaceholderText("must be given" if parameter.default is None else parameter.default.strip("\"'"))
        line.editingFinished.connect(self._emit_changed)
        return line

    def _emit_changed(self) -> None:
        if self._entry is None:
            return
        call = _call(self._entry)
        arguments = dict(call.arguments)
        for parameter in self._entry.parameters:
            value = _value(self._typed(parameter.name), parameter.kind)
            if value is None:
                arguments.pop(parameter.name, None)
            else:
                arguments[parameter.name] = value
        text = RewardCall(call.function, arguments, call.alias, call.file).text
        if text != call.text:
            self.changed.emit(self._entry.name, text)

    def _typed(self, name: str) -> str:
        field = self.fields[name]
        return field.currentData() if isinstance(field, ComboBox) else field.text()


def _signature(entry: RewardEntry) -> tuple[str, tuple[Parameter, ...]]:
    call = _call(entry)
    return f"{call.file}::{call.function}", entry.parameters


def _call(entry: RewardEntry) -> RewardCall:
    try:
        return read_call(entry.name)
    except UserError:  # a name that cannot be parsed is shown as one; the form's problems say why
        return RewardCall(entry.name)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return value_text.list_text(value)
    return "" if value is None else value_text.number_text(value) if isinstance(value, float) else str(value)


def _value(typed: str, kind: str) -> Any:
    """The value of a typed argument: None for an empty one; text that is no number stays text, which the form's check refuses."""
    if not typed.strip():
        return None
    if kind == "bool":
        return typed == "true"
    if "list" in kind:
        return value_text.list_value(typed)
    if "int" in kind or "float" in kind:
        return _number(typed, whole="float" not in kind)
    return typed


def _number(typed: str, *, whole: bool) -> float | str:
    value = value_text.number_value(typed, whole)
    try:
        return value if isinstance(value, int | float) else float(value)
    except ValueError:
        return value
