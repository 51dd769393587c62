"""The parts around the conversation: choice of the model, rows of the dataset, sampling settings, and the notice."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QCheckBox, QFrame, QLineEdit, QToolButton, QWidget

from app import theme
from app.state.chat import Endpoint
from app.widgets.basic.controls import ComboBox, CopyLink, Dot, ElidedLabel, LinkButton, NumberEdit, ProseEdit
from app.widgets.basic.labels import button, label, plain_tip, show_text, with_key_names
from app.widgets.basic.layout import column, configure, grid, holder, row, set_shown, set_style_property
from app.widgets.basic.number_format import figure
from app.widgets.run_switcher import Choice, Switcher

BROWSE = "browse"


class ModelBar(QWidget):
    def __init__(self) -> None:
        super().__init__()
        self._choices: list[Choice] = []
        self.models = Switcher("Run or model", lambda: self._choices)
        self.checkpoints = ComboBox(name="Checkpoint", length=12)
        self.load = button("Load")
        self.reset = button("Clear", tip="Forget what was asked of this run or model (Ctrl+Alt+C)")
        tip, focus = "Temperature, seed, system message, …", Qt.FocusPolicy.StrongFocus
        self.settings = configure(QToolButton(), text="Settings", checkable=True, focusPolicy=focus, tip=tip)
        tip = with_key_names("Let other programs use this model by OpenAI's API (Ctrl+Alt+V)")
        self.serve = configure(QToolButton(), text="Serve", checkable=True, focusPolicy=focus, tip=tip)
        title = label("Chat", theme.title_font())
        row(title, self.models, self.checkpoints, self.load, None, self.reset, self.serve, self.settings, into=self)

    @property
    def checkpoint(self) -> str:
        """The key of the chosen checkpoint, "" where there is none to choose."""
        return self.checkpoints.currentData() or ""

    def show_models(self, runs: Sequence[Choice], models: Mapping[str, str], chosen: str) -> None:
        """List runs, then models (value → text), then the entry that asks for a folder."""
        own = [Choice(value, text, "model") for value, text in models.items()]
        self._choices = [*runs, *own, Choice(BROWSE, "Another model…")]
        text = next((choice.text for choice in self._choices if choice.value == chosen), "Choose a model")
        self.models.show_choice(chosen, text)

    def show_state(self, *, loaded: bool, can_load: bool, can_reset: bool) -> None:
        """`loaded`: the chosen model is loaded, and the button unloads it."""
        tip = with_key_names(f"{'Free its memory' if loaded else 'Load it now; a prompt does so too'} (Ctrl+Alt+L)")
        configure(self.load, text="Unload" if loaded else "Load", tip=tip, enabled=loaded or can_load)
        self.reset.setEnabled(can_reset)


class ServePanel(QFrame):
    """Starts and stops the server of the chosen model, and shows its address."""

    started = Signal(int)  # port

    def __init__(self, endpoint: Endpoint, port: int) -> None:
        super().__init__()
        self.setProperty("role", "card")
        self._endpoint, self._can_start = endpoint, False
        self._dot, self.status = Dot("placeholder"), ElidedLabel(colour="text")
        self.port = NumberEdit(text=str(port), width=72, integers=(1, 65535), name="Port", textChanged=self._show)
        self.port.returnPressed.connect(self._press)
        self.start = button("", self._press)
        self.url, self.copy = label(font=theme.mono_font(), selectable=True), CopyLink("Copy the address")
        self.models = label(role="muted", wrap=True, selectable=True)
        self._address = holder(row(self.url, self.copy, theme.SPACE, (self.models, 1)))
        self.problem = label(role="problem", wrap=True, selectable=True)
        self._port_name = label("Port", role="muted", buddy=self.port)
        head = row(self._dot, (self.status, 1), self._port_name, self.port, self.start)
        below = column(self._address, self.problem, spacing=6, margins=(self._dot.width() + theme.SPACE, 0, 0, 0))
        column(head, below, into=self, spacing=6, margins=(12, theme.SPACE, 12, theme.SPACE))
        endpoint.changed.connect(self._show)
        self.offer("", can_start=False)

    def offer(self, sentence: str, *, can_start: bool) -> None:
        """`sentence`: what can be served."""
        self._sentence, self._can_start = sentence, can_start
        self._show()

    def _press(self) -> None:
        if self._endpoint.state in ("starting", "serving"):
            self._endpoint.stop()
        elif self.start.isEnabled():
            self.started.emit(int(self.port.text()))

    def _show(self) -> None:
        endpoint, state = self._endpoint, self._endpoint.state
        title = endpoint.title
        role, text = {
            "off": ("placeholder", self._sentence),
            "starting": ("warning", f"Loading {title}…"),
            "serving": ("good", f"Serving {title}"),
            "stopping": ("warning", "Stopping…"),
        }[state]
        self._dot.show_colour(role)
        configure(self.status, text=text, toolTip=plain_tip(text))
        self.url.setText(endpoint.url)
        self.copy.content = endpoint.url
        key = "; the key is that of GRPO_STUDIO_KEY" if endpoint.needs_key else ""
        names = f"{'Models' if len(endpoint.models) > 1 else 'Model'}: {', '.join(endpoint.models)}{key}"
        self.models.setText(names)
        set_shown(self._address, state == "serving")
        show_text(self.problem, endpoint.problem)
        for part in (self._port_name, self.port):
            part.setEnabled(state == "off")
        is_ready = self._can_start and self.port.hasAcceptableInput()
        may_press = is_ready if state == "off" else state != "stopping"
        configure(self.start, text="Start" if state == "off" else "Stop", enabled=may_press)


class RowStrip(QWidget):
    row_requested = Signal(int)

    def __init__(self) -> None:
        super().__init__()
        self._row, self._of = -1, 0
        request = self.row_requested.emit
        self.previous = button("Previous", lambda: request(max(-1, self._row - 1)), tip="The row before")
        self.next = button("Next", lambda: request(self._row + 1), tip="The row after")
        # Before the first row the number of rows is unknown; the page takes a large number modulo it.
        self.random = button("Random", lambda: request(random.randrange(self._of or 1 << 30)), tip="Any row")
        self.about = ElidedLabel(font=theme.figures_font())
        self.expected = configure(
            QLineEdit(placeholderText="unknown"),
            accessibleName="Expected answer",
            toolTip="Given to the reward functions; without it those that need an answer are skipped.",
            fixedWidth=theme.scaled(150),
        )
        caption = label("Expected answer", role="muted", buddy=self.expected)
        self._rows = holder(row(label("Prompts of the dataset", role="muted"), self.previous, self.next, self.random))
        row(self._rows, (self.about, 1), caption, self.expected, into=self)

    def show_row(self, number: int, of: int, answer: str, source: str) -> None:
        self._row, self._of = number, of
        configure(self.about, text=f"Row {figure(number + 1)} of {figure(of)}", toolTip=plain_tip(source))
        self.expected.setText(answer)

    def forget(self) -> None:
        """Show no row."""
        self._row, self._of = -1, 0
        self.about.setText("")
        self.expected.clear()

    def offer_rows(self, *, has_rows: bool, loaded: bool) -> None:
        """A model that is not a run has no rows, and they are read with the model."""
        set_shown(self._rows, has_rows)
        self._rows.setEnabled(loaded)


@dataclass(frozen=True, slots=True)
class SamplingField:
    key: str
    title: str
    whole: bool
    low: float
    high: float
    tip: str

    def number(self, text: str) -> float | int | None:
        """The number in a text; None if it is not one, or out of range."""
        try:
            number = int(text) if self.whole else float(text.replace(",", "."))
        except ValueError:
            return None
        is_inside = self.low <= number <= self.high and not (self.key == "top_p" and number == 0)
        return number if is_inside else None

    @property
    def problem(self) -> str:
        kind, to = "a whole number" if self.whole else "a number", " to 1" if self.high <= 1 else ""
        return f"{self.title} is {kind} from {self.low:g}{to}."


FIELDS = (
    SamplingField("temperature", "Temperature", False, 0, 100, "0 always takes the likeliest token."),
    SamplingField("top_p", "Top-p", False, 0, 1, "Keeps the likeliest tokens that make up this share; 1 keeps all."),
    SamplingField("top_k", "Top-k", True, 0, 1e6, "Keeps that many of the likeliest tokens; 0 keeps all."),
    SamplingField("min_p", "Min-p", False, 0, 1, "Drops tokens below this share of the likeliest; 0 keeps all."),
    SamplingField("max_tokens", "Max tokens", True, 1, 1e6, "A longer answer is cut off."),
    SamplingField("seed", "Seed", True, 0, 2**63 - 1, "The same seed gives the same answers; both sides share it."),
)


class SamplingPanel(QFrame):
    def __init__(self) -> None:
        super().__init__()
        configure(self, role="card", fixedWidth=theme.scaled(200))
        self.fields: dict[str, NumberEdit] = {}
        self._defaults: dict[str, Any] = {}
        self._system_default = ""
        self.system = ProseEdit(6, accessibleName="System message", placeholderText="None", textChanged=self._check)
        tip = "Ignores the run's regular expression or JSON schema."
        self.free_output = configure(QCheckBox("Free output"), toolTip=tip, toggled=self._check)
        self.restore = LinkButton("Reset", on_click=lambda: self.show_defaults(self._defaults, self._system_default))
        self.problem = label(role="problem", wrap=True)
        numbers = []
        for entry in FIELDS:
            line = NumberEdit(name=entry.title, width=76, toolTip=entry.tip, textChanged=self._check)
            self.fields[entry.key] = line
            numbers.append((label(entry.title, role="muted", buddy=line, toolTip=entry.tip), line))
        heading, lines = theme.heading_font(), grid(numbers, stretch=0, spacing=(theme.SPACE, 6))
        sampling = (label("Sampling", heading), lines, self.free_output, self.problem)
        system = (label("System message", heading), self.system, self.restore)
        column(*sampling, theme.SPACE, *system, None, into=self, margins=(12, 10, 12, 12))
        self._check()

    def show_defaults(self, values: Mapping[str, Any], system: str) -> None:
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
        """Key → number, and `free_output`."""
        numbers = {entry.key: entry.number(self.fields[entry.key].text()) for entry in FIELDS}
        return {**numbers, "free_output": self.free_output.isChecked()}

    def system_message(self) -> str | None:
        """The text that replaces the run's system message; None where it is unchanged."""
        text = self.system.toPlainText()
        return None if text == self._system_default else text

    def _check(self) -> None:
        wrong = [entry for entry in FIELDS if entry.number(self.fields[entry.key].text()) is None and self._defaults]
        for entry in FIELDS:
            set_style_property(self.fields[entry.key], "problem", entry in wrong)
        show_text(self.problem, wrong[0].problem if wrong else "")
        is_changed = any(line.text() != _text(self._defaults.get(key)) for key, line in self.fields.items())
        is_free = bool(self._defaults.get("free_output")) != self.free_output.isChecked()
        self.restore.setEnabled(is_changed or is_free or self.system_message() is not None)


def _text(value: Any) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
