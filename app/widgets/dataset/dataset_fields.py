"""Menus of what a dataset really has: the column for each part of a problem, the split for each use, the configuration.

They hold the setting's raw value; a name that the dataset does not have stays until another is chosen.
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
    """A setting that is chosen from names, which are offered anew whenever the dataset is another one."""

    control: ComboBox

    def build(self) -> QWidget:
        self.control = ComboBox()
        self.control.setMinimumContentsLength(3)  # four of them stand side by side in a small window
        self.control.activated.connect(self.emit_edited)
        return self.control

    def value(self) -> Any:
        return self.control.currentData()

    def set_control_value(self, raw: Any) -> None:
        place = self.control.findData(raw)
        if place < 0:  # the dataset has no such name: `mark` shows it, and the sentence says it
            self.control.addItem(str(raw) if raw else NONE, raw)
            place = self.control.count() - 1
        self.control.setCurrentIndex(place)

    def offer(self, names: Sequence[str], default: str | None, tips: Mapping[str, str] | None = None) -> None:
        """Offer these names. `default` is the word for the setting's default value where that is no name itself, and
        None where it is not to be offered."""
        kept, standing = self.value(), self.setting.default
        entries = [] if default is None or standing in names else [(default, standing)]
        entries += [(name, name) for name in names]
        if entries != [
            (self.control.itemText(place), self.control.itemData(place)) for place in range(self.control.count())
        ]:
            self.control.clear()
            for word, value in entries:
                self.control.addItem(word, value)
        for place, (_, value) in enumerate(entries):
            self.control.setItemData(place, (tips or {}).get(value, ""), Qt.ItemDataRole.ToolTipRole)
        self.set_control_value(standing if kept is None else kept)

    def mark(self, wrong: bool) -> None:
        """Show that something is wrong with the choice; what, stands in full width below the menus."""
        if bool(self.control.property("problem")) != wrong:
            self._mark(wrong)


class ColumnField(NameMenuField):
    """Which column holds the prompt, the answer, …; all but the prompt may be absent."""

    def offer_columns(self, columns: Sequence[Mapping[str, str]]) -> None:
        tips = {column["name"]: f"{column['kind']}: {column['example']}" for column in columns}
        names = [column["name"] for column in columns]
        self.offer(names, None if self.setting.key == "prompt_feature" else NONE, tips)


class SplitField(NameMenuField):
    """Which split is trained on, and which are held back."""

    def offer_splits(self, names: Sequence[str], form: str, found: Mapping[str, Any] | None, raw: Any) -> None:
        """`found` is what was read for this use, or None; `raw` the setting, whose default may go by another name."""
        source = found["source"] if found else ""
        name = source.rpartition(", ")[2] if form == "hub" else PurePath(source).stem
        if raw != self.setting.default:
            word = "Default"
        elif form == "file" and source:
            word = "Whole file"
        else:
            word = name or ("Held out of train" if found else NONE)
        self.offer([one for one in names if one != name or raw == name], word)
        self.control.setEnabled(form != "file")
