"""Combo boxes of what a dataset has: a column for each part of a problem, a split for each use, a configuration.

Their value is the setting's raw value. A name that the dataset does not have stays selected until the user changes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QWidget

from app.widgets.basic.controls import ComboBox
from app.widgets.form.field import Field

NONE = "None"


class NameMenuField(Field):
    """A setting whose choices are names in the dataset; `offer` replaces them when the dataset changes."""

    control: ComboBox

    def build(self) -> QWidget:
        self.control = ComboBox()
        self.control.setMinimumContentsLength(3)  # four of them fit side by side in a small window
        self.hint.hide()  # beside names to choose from it would be cut off, and says nothing more
        self.control.activated.connect(self.emit_edited)
        return self.control

    def value(self) -> Any:
        return self.control.currentData()

    def set_control_value(self, raw: Any) -> None:
        index = self.control.findData(raw)
        if index < 0:  # the dataset has no such name: `mark` colours the field, and a sentence below the menus says it
            self.control.addItem(str(raw) if raw else NONE, raw)
            index = self.control.count() - 1
        self.control.setCurrentIndex(index)

    def offer(self, names: Sequence[str], default: str | None, tips: Mapping[str, str] | None = None) -> None:
        """Offer these names, with tool tips by name; the current value stays selected.

        `default` labels the setting's default value where that is not a name itself; None leaves it out.
        """
        current, default_value = self.value(), self.setting.default
        items = [] if default is None or default_value in names else [(default, default_value)]
        items += [(name, name) for name in names]
        # Rebuilt only when different: clearing closes the list if it is open.
        if items != [(self.control.itemText(i), self.control.itemData(i)) for i in range(self.control.count())]:
            self.control.clear()
            for text, value in items:
                self.control.addItem(text, value)
        for i, (_, value) in enumerate(items):
            self.control.setItemData(i, (tips or {}).get(value, ""), Qt.ItemDataRole.ToolTipRole)
        self.set_control_value(default_value if current is None else current)

    def mark(self, wrong: bool) -> None:
        """Colour the field as wrong or right; the sentence is shown in full width below the fields."""
        if bool(self.control.property("problem")) != wrong:
            self._mark(wrong)


class ColumnField(NameMenuField):
    """The column that holds the prompt, the answer, …; all but the prompt are optional."""

    def offer_columns(self, columns: Sequence[Mapping[str, str]]) -> None:
        """Offer the dataset's columns: name, kind and example of each."""
        tips = {column["name"]: f"{column['kind']}: {column['example']}" for column in columns}
        names = [column["name"] for column in columns]
        self.offer(names, None if self.setting.key == "prompt_feature" else NONE, tips)


class SplitField(NameMenuField):
    """The split that is used for training, validation or test."""

    def offer_splits(self, names: Sequence[str], form: str, used: Mapping[str, Any] | None, raw: Any) -> None:
        """Offer the dataset's splits.

        `form` is file, folder or hub; `used` describes the split that was read for this use, None if there is none;
        `raw` is the setting's value. The default value is labelled with the split that it was resolved to.
        """
        source = used["source"] if used else ""
        name = source.rpartition(", ")[2] if form == "hub" else PurePath(source).stem
        if raw != self.setting.default:
            label = "Default"
        elif form == "file" and source:
            label = "Whole file"
        else:
            label = name or ("Held out of train" if used else NONE)
        self.offer([split for split in names if split != name or raw == split], label)
        self.control.setEnabled(form != "file")
