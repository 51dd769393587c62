"""The use of splits and columns: a combo box for each, the problems of the choice, and a suggestion by column names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QGridLayout, QWidget

from app import theme
from app.widgets.basic.controls import ComboBox
from app.widgets.basic.labels import button, label, show_text
from app.widgets.basic.layout import card, column, row, set_style_property
from app.widgets.form.field import Field
from backend.config.config import SETTINGS
from backend.utils.errors import ConfigProblem

NONE = "None"
SPLIT_KEYS = ("train_split", "valid_split", "test_split")
COLUMNS = 4


class NameMenuField(Field):
    """A setting whose choices are names in the dataset; `offer` replaces them when the dataset changes."""

    control: ComboBox

    def build(self) -> QWidget:
        self.control = ComboBox(length=3)  # four of them fit side by side in a small window
        self.hint.hide()
        self.control.activated.connect(self.emit_edited)
        return self.control

    def value(self) -> Any:
        return self.control.currentData()

    def set_control_value(self, raw: Any) -> None:
        index = self.control.findData(raw)
        if index < 0:  # the dataset has no such name: the field is coloured, and a sentence below the menus says it
            self.control.addItem(str(raw) if raw else NONE, raw)
            index = self.control.count() - 1
        self.control.setCurrentIndex(index)

    def offer(self, names: Sequence[str], default: str | None, tips: Mapping[str, str] | None = None) -> None:
        """Offer these names, with tool tips by name.

        `default` labels the setting's default value where that is not a name itself; None leaves it out.
        """
        current, default_value = self.value(), self.setting.default
        items = {} if default is None or default_value in names else {default_value: default}
        items |= {name: name for name in names}
        self.control.fill(items)
        for i, value in enumerate(items):
            self.control.setItemData(i, (tips or {}).get(value, ""), Qt.ItemDataRole.ToolTipRole)
        self.set_control_value(default_value if current is None else current)

    def offer_splits(self, names: Sequence[str], form: str, used: Mapping[str, Any] | None) -> None:
        """Offer the dataset's splits.

        `form` is file, folder or hub; `used` describes the split that was read for this use, None if there is none.
        """
        raw, source = self.value(), used["source"] if used else ""
        name = source.rpartition(", ")[2] if form == "hub" else PurePath(source).stem
        if raw not in (None, self.setting.default):
            default = "Default"
        elif form == "file" and source:
            default = "Whole file"
        else:
            default = name or ("Held out of train" if used else NONE)
        self.offer([split for split in names if split != name or raw == split], default)
        self.control.setEnabled(form != "file")


class ColumnMapping(QFrame):
    edited = Signal(str, object)  # key, raw value

    def __init__(self, uses: Mapping[str, str], parent: QWidget | None = None) -> None:
        """`uses` maps each setting that names a column to the use of that column."""
        super().__init__(parent)
        self.setProperty("role", "card")
        self._uses = uses
        self.config = NameMenuField(SETTINGS["dataset_config"])
        self.splits = {key: NameMenuField(SETTINGS[key]) for key in SPLIT_KEYS}
        self.columns = {key: NameMenuField(SETTINGS[key]) for key in uses}
        self.fields: dict[str, NameMenuField] = {"dataset_config": self.config, **self.splits, **self.columns}
        caption = theme.caption_font()
        self.problem = label(font=caption, role="problem", wrap=True, selectable=True)
        self.verdict = label(font=caption, wrap=True, selectable=True)
        self.offered = label(wrap=True)
        self.use = button("Use them", primary=True)
        self.offer = card(row((self.offered, 1), self.use, margins=(12, 6, 6, 6)), "banner")
        grid = QGridLayout()
        grid.setHorizontalSpacing(theme.SPACE)
        grid.setVerticalSpacing(theme.SPACE)
        for i, field in enumerate(self.fields.values()):
            field.edited.connect(self.edited)
            grid.addWidget(field, i // COLUMNS, i % COLUMNS, Qt.AlignmentFlag.AlignTop)
            grid.setColumnStretch(i % COLUMNS, 1)
        column(grid, self.problem, self.offer, self.verdict, None, into=self, margins=(12, 8, 12, 12))
        self.tab_stops = [*(stop for field in self.fields.values() for stop in field.tab_stops), self.use]

    def show_values(self, values: Mapping[str, Any]) -> None:
        for key, field in self.fields.items():
            field.show_value(values[key])

    def offer_columns(self, columns: Sequence[Mapping[str, str]]) -> None:
        names = [each["name"] for each in columns]
        tips = {each["name"]: f"{each['kind']}: {each['example']}" for each in columns}
        for key, field in self.columns.items():
            field.offer(names, None if key == "prompt_feature" else NONE, tips)
            field.control.setEnabled(bool(columns))

    def offer_splits(self, form: str, names: Sequence[str], configs: Sequence[str], used: Mapping[str, Any]) -> None:
        """Offer the dataset's splits and configurations; the arguments are those of the field's `offer_splits`."""
        self.config.offer(configs, "Default" if form == "hub" else NONE)
        self.config.setEnabled(form == "hub")
        for key, field in self.splits.items():
            field.offer_splits(names, form, used.get(key.removesuffix("_split")))

    def show_problems(self, problems: Sequence[ConfigProblem]) -> None:
        own = [problem for problem in problems if problem.setting in self.fields]
        show_text(self.problem, "\n".join(f"{SETTINGS[each.setting].label}: {each.sentence}" for each in own))
        wrong = {problem.setting for problem in own}
        for key, field in self.fields.items():
            set_style_property(field.control, "problem", key in wrong)

    def show_likely(self, likely: Mapping[str, str]) -> None:
        """Suggest columns (setting → name) for settings whose own column does not exist."""
        clauses = [
            f"{name} {'' if i else 'looks '}like the {self._uses[key]}" for i, (key, name) in enumerate(likely.items())
        ]
        self.offered.setText(f"{', '.join(clauses)}.")
        self.offer.setVisible(bool(likely))
        self.use.setText("Use them" if len(likely) > 1 else "Use it")
