"""The use of splits and columns: a combo box for each, the problems of the choice, and a suggestion where columns can be
recognised by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QGridLayout, QHBoxLayout, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.labels_and_buttons import button, label
from app.widgets.basic.layout import set_style_property
from app.widgets.dataset.dataset_fields import ColumnField, NameMenuField, SplitField
from backend.spec.config import SETTINGS
from backend.spec.faults import Fault

SPLIT_KEYS = ("train_split", "valid_split", "test_split")
COLUMNS = 4
"""Fields in a row."""


class ColumnMapping(QFrame):
    """A card of combo boxes: configuration and splits in the first row, columns in the second.

    Attributes:
        fields – setting → field; `config`, `splits` and `columns` are parts of it.
        verdict – a sentence on the prompts in the column chosen.

    Signals:
        edited(key, raw value) – the user chose another name.
        accepted – the user took the suggested columns.
    """

    edited = Signal(str, object)
    accepted = Signal()

    def __init__(self, uses: Mapping[str, str], parent: QWidget | None = None) -> None:
        """`uses` maps each setting that names a column to what the column is for."""
        super().__init__(parent)
        self.setProperty("role", "card")
        self._uses = uses
        self.config = NameMenuField(SETTINGS["dataset_config"])
        self.splits = {key: SplitField(SETTINGS[key]) for key in SPLIT_KEYS}
        self.columns = {key: ColumnField(SETTINGS[key]) for key in uses}
        self.fields: dict[str, NameMenuField] = {"dataset_config": self.config, **self.splits, **self.columns}
        self.problem = label(font=theme.caption_font(), role="problem", wrap=True, selectable=True)
        self.verdict = label(font=theme.caption_font(), wrap=True, selectable=True)
        self.offer = QFrame()
        self.offer.setProperty("role", "banner")
        self.offered = label(wrap=True)
        self.use = button("Use them", self.accepted.emit, primary=True)
        for field in self.fields.values():
            field.edited.connect(self.edited)
        self._lay_out()

    def _lay_out(self) -> None:
        grid = QGridLayout()
        grid.setHorizontalSpacing(theme.SPACE)
        grid.setVerticalSpacing(theme.SPACE)
        for i, field in enumerate(self.fields.values()):
            grid.addWidget(field, i // COLUMNS, i % COLUMNS, Qt.AlignmentFlag.AlignTop)
            grid.setColumnStretch(i % COLUMNS, 1)
        across = QHBoxLayout(self.offer)
        across.setContentsMargins(12, 6, 6, 6)
        across.addWidget(self.offered, 1)
        across.addWidget(self.use)
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 8, 12, 12)
        column.setSpacing(theme.SPACE)
        column.addLayout(grid)
        column.addWidget(self.problem)
        column.addWidget(self.offer)
        column.addWidget(self.verdict)
        column.addStretch(1)

    def tab_stops(self) -> list[QWidget]:
        """The widgets that Tab visits, in order."""
        return [*(stop for field in self.fields.values() for stop in field.tab_stops()), self.use]

    def show_values(self, values: Mapping[str, Any]) -> None:
        """Show the raw values of the settings."""
        for key, field in self.fields.items():
            field.show_value(values[key])

    def offer_columns(self, columns: Sequence[Mapping[str, str]]) -> None:
        """Offer the dataset's columns: name, kind and example of each."""
        for field in self.columns.values():
            field.offer_columns(columns)
            field.control.setEnabled(bool(columns))

    def offer_splits(
        self,
        form: str,
        names: Sequence[str],
        configs: Sequence[str],
        used: Mapping[str, Any],
        values: Mapping[str, Any],
    ) -> None:
        """Offer the dataset's splits and configurations.

        `form` is file, folder or hub; `names` are the splits, `used` describes the one read for each use.
        """
        self.config.offer(configs, "Default" if form == "hub" else "None")
        self.config.setEnabled(form == "hub")
        for key, field in self.splits.items():
            field.offer_splits(names, form, used.get(key.removesuffix("_split")), values[key])

    def show_faults(self, faults: Sequence[Fault]) -> None:
        """Show the faults of its fields below them, in full width, each after its setting's label."""
        own = [fault for fault in faults if fault.setting in self.fields]
        self.problem.setText("\n".join(f"{SETTINGS[fault.setting].label}: {fault.sentence}" for fault in own))
        self.problem.setVisible(bool(own))
        wrong = {fault.setting for fault in own}
        for key, field in self.fields.items():
            field.mark(key in wrong)

    def show_likely(self, likely: Mapping[str, str]) -> None:
        """Suggest columns (setting → name) for settings whose own column does not exist."""
        clauses = [
            f"{name} {'looks ' * (not i)}like the {self._uses[key]}" for i, (key, name) in enumerate(likely.items())
        ]
        self.offered.setText(f"{', '.join(clauses)}.")
        self.offer.setVisible(bool(likely))
        self.use.setText("Use them" if len(likely) > 1 else "Use it")

    def show_verdict(self, sentence: str, *, is_poor: bool) -> None:
        """Say how varied the prompts are; "" says nothing."""
        self.verdict.setText(sentence)
        self.verdict.setVisible(bool(sentence))
        set_style_property(self.verdict, "role", "problem" if is_poor else "muted")
