"""Two or three words of which one is chosen: what a place shows now."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QButtonGroup, QHBoxLayout, QToolButton, QWidget


class Segments(QWidget):
    """Signals: chosen(key) – by a person or by `choose`."""

    chosen = Signal(str)

    def __init__(self, words: Mapping[str, str], name: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.buttons: dict[str, QToolButton] = {}
        self._group = QButtonGroup(self)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(2)
        self.setAccessibleName(name)
        for key, word in words.items():
            made = QToolButton()
            made.setText(word)
            made.setCheckable(True)
            made.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
            made.setAccessibleName(f"{name}: {word}")
            made.clicked.connect(lambda _checked=False, key=key: self.choose(key))
            self._group.addButton(made)
            self.buttons[key] = made
            row.addWidget(made)
        next(iter(self.buttons.values())).setChecked(True)

    @property
    def key(self) -> str:
        return next(key for key, one in self.buttons.items() if one.isChecked())

    def choose(self, key: str) -> None:
        self.buttons[key].setChecked(True)
        self.chosen.emit(key)

    def show_word(self, key: str, word: str) -> None:
        self.buttons[key].setText(word)
        self.buttons[key].setAccessibleName(f"{self.accessibleName()}: {word}")

    def set_shown(self, key: str, shown: bool) -> None:
        self.buttons[key].setVisible(shown)
