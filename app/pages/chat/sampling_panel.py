"""How answers are sampled, and the system message: a slim column of fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QCheckBox, QFrame, QGridLayout, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import LinkButton, NumberEdit, ProseEdit
from app.widgets.basic.labels_and_buttons import label
from app.widgets.basic.layout import set_shown, set_style_property

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
