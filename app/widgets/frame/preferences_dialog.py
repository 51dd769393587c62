"""The preferences: what the desktop is told, and what becomes of a training when the window is closed."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QFormLayout, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import CheckBox, ComboBox
from app.widgets.basic.labels_and_buttons import label

CLOSING = {"ask": "Ask", "keep": "Keep training", "stop": "Stop and save"}
"""What becomes of a training when the window is closed → its words."""


class PreferencesDialog(QDialog):
    """Every choice takes effect at once.

    Attributes:
        notifies, shows_progress – check boxes.
        closing – the choice among CLOSING.

    Signals:
        notifies_changed(bool), shows_progress_changed(bool), closing_changed(str) – the user has chosen.
    """

    notifies_changed = Signal(bool)
    shows_progress_changed = Signal(bool)
    closing_changed = Signal(str)

    def __init__(self, *, notifies: bool, shows_progress: bool, closing: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle("Preferences")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.notifies = CheckBox("Notify me when a run ends or is in trouble")
        self.notifies.setToolTip("Only while the window is not in front")
        self.notifies.setChecked(notifies)
        self.notifies.clicked.connect(self.notifies_changed)
        self.shows_progress = CheckBox("Show the percent of the run on the app's icon")
        self.shows_progress.setChecked(shows_progress)
        self.shows_progress.clicked.connect(self.shows_progress_changed)
        self.closing = ComboBox()
        for value, text in CLOSING.items():
            self.closing.addItem(text, value)
        self.closing.choose(closing)
        self.closing.setAccessibleName("When the window is closed while a run trains")
        self.closing.activated.connect(lambda _: self.closing_changed.emit(self.closing.currentData()))
        self._lay_out()

    def _lay_out(self) -> None:
        choices = QFormLayout()
        choices.setHorizontalSpacing(2 * theme.SPACE)
        choices.addRow(label("Closed while a run trains"), self.closing)
        done = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        done.rejected.connect(self.reject)
        column = QVBoxLayout(self)
        column.setContentsMargins(*(3 * theme.SPACE,) * 4)
        column.setSpacing(2 * theme.SPACE)
        for part in (self.notifies, self.shows_progress):
            column.addWidget(part)
        column.addLayout(choices)
        column.addStretch(1)
        column.addWidget(done)
