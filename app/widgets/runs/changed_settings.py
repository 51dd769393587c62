"""A small form of settings to change: searched, added one by one, each beside the value that it has now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.labels_and_buttons import label
from app.widgets.form.field import Field
from app.widgets.form.fields import make_field
from app.widgets.form.setting_search import SettingSearch
from backend.spec.config import SETTINGS, problems
from backend.spec.runs.run_comparison import value_text
from backend.spec.runs.run_record import as_number

FIXED = ("run_name",)
"""Settings that are not offered: the name has a field of its own."""


class ChangedSettings(QWidget):
    """Attributes:
        fields – key → the field of each setting added so far.

    Signals:
        changed – a setting was added, removed or edited.
    """

    changed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.fields: dict[str, Field] = {}
        self._rows: dict[str, QWidget] = {}
        self._now: Mapping[str, Any] = {}
        self.search = SettingSearch([about for key, about in SETTINGS.items() if key not in FIXED])
        self.search.setPlaceholderText("Change a setting…")
        self.search.chosen.connect(self.add)
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(theme.SPACE)
        self._column.addWidget(self.search)

    def set_now(self, now: Mapping[str, Any]) -> None:
        """The values before any change, by key; those that were added keep what was typed."""
        self._now = now
        for key, row in self._rows.items():
            self._caption(row).setText(_now_text(self.now(key)))
        self._check()

    def add(self, key: str) -> None:
        """Add a row for a setting, with its present value to edit, and put the focus into it."""
        if key not in self.fields:
            row = QWidget(self)
            field = make_field(SETTINGS[key], row)
            field.show_value(self.now(key))
            field.edited.connect(lambda *_: self._check())
            now = label(_now_text(self.now(key)), role="muted", wrap=True)
            now.setObjectName("now")
            drop = LinkButton("Remove")
            drop.setAccessibleName(f"Leave {SETTINGS[key].label} as it is")
            drop.clicked.connect(lambda: self.remove(key))
            across = QHBoxLayout(row)
            across.setContentsMargins(0, 0, 0, 0)
            across.setSpacing(12)
            across.addWidget(field, 1)
            across.addWidget(now, 1, Qt.AlignmentFlag.AlignVCenter)
            across.addWidget(drop, 0, Qt.AlignmentFlag.AlignVCenter)
            self._column.addWidget(row)
            self.fields[key], self._rows[key] = field, row
            self._check()
        self.search.clear()
        self.fields[key].control.setFocus()

    def remove(self, key: str) -> None:
        """Leave a setting as it is."""
        row = self._rows.pop(key)
        del self.fields[key]
        row.hide()
        row.deleteLater()
        self.search.setFocus()
        self._check()

    def now(self, key: str) -> Any:
        """A setting's value before any change."""
        return self._now.get(key, SETTINGS[key].default)

    def values(self) -> dict[str, Any]:
        """Key → new raw value, of the settings whose value is another than now."""
        new = {key: as_number(key, field.value()) for key, field in self.fields.items()}
        return {key: value for key, value in new.items() if value != self.now(key)}

    def faults(self) -> dict[str, str]:
        """Key → why the settings cannot be changed like this."""
        before = {fault.setting for fault in problems(self._now)}
        return {
            fault.setting: fault.sentence
            for fault in problems({**self._now, **self.values()})
            if fault.setting in self.fields or fault.setting not in before
        }

    def show_faults(self, faults: Mapping[str, str]) -> None:
        """Sentences below the fields; "" where there is none."""
        for key, field in self.fields.items():
            field.show_problem(faults.get(key, ""))

    def _check(self) -> None:
        self.show_faults(self.faults())
        self.changed.emit()

    @staticmethod
    def _caption(row: QWidget) -> Any:
        return row.findChild(QWidget, "now")


def _now_text(value: Any) -> str:
    return f"now {value_text(value)}"
