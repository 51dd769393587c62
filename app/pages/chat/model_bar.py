"""The head of the Chat page: which run at which checkpoint, or which model; load or unload it."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QToolButton, QWidget

from app import theme
from app.widgets.basic.controls import ComboBox
from app.widgets.basic.key_names import with_key_names
from app.widgets.basic.labels_and_buttons import button, label, plain_tip
from app.widgets.basic.layout import set_style_property

BROWSE = "browse"
"""The value of the entry that asks for a folder."""
Entry = tuple[str, str]
"""(label, value)."""


class ModelBar(QWidget):
    """Attributes:
        models, checkpoints – the menus.
        settings – the button that shows the sampling settings.

    Signals:
        model_chosen(str) – another entry was chosen by the user.
        checkpoint_chosen(str) – another checkpoint was.
        browse_requested – the user wants a folder that is not listed.
        load_requested, unload_requested, reset_requested – buttons.
        settings_toggled(bool) – show the sampling settings.
    """

    model_chosen = Signal(str)
    checkpoint_chosen = Signal(str)
    browse_requested = Signal()
    load_requested = Signal()
    unload_requested = Signal()
    reset_requested = Signal()
    settings_toggled = Signal(bool)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.models, self.checkpoints = ComboBox(), ComboBox()
        self.models.setAccessibleName("Run or model")
        self.models.setMinimumContentsLength(16)
        self.checkpoints.setAccessibleName("Checkpoint")
        self.checkpoints.setMinimumContentsLength(12)
        self.load = button("Load", self._request, primary=True)
        self.reset = button("New conversation", self.reset_requested.emit, tip="Ctrl+Alt+C")
        self.settings = QToolButton()
        self.settings.setText("Settings")
        self.settings.setCheckable(True)
        self.settings.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.settings.setToolTip("Temperature, seed, system message, …")
        self.settings.toggled.connect(self.settings_toggled)
        self.models.activated.connect(self._on_model)
        self.checkpoints.activated.connect(lambda _: self.checkpoint_chosen.emit(self.checkpoint))
        self._is_loaded = False
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(theme.SPACE)
        row.addWidget(label("Chat", theme.title_font()))
        row.addSpacing(2 * theme.SPACE)
        row.addWidget(self.models, 3)
        row.addWidget(self.checkpoints, 1)
        row.addWidget(self.load)
        row.addStretch(1)
        row.addWidget(self.reset)
        row.addWidget(self.settings)

    @property
    def checkpoint(self) -> str:
        """The key of the chosen checkpoint, "" where there is none to choose."""
        return self.checkpoints.currentData() or ""

    def show_models(self, runs: Sequence[Entry], models: Sequence[Entry], chosen: str) -> None:
        """List runs, then models, then the entry that asks for a folder; `chosen` is the value to select."""
        self.models.clear()
        for text, value in runs:
            self._add(text, value)
        if runs and models:
            self.models.insertSeparator(self.models.count())
        for text, value in models:
            self._add(text, value)
        if runs or models:
            self.models.insertSeparator(self.models.count())
        self.models.addItem("Another model…", BROWSE)
        self.models.setCurrentIndex(max(0, self.models.findData(chosen)) if chosen else 0)

    def _add(self, text: str, value: str) -> None:
        self.models.addItem(text, value)
        self.models.setItemData(self.models.count() - 1, plain_tip(str(value)), Qt.ItemDataRole.ToolTipRole)

    def show_checkpoints(self, entries: Sequence[Entry], chosen: str) -> None:
        """List a run's checkpoints; a model has none, and then the menu is hidden."""
        self.checkpoints.clear()
        for text, value in entries:
            self.checkpoints.addItem(text, value)
        self.checkpoints.setCurrentIndex(max(0, self.checkpoints.findData(chosen)))
        self.checkpoints.setVisible(bool(entries))

    def show_state(self, *, loaded: bool, can_load: bool, can_reset: bool) -> None:
        """`loaded`: the chosen model is the one that is loaded, and the button unloads it."""
        self._is_loaded = loaded
        self.load.setText("Unload" if loaded else "Load")
        set_style_property(self.load, "role", "" if loaded else "primary")
        self.load.setToolTip(with_key_names(f"{'Free its memory' if loaded else 'Load it into memory'} (Ctrl+Alt+L)"))
        self.load.setEnabled(loaded or can_load)
        self.reset.setEnabled(can_reset)

    def _request(self) -> None:
        (self.unload_requested if self._is_loaded else self.load_requested).emit()

    def _on_model(self, _index: int) -> None:
        value = self.models.currentData()
        self.browse_requested.emit() if value == BROWSE else self.model_chosen.emit(value)
