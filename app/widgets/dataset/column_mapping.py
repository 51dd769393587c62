"""Which split and which column is used for what: menus of what there is, what is wrong with the choice, and an offer where
the columns can be recognised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QGridLayout, QHBoxLayout, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.labels_and_buttons import button, label
from app.widgets.dataset.dataset_fields import ColumnField, NameMenuField, SplitField
from backend.spec.config import SETTINGS
from backend.spec.faults import Fault

SPLIT_KEYS = ("train_split", "valid_split", "test_split")
COLUMNS = 4
"""Menus in a row."""


class ColumnMapping(QFrame):
    """Splits over columns, four and four.

    Signals: edited(key, raw value) – a person chose; accepted – the columns are to be taken as offered.
    """

    edited = Signal(str, object)
    accepted = Signal()

    def __init__(self, uses: Mapping[str, str], parent: QWidget | None = None) -> None:
        """`uses` are the settings of columns and what each column is for."""
        super().__init__(parent)
        self.setProperty("role", "card")
        self._uses = uses
        self.config = NameMenuField(SETTINGS["dataset_config"])
        self.splits = {key: SplitField(SETTINGS[key]) for key in SPLIT_KEYS}
        self.columns = {key: ColumnField(SETTINGS[key]) for key in uses}
        self.fields: dict[str, NameMenuField] = {"dataset_config": self.config, **self.splits, **self.columns}
        self.problem = label(font=theme.caption_font(), role="problem", wrap=True, selectable=True)
        self.offer = QFrame()
        self.offer.setProperty("role", "banner")
        self.offered = label(wrap=True)
        self.use = button("Use them", self.accepted.emit, primary=True)
        for one in self.fields.values():
            one.edited.connect(self.edited)
        self._lay_out()

    def _lay_out(self) -> None:
        grid = QGridLayout()
        grid.setHorizontalSpacing(theme.SPACE)
        grid.setVerticalSpacing(theme.SPACE)
        for place, one in enumerate(self.fields.values()):
            grid.addWidget(one, place // COLUMNS, place % COLUMNS, Qt.AlignmentFlag.AlignTop)
            grid.setColumnStretch(place % COLUMNS, 1)
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
        column.addStretch(1)

    def tab_stops(self) -> list[QWidget]:
        """Where Tab halts in it."""
        return [*(stop for one in self.fields.values() for stop in one.tab_stops()), self.use]

    def show_values(self, values: Mapping[str, Any]) -> None:
        for key, one in self.fields.items():
            one.show_value(values[key])

    def offer_columns(self, columns: Sequence[Mapping[str, str]]) -> None:
        """The columns there are: name, kind and an example of each."""
        for one in self.columns.values():
            one.offer_columns(columns)
            one.control.setEnabled(bool(columns))

    def offer_splits(
        self,
        form: str,
        names: Sequence[str],
        configs: Sequence[str],
        found: Mapping[str, Any],
        values: Mapping[str, Any],
    ) -> None:
        """`form` is file, folder or hub, `names` the splits there are, `found` what was read for each use."""
        self.config.offer(configs, "Default" if form == "hub" else "None")
        self.config.setEnabled(form == "hub")
        for key, one in self.splits.items():
            one.offer_splits(names, form, found.get(key.removesuffix("_split")), values[key])

    def show_faults(self, faults: Sequence[Fault]) -> None:
        """Those of its menus, each after the name of its setting, in the card's full width."""
        told = [fault for fault in faults if fault.setting in self.fields]
        self.problem.setText("\n".join(f"{SETTINGS[fault.setting].label}: {fault.sentence}" for fault in told))
        self.problem.setVisible(bool(told))
        wrong = {fault.setting for fault in told}
        for key, one in self.fields.items():
            one.mark(key in wrong)

    def show_likely(self, likely: Mapping[str, str]) -> None:
        """Offer columns for settings whose own column does not exist."""
        named = [
            f"{name} {'looks ' * (not place)}like the {self._uses[key]}"
            for place, (key, name) in enumerate(likely.items())
        ]
        self.offered.setText(f"{', '.join(named)}.")
        self.offer.setVisible(bool(likely))
        self.use.setText("Use them" if len(likely) > 1 else "Use it")
