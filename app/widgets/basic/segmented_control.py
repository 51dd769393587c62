"""A segmented control: a few exclusive buttons in a row, one of them checked."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QButtonGroup, QHBoxLayout, QToolButton, QWidget


class Segments(QWidget):
    """Segmented control over `labels` (key → text); the first one is checked at the start.

    Attributes:
        buttons – key → button.

    Signals:
        chosen(key) – a segment was clicked, or `choose` was called.
    """

    chosen = Signal(str)

    def __init__(self, labels: Mapping[str, str], name: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.buttons: dict[str, QToolButton] = {}
        self._group = QButtonGroup(self)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(2)
        self.setAccessibleName(name)
        for key, text in labels.items():
            button = QToolButton()
            button.setText(text)
            button.setCheckable(True)
            button.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
            button.setAccessibleName(f"{name}: {text}")
            button.clicked.connect(lambda _checked=False, key=key: self.choose(key))
            self._group.addButton(button)
            self.buttons[key] = button
            row.addWidget(button)
        next(iter(self.buttons.values())).setChecked(True)

    @property
    def key(self) -> str:
        """The key of the checked segment."""
        return next(key for key, button in self.buttons.items() if button.isChecked())

    def choose(self, key: str) -> None:
        """Check a segment and emit `chosen`."""
        self.buttons[key].setChecked(True)
        self.chosen.emit(key)

    def show_word(self, key: str, word: str) -> None:
        self.buttons[key].setText(word)
        self.buttons[key].setAccessibleName(f"{self.accessibleName()}: {word}")

    def set_shown(self, key: str, shown: bool) -> None:
        self.buttons[key].setVisible(shown)
