"""One field class for each kind of setting: how a raw value becomes text or a choice, and back."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import ComboBox, LinkButton, NumberEdit, ProseEdit, Switch
from app.widgets.basic.labels_and_buttons import PlainLabel
from app.widgets.form import value_text
from app.widgets.form.field import Field, LineField
from app.widgets.form.path_field import AdapterField, PathField
from backend.config import first_choices
from backend.config.setting import Choice, Setting
from backend.rewards.catalogue.catalog import split_names


class TextField(LineField):
    """Text as it is typed; the default is the placeholder."""

    def line(self) -> QLineEdit:
        line = QLineEdit(self)
        line.setPlaceholderText(str(self.setting.default or ""))
        return line


class NumberField(LineField):
    """A number with its unit; scientific notation such as 1e-5 is kept as typed."""

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
    """A list of texts, separated by commas."""

    wide = True

    def value(self) -> Any:
        return value_text.list_value(self.control.text())

    def text_of(self, raw: Any) -> str:
        return value_text.list_text(raw)


class RewardsField(ListField):
    """A list of reward functions; an entry may have arguments in brackets, with commas between them."""

    def value(self) -> Any:
        return split_names(self.control.text())

    def text_of(self, raw: Any) -> str:
        return ", ".join(map(str, raw)) if isinstance(raw, list) else str(raw or "")


class NumbersField(LineField):
    """A list of numbers, separated by commas."""

    wide = True

    def line(self) -> QLineEdit:
        line = NumberEdit(parent=self)
        line.setPlaceholderText("1 for each")
        return line

    def value(self) -> Any:
        return value_text.numbers_value(self.control.text())

    def text_of(self, raw: Any) -> str:
        return value_text.numbers_text(raw)


_SUGGESTIONS = {"system_prompt": first_choices.SYSTEM_PROMPT}
"""Setting → a text that is offered while the field is empty."""


class MenuField(Field):
    """A choice from a combo box; each item's sentence is its tool tip."""

    control: ComboBox

    def build(self) -> QWidget:
        self.control = ComboBox(self)
        for choice in self._entries():
            if not choice.is_written:
                self._add(choice)
        self.control.activated.connect(self.emit_edited)  # not currentIndexChanged: `activated` is the user's alone
        return self.control

    def _add(self, choice: Choice) -> None:
        self.control.addItem(choice.label, choice.value)
        self.control.setItemData(self.control.count() - 1, choice.sentence, Qt.ItemDataRole.ToolTipRole)

    def _entries(self) -> list[Choice]:
        """The choices, and before them an entry for the default where there is one. Both have its value, so picking either stays as it
        is picked, and a file that names the value shows the first."""
        choices, label = list(self.setting.choices), self.setting.default_entry
        if not label:
            return choices
        default = next(choice for choice in choices if choice.value == self.setting.default)
        return [Choice(default.value, f"{label} ({default.label})", default.sentence), *choices]

    def value(self) -> Any:
        return self.control.currentData()

    def set_control_value(self, raw: Any) -> None:
        for choice in self._entries():
            if choice.is_written and choice.value == raw and self.control.findData(raw) < 0:
                self._add(choice)
        self.control.choose(str(raw))


class ExplainedMenuField(MenuField):
    """A combo box with its help beside it, for a choice that decides which other settings apply."""

    wide = True

    def build(self) -> QWidget:
        row, help = QWidget(self), PlainLabel(self.setting.help, wordWrap=True)
        help.setProperty("role", "muted")
        across = QHBoxLayout(row)
        across.setContentsMargins(0, 0, 0, 0)
        across.setSpacing(2 * theme.SPACE)
        across.addWidget(super().build(), 1, Qt.AlignmentFlag.AlignTop)
        across.addWidget(help, 3)
        return row


class SwitchField(Field):
    """A bool as a switch; text such as “yes” from a file counts as on."""

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
    """Text of several lines, with a suggestion for some settings.

    Attributes:
        suggestion – a link that fills in the suggested text; hidden unless there is one and the field is empty.
    """

    control: ProseEdit
    wide = True
    lines = 4

    def build(self) -> QWidget:
        self._is_setting_text = False
        self.control = ProseEdit(self.lines, self)
        self.control.setUndoRedoEnabled(False)  # undo is the form's
        self.control.edited.connect(self._emit_typed)
        self.suggestion = LinkButton("Use the suggested text")
        self.suggestion.setAccessibleName(f"Use the suggested text for {self.setting.label}")
        self.suggestion.clicked.connect(self._take_suggestion)
        self.control.textChanged.connect(self._offer_suggestion)
        holder = QWidget(self)
        column = QVBoxLayout(holder)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(self.control)
        column.addWidget(self.suggestion, 0, Qt.AlignmentFlag.AlignLeft)
        self._offer_suggestion()  # only now that it has a parent: before, it would be shown as a window for a moment
        return holder

    def tab_stops(self) -> list[QWidget]:
        return [self.control, self.suggestion]

    def _offer_suggestion(self) -> None:
        self.suggestion.setVisible(self.setting.key in _SUGGESTIONS and not self.control.toPlainText().strip())

    def _take_suggestion(self) -> None:
        self.set_control_value(_SUGGESTIONS[self.setting.key])
        self.emit_edited()
        self.control.setFocus()

    def value(self) -> Any:
        return self.control.toPlainText()

    def set_control_value(self, raw: Any) -> None:
        # QPlainTextEdit has no signal like QLineEdit's textEdited, for the user's changes alone.
        self._is_setting_text = True
        self.control.setPlainText(self.text_of(raw))
        self._is_setting_text = False

    def text_of(self, raw: Any) -> str:
        return str(raw or "")

    def _emit_typed(self) -> None:
        if not self._is_setting_text:
            self.emit_edited()


class MappingField(ProseField):
    """A mapping, one `key: value` per line."""

    lines = 2

    def value(self) -> Any:
        return value_text.mapping_value(self.control.toPlainText())

    def text_of(self, raw: Any) -> str:
        return value_text.mapping_text(raw)


class StagesField(ProseField):
    """Stages, one JSON object per line."""

    lines = 3

    def build(self) -> QWidget:
        holder = super().build()
        self.control.setPlaceholderText(
            'One stage a line, such as {"iters": 100, "max_completion_length": 256}\n'
            '{"iters": 300, "max_completion_length": 1024, "learning_rate": 5e-6}'
        )
        return holder

    def value(self) -> Any:
        return value_text.stages_value(self.control.toPlainText())

    def text_of(self, raw: Any) -> str:
        return value_text.stages_text(raw)


_KINDS: dict[str, type[Field]] = {
    "int": NumberField,
    "float": NumberField,
    "bool": SwitchField,
    "text": TextField,
    "prose": ProseField,
    "choice": MenuField,
    "file": PathField,
    "hosts": PathField,
    "model": PathField,
    "adapter": AdapterField,
    "dataset": PathField,
    "list": ListField,
    "numbers": NumbersField,
    "rewards": RewardsField,
    "mapping": MappingField,
    "stages": StagesField,
}


def make_field(setting: Setting, parent: QWidget | None = None) -> Field:
    """The field for a setting's kind. Pass the final parent: a widget that is reparented is polished again."""
    if setting.section == "algorithm" and setting.kind == "choice":
        return ExplainedMenuField(setting, parent)
    return _KINDS[setting.kind](setting, parent)
