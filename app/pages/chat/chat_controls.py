"""The head of the Chat page: which run at which checkpoint, or which model; load or unload it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QCheckBox, QFrame, QGridLayout, QHBoxLayout, QToolButton, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import ComboBox, LinkButton, NumberEdit, ProseEdit
from app.widgets.basic.labels import button, label, plain_tip, with_key_names
from app.widgets.basic.layout import set_shown, set_style_property

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


WIDTH = 200


@dataclass(frozen=True, slots=True)
class SamplingField:
    """A number: its key, label, whether it is whole, its range, and a sentence for its tip."""

    key: str
    title: str
    whole: bool
    low: float
    high: float
    tip: str


FIELDS = (
    SamplingField("temperature", "Temperature", False, 0, 100, "0 always takes the likeliest token."),
    SamplingField("top_p", "Top-p", False, 0, 1, "Keeps the likeliest tokens that make up this share; 1 keeps all."),
    SamplingField("top_k", "Top-k", True, 0, 1e6, "Keeps that many of the likeliest tokens; 0 keeps all."),
    SamplingField(
        "min_p", "Min-p", False, 0, 1, "Drops tokens less likely than this share of the likeliest; 0 keeps all."
    ),
    SamplingField("max_tokens", "Max tokens", True, 1, 1e6, "An answer that is not done by then is cut off."),
    SamplingField(
        "seed",
        "Seed",
        True,
        0,
        2**63 - 1,
        "Both sides get the same random numbers; the same seed gives the same answers.",
    ),
)


class SamplingPanel(QFrame):
    """Attributes:
    fields – key → its line.
    free_output – whether what the run held its output to is left out; hidden where it held nothing.
    system – the system message.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "card")
        self.setFixedWidth(theme.scaled(WIDTH))
        self.fields: dict[str, NumberEdit] = {}
        self._defaults: dict[str, Any] = {}
        self._system_default = ""
        self.system = ProseEdit(6)
        self.system.setAccessibleName("System message")
        self.system.setPlaceholderText("None")
        self.free_output = QCheckBox("Free output")
        self.free_output.setToolTip("Does not hold answers to the regular expression or JSON schema of the run.")
        self.free_output.toggled.connect(lambda _: self._check())
        self.restore = LinkButton("Back to the run's")
        self.restore.clicked.connect(lambda _checked=False: self.show_defaults(self._defaults, self._system_default))
        self.problem = label(role="problem", wrap=True)
        self._lay_out()
        self.system.edited.connect(self._check)
        self._check()

    def _lay_out(self) -> None:
        grid = QGridLayout()
        grid.setHorizontalSpacing(theme.SPACE)
        grid.setVerticalSpacing(6)
        grid.setColumnStretch(0, 1)
        for row, entry in enumerate(FIELDS):
            line = self.fields[entry.key] = NumberEdit()
            line.setAccessibleName(entry.title)
            line.setToolTip(entry.tip)
            line.setMinimumWidth(0)
            line.setFixedWidth(theme.scaled(76))
            line.setAlignment(Qt.AlignmentFlag.AlignRight)
            line.textChanged.connect(lambda _: self._check())
            caption = label(entry.title, role="muted")
            caption.setBuddy(line)
            caption.setToolTip(entry.tip)
            grid.addWidget(caption, row, 0)
            grid.addWidget(line, row, 1)
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 10, 12, 12)
        column.setSpacing(theme.SPACE)
        column.addWidget(label("Sampling", theme.heading_font()))
        column.addLayout(grid)
        column.addWidget(self.free_output)
        column.addWidget(self.problem)
        column.addSpacing(theme.SPACE)
        column.addWidget(label("System message", theme.heading_font()))
        column.addWidget(self.system)
        column.addWidget(self.restore)
        column.addStretch(1)

    def show_defaults(self, values: Mapping[str, Any], system: str) -> None:
        """Fill in these values; “Back to the run's” returns to them."""
        self._defaults, self._system_default = dict(values), system
        for key, line in self.fields.items():
            line.setText(_text(values.get(key)))
        self.free_output.setChecked(bool(values.get("free_output")))
        set_shown(self.free_output, values.get("free_output") is not None)
        self.system.setPlainText(system)

    @property
    def is_valid(self) -> bool:
        return not self.problem.text()

    def values(self) -> dict[str, Any]:
        """Key → number, and whether output is free. Call it only while `is_valid`."""
        numbers = {entry.key: _number(entry, self.fields[entry.key].text()) for entry in FIELDS}
        return {**numbers, "free_output": self.free_output.isChecked()}

    def system_message(self) -> str | None:
        """What replaces the run's system message; None where it is unchanged."""
        text = self.system.toPlainText()
        return None if text == self._system_default else text

    def _check(self) -> None:
        wrong = [entry for entry in FIELDS if _number(entry, self.fields[entry.key].text()) is None]
        for entry in FIELDS:
            set_style_property(self.fields[entry.key], "problem", entry in wrong and bool(self._defaults))
        self.problem.setText(_problem(wrong[0]) if wrong and self._defaults else "")
        set_shown(self.problem, bool(self.problem.text()))
        texts = {key: line.text() for key, line in self.fields.items()}
        defaults = {key: _text(self._defaults.get(key)) for key in self.fields}
        is_free = bool(self._defaults.get("free_output")) != self.free_output.isChecked()
        self.restore.setEnabled(texts != defaults or is_free or self.system_message() is not None)


def _number(entry: SamplingField, text: str) -> float | int | None:
    """The number in a line; None where it is none, or out of range."""
    try:
        number = int(text) if entry.whole else float(text.replace(",", "."))
    except ValueError:
        return None
    is_inside = entry.low <= number <= entry.high and not (entry.key == "top_p" and number == 0)
    return number if is_inside else None


def _problem(entry: SamplingField) -> str:
    kind = "a whole number" if entry.whole else "a number"
    if entry.high <= 1:
        return f"{entry.title} is {kind} from 0 to 1."
    return f"{entry.title} is {kind} from {entry.low:g}."


def _text(value: Any) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
