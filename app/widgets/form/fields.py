"""One editor for each kind of setting: how its values become text or a choice, and back."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QHBoxLayout, QLabel, QLineEdit, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import ComboBox, LinkButton, NumberEdit, ProseEdit, Switch
from app.widgets.form import value_text
from app.widgets.form.field import Field, LineField
from app.widgets.form.path_field import PathField
from backend.spec import first_choices
from backend.spec.rewards.catalog import split_names
from backend.spec.setting import Setting


class TextField(LineField):
    def line(self) -> QLineEdit:
        line = QLineEdit(self)
        line.setPlaceholderText(str(self.setting.default or ""))
        return line


class NumberField(LineField):
    """Takes 1e-5 and keeps it as typed."""

    def line(self) -> QLineEdit:
        line = NumberEdit(self.setting.unit, self)
        line.setPlaceholderText(value_text.number_text(self.setting.default))
        return line

    def value(self) -> Any:
        text = self.control.text()
        if self.setting.optional and not text.strip():
            return None
        return value_text.number_value(text, self.setting.kind == "int")

    def text_of(self, raw: Any) -> str:
        return value_text.number_text(raw)


class ListField(LineField):
    wide = True

    def value(self) -> Any:
        return value_text.list_value(self.control.text())

    def text_of(self, raw: Any) -> str:
        return value_text.list_text(raw)


class RewardsField(ListField):
    """Names of reward functions; a name may have arguments in brackets, with commas of their own."""

    def value(self) -> Any:
        return split_names(self.control.text())

    def text_of(self, raw: Any) -> str:
        return ", ".join(map(str, raw)) if isinstance(raw, list) else str(raw or "")


class NumbersField(LineField):
    wide = True

    def line(self) -> QLineEdit:
        line = NumberEdit(parent=self)
        line.setPlaceholderText("1 for each")
        return line

    def value(self) -> Any:
        return value_text.numbers_value(self.control.text())

    def text_of(self, raw: Any) -> str:
        return value_text.numbers_text(raw)


_SUGGESTED = {"system_prompt": first_choices.SYSTEM_PROMPT}
"""Setting → a text that can be taken where it is empty."""


class MenuField(Field):
    control: ComboBox

    def build(self) -> QWidget:
        self.control = ComboBox(self)
        for place, choice in enumerate(self.setting.choices):
            self.control.addItem(choice.label, choice.value)
            self.control.setItemData(place, choice.sentence, Qt.ItemDataRole.ToolTipRole)
        self.control.activated.connect(self.emit_edited)
        return self.control

    def value(self) -> Any:
        return self.control.currentData()

    def set_control_value(self, raw: Any) -> None:
        self.control.choose(str(raw))


class ExplainedMenuField(MenuField):
    """A menu with the help beside it, where the choice shapes the whole form."""

    wide = True

    def build(self) -> QWidget:
        row, said = QWidget(self), QLabel(self.setting.help, wordWrap=True)
        said.setProperty("role", "muted")
        across = QHBoxLayout(row)
        across.setContentsMargins(0, 0, 0, 0)
        across.setSpacing(2 * theme.SPACE)
        across.addWidget(super().build(), 1, Qt.AlignmentFlag.AlignTop)
        across.addWidget(said, 3)
        return row


class SwitchField(Field):
    control: Switch

    def build(self) -> QWidget:
        self.control = Switch(self)
        self.control.clicked.connect(self.emit_edited)
        return self.control

    def value(self) -> Any:
        return self.control.isChecked()

    def set_control_value(self, raw: Any) -> None:
        self.control.setChecked(raw is True or str(raw).strip().lower() in ("true", "yes", "on", "1"))


class ProseField(Field):
    control: ProseEdit
    wide = True
    lines = 4

    def build(self) -> QWidget:
        self._showing = False
        self.control = ProseEdit(self.lines, self)
        self.control.setUndoRedoEnabled(False)  # the form undoes
        self.control.edited.connect(self._say_typed)
        self.suggestion = LinkButton("Use the suggested text")
        self.suggestion.setAccessibleName(f"Use the suggested text for {self.setting.label}")
        self.suggestion.clicked.connect(self._take_suggestion)
        self.control.textChanged.connect(self._offer)
        holder = QWidget(self)
        column = QVBoxLayout(holder)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self.control)
        column.addWidget(self.suggestion, 0, Qt.AlignmentFlag.AlignLeft)
        self._offer()  # once it stands in something: shown before, it would be a window of its own for a moment
        return holder

    def tab_stops(self) -> list[QWidget]:
        return [self.control, self.suggestion]

    def _offer(self) -> None:
        """A suggestion is offered where there is one and nothing stands there yet."""
        self.suggestion.setVisible(self.setting.key in _SUGGESTED and not self.control.toPlainText().strip())

    def _take_suggestion(self) -> None:
        self.set_control_value(_SUGGESTED[self.setting.key])
        self.emit_edited()
        self.control.setFocus()

    def value(self) -> Any:
        return self.control.toPlainText()

    def set_control_value(self, raw: Any) -> None:
        # A plain text edit has no signal for what was typed by hand alone, as a line edit has.
        self._showing = True
        self.control.setPlainText(self.text_of(raw))
        self._showing = False

    def text_of(self, raw: Any) -> str:
        return str(raw or "")

    def _say_typed(self) -> None:
        if not self._showing:
            self.emit_edited()


class MappingField(ProseField):
    """One `key: value` a line."""

    lines = 2

    def value(self) -> Any:
        return value_text.mapping_value(self.control.toPlainText())

    def text_of(self, raw: Any) -> str:
        return value_text.mapping_text(raw)


class StagesField(ProseField):
    """One stage a line, as a JSON object such as {"iters": 100, "reward_weights": [1, 0.5]}."""

    lines = 3

    def value(self) -> Any:
        return value_text.stages_value(self.control.toPlainText())

    def text_of(self, raw: Any) -> str:
        return value_text.stages_text(raw)


class FactField(Field):
    """Something to know that cannot be changed."""

    wide = True

    def build(self) -> QWidget:
        self.control = QLabel(self.setting.help, self)
        self.control.setWordWrap(True)
        self._raw: Any = self.setting.default
        return self.control

    def value(self) -> Any:
        return self._raw

    def set_control_value(self, raw: Any) -> None:
        self._raw = raw


_KINDS: dict[str, type[Field]] = {
    "int": NumberField,
    "float": NumberField,
    "bool": SwitchField,
    "text": TextField,
    "prose": ProseField,
    "choice": MenuField,
    "file": PathField,
    "model": PathField,
    "dataset": PathField,
    "list": ListField,
    "numbers": NumbersField,
    "rewards": RewardsField,
    "mapping": MappingField,
    "stages": StagesField,
    "fact": FactField,
}


def make_field(setting: Setting, parent: QWidget | None = None) -> Field:
    """The editor for a setting's kind. Given its place from the start it is dressed once, and not again at every move."""
    if setting.section == "algorithm" and setting.kind == "choice":
        return ExplainedMenuField(setting, parent)
    return _KINDS[setting.kind](setting, parent)
