"""Chips under the essentials: every other setting that differs from its default."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QApplication, QFrame, QWidget

from app import theme
from app.widgets.basic.controls import LinkButton
from app.widgets.basic.icons import IconButton
from app.widgets.basic.labels import label, plain_tip
from app.widgets.basic.layout import FlowLayout, column, row, set_tab_order
from app.widgets.form.value_text import value_label
from backend.config.config import SETTINGS
from backend.config.setting import Setting

MAX_CHARS = 28
"""Of a value on a chip."""


class ChangedChips(QWidget):
    pressed = Signal(str)  # key
    reset = Signal(str)  # key

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.count = label(role="muted", minimumHeight=theme.scaled(24))
        self.chips: dict[str, Chip] = {}
        self.after: QWidget = self
        """The widget before the chips in the order of Tab."""
        line = QWidget(self)
        self._flow = FlowLayout(line, theme.SPACE, 6)
        self._flow.addWidget(self.count)
        column(line, into=self, margins=(theme.SPACE, 0, theme.SPACE, 0))

    def show_changes(self, values: Mapping[str, Any]) -> None:
        keys = list(self.chips)
        here = QApplication.focusWidget()
        focused = next((i for i, chip in enumerate(self.chips.values()) if here and chip.isAncestorOf(here)), -1)
        gone = [self.chips.pop(key) for key in keys if key not in values]
        self.count.setText(f"{len(values)} changed" if values else "Everything else is at its default.")
        self.chips = {key: self.chips.get(key) or self._make(SETTINGS[key]) for key in values}
        for key, chip in self.chips.items():
            chip.show_value(values[key])
        if gone and focused >= 0 and self.chips:  # Qt would move the focus to the next widget in line
            list(self.chips.values())[min(focused, len(self.chips) - 1)].text.setFocus()
        set_tab_order(self.after, *self.tab_stops)
        for chip in gone:
            self._flow.removeWidget(chip)
            chip.hide()
            chip.deleteLater()
        if keys != list(self.chips):
            self._flow.put_in_order([self.count, *self.chips.values()])

    def _make(self, setting: Setting) -> Chip:
        chip = Chip(setting, self)
        chip.text.clicked.connect(partial(self.pressed.emit, setting.key))
        chip.remove.clicked.connect(partial(self.reset.emit, setting.key))
        self._flow.addWidget(chip)
        return chip

    @property
    def tab_stops(self) -> list[QWidget]:
        return [stop for chip in self.chips.values() for stop in (chip.text, chip.remove)]


class Chip(QFrame):
    """A setting's label and value, and a button that sets it back. Delete does that too."""

    def __init__(self, setting: Setting, parent: QWidget) -> None:
        super().__init__(parent)
        self.setProperty("role", "chip")
        self._setting = setting
        self.text = LinkButton("", role="chip")
        self.remove = IconButton("close", name=f"Reset {setting.label}", role="chip")
        default = value_label(setting, setting.default)
        self.remove.setToolTip(plain_tip(f"Reset to the default: {default}"))
        self.remove.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        row(self.text, self.remove, into=self, spacing=0, margins=(theme.SPACE, 0, 2, 0))

    def show_value(self, value: Any) -> None:
        shown = value_label(self._setting, value)
        text = shown if len(shown) <= MAX_CHARS else f"{shown[: MAX_CHARS - 1]}…"
        self.text.setText(f"{self._setting.label}  {text}".replace("&", "&&"))
        self.text.setAccessibleName(f"{self._setting.label}: {shown}")
        self.text.setToolTip(plain_tip(f"{self._setting.label}: {shown}"))

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Delete, Qt.Key.Key_Backspace):
            self.remove.click()
        else:
            super().keyPressEvent(event)
