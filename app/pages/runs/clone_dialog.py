"""The dialog that makes a new run from a checkpoint of another: from which step, going on or starting over, with which settings changed.

It builds the command line of the verb `clone`, which makes the folder and refuses what cannot be cloned; the process is started by a
factory that is passed in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QCloseEvent
from PySide6.QtWidgets import QDialog, QGridLayout, QHBoxLayout, QLineEdit, QVBoxLayout, QWidget

from app import theme
from app.widgets.basic.controls import CheckBox, ComboBox, LinkButton, Segments
from app.widgets.basic.labels import button, label
from app.widgets.basic.layout import TabArea, on_screen, set_shown
from app.widgets.basic.number_format import figure
from app.widgets.form.field import Field
from app.widgets.form.fields import make_field
from app.widgets.form.setting_search import SettingSearch
from app.widgets.upload_dialog import MakeTask, VerbTask, is_held_open
from backend.config.config import SETTINGS, TEXTS, problems
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import as_number, value_text
from backend.runs.saved_weights import SavedWeights, best_of, saved_weights
from backend.runs.steering import run_config
from backend.utils.command import backend_command
from backend.utils.errors import UserError

# A small form of settings to change: searched, added one by one, each beside the value that it has now.

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


# ── clone dialog ─────────────────────────────────────────────────────────────────────────────────────────────────────

WAYS = {"warm": "Go on from there", "cold": "Start over with its weights"}
EXPLAINED = {
    "warm": "Weights, optimizer, place in the data and charts up to that step are those of the run: unchanged, it would go on as the run itself.",
    "cold": "Only the weights are taken. It begins at step 0 with a fresh optimizer and the prompts from the beginning.",
}
_WIDTH = 600
REWARD_SETTINGS = ("reward_functions_file", "reward_functions", "stages")
"""Settings that name files of code."""


class CloneDialog(QDialog):
    """Not modal. Closing it while the folder is being made cancels that.

    Attributes:
        step, way, name, settings, at_once – the choices.
        outcome – what is in the way, or why it was refused.

    Signals:
        cloned(path, starts) – the new run's folder is there; `starts`: it is to be trained, as soon as no other run is.
    """

    cloned = Signal(object, bool)

    def __init__(
        self, run: RunFolder, title: str, make_task: MakeTask, parent: QWidget | None = None, *, will_wait: bool = False,
        may_run_code: Callable[[Mapping[str, Any]], bool] = lambda _settings: True,
    ) -> None:  # fmt: skip
        """`will_wait`: another run trains, so this one would have to wait its turn. `may_run_code`: whether the reward files of settings may
        be run, which is how new ones are checked."""
        super().__init__(parent)
        self.run = run
        self._make_task, self._will_wait, self._may_run_code = make_task, will_wait, may_run_code
        self._task: VerbTask | None = None
        self._checkpoints = list(reversed(saved_weights(run)))
        self._problem = ""
        self.setWindowTitle(f"New run from {title}")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.resize(on_screen(self, _WIDTH, 560))
        self._build()
        self._lay_out()
        self._show_step()

    def _build(self) -> None:
        self.step = ComboBox()
        self.step.setAccessibleName("Step to begin from")
        best = best_of(self._checkpoints)
        for saved in self._checkpoints:
            self.step.addItem(_checkpoint_text(saved, self._checkpoints[0], best), saved.step)
        self.step.currentIndexChanged.connect(lambda _: self._show_step())
        self.way = Segments(WAYS, "How the new run begins")
        self.way.chosen.connect(lambda _: self._show_way())
        self.explained = label(role="muted", wrap=True)
        self.name = QLineEdit()
        self.name.setAccessibleName("Name of the new run")
        self.name.textChanged.connect(lambda _: self._show_ready())
        self.settings = ChangedSettings()
        self.settings.changed.connect(self._show_ready)
        self.differs = label(wrap=True, align=Qt.AlignmentFlag.AlignTop)
        self.at_once = CheckBox("Add it to the queue" if self._will_wait else "Train it at once")
        self.at_once.setChecked(True)
        self.outcome = label(role="problem", wrap=True, selectable=True)
        self.close_button = button("Cancel", self.close)
        self.create_button = button("Make the new run", self.create_run, primary=True)

    def _lay_out(self) -> None:
        grid = QGridLayout()
        grid.setHorizontalSpacing(12)
        grid.setVerticalSpacing(theme.SPACE)
        grid.setColumnStretch(1, 1)
        for row, (text, part) in enumerate(
            (("From", self.step), ("It will", self.way), ("", self.explained), ("Name", self.name))
        ):
            grid.addWidget(label(text, role="muted"), row, 0)
            grid.addWidget(part, row, 1, *([Qt.AlignmentFlag.AlignLeft] if part is self.way else []))
        page = QWidget()
        page.setObjectName("page")
        inside = QVBoxLayout(page)
        inside.setContentsMargins(0, 0, theme.GUTTER, 0)
        inside.addWidget(self.settings)
        inside.addStretch(1)
        area = TabArea()
        area.setWidget(page)
        buttons = QHBoxLayout()
        buttons.addWidget(self.at_once)
        buttons.addStretch(1)
        buttons.addWidget(self.close_button)
        buttons.addWidget(self.create_button)
        column = QVBoxLayout(self)
        column.setContentsMargins(*(2 * theme.SPACE,) * 4)
        column.setSpacing(12)
        column.addLayout(grid)
        column.addWidget(area, 1)
        column.addWidget(self.differs)
        column.addWidget(self.outcome)
        column.addLayout(buttons)

    # ── choices ─────────────────────────────────────────────────────────────────────────────────

    def _show_step(self) -> None:
        """The settings of the chosen step: changes that the run had by then are part of them."""
        self._problem = ""
        now: dict[str, Any] = {}
        if not self._checkpoints:
            self._problem = f"The run {self.run.name} has no checkpoint to begin from."
        else:
            try:
                now = run_config(self.run, self.step.currentData()).model_dump()
            except UserError as mistake:
                self._problem = mistake.faults[0].sentence
        self.name.setPlaceholderText(f"{self.run.name}-from-{self.step.currentData()}")
        self.settings.setEnabled(not self._problem)
        self.settings.set_now(now)
        self._show_way()

    def _show_way(self) -> None:
        self.explained.setText(EXPLAINED[self.way.key])
        self._show_ready()

    def _show_ready(self) -> None:
        """Say what will differ, and what is in the way."""
        if self._is_running:
            return
        new, faults = self.settings.values(), self.settings.faults()
        now = {key: self.settings.now(key) for key in new}
        lines = [f"{SETTINGS[key].label}: {value_text(now[key])} → {value_text(value)}" for key, value in new.items()]
        same = "Nothing differs: a second run from the same point."
        self.differs.setText("What will differ:\n" + "\n".join(lines) if lines else same)
        taken = bool(self.name.text().strip()) and (self.run.path.parent / self.name.text().strip()).exists()
        elsewhere = [sentence for key, sentence in faults.items() if key not in self.settings.fields]
        in_the_way = self._problem or self._no_steps_left(new)
        reasons = [in_the_way, "There is a run of this name already." if taken else "", *elsewhere]
        self._say(" ".join(filter(None, reasons)))
        self.create_button.setEnabled(not any(reasons) and not faults)

    def _no_steps_left(self, new: Mapping[str, Any]) -> str:
        """What to do where a run that goes on would be at its end already; empty otherwise."""
        settings = {key: new.get(key, self.settings.now(key)) for key in ("iters", "epochs", "stages")}
        step = self.step.currentData()
        if self.way.key != "warm" or settings["epochs"] or settings["stages"] or step < settings["iters"]:
            return ""
        return f"The run has done {step:,} of its {settings['iters']:,} steps: give it more {SETTINGS['iters'].label}, or begin earlier."

    def _say(self, sentence: str) -> None:
        self.outcome.setText(sentence)
        set_shown(self.outcome, bool(sentence))

    def command(self) -> list[str]:
        """The command line for the present choices."""
        changes = [
            part for key, value in self.settings.values().items() for part in ("--set", f"{key}={_written(key, value)}")
        ]
        name = self.name.text().strip()
        return backend_command(
            "clone", str(self.run.path), "--step", str(self.step.currentData()), f"--{self.way.key}",
            *changes, *(["--name", name] if name else []), "--runs-dir", str(self.run.path.parent),
        )  # fmt: skip

    # ── the process ─────────────────────────────────────────────────────────────────────────────

    @property
    def _is_running(self) -> bool:
        return self._task is not None and self._task.is_running

    def create_run(self) -> None:
        """Have the folder made; the dialog closes when it is there, and says why where it is refused."""
        new = self.settings.values()
        if new and not self._may_run_code({key: self.settings.now(key) for key in REWARD_SETTINGS} | new):
            self._say("The reward file was not allowed to run, so no run was made.")
            return
        self._say("")
        self._task = self._make_task(self.command(), self)
        self._task.done.connect(self._end)
        self.create_button.setEnabled(False)
        self.create_button.setText("Making the new run…")
        self._task.start()

    def _end(self, outcome: Any) -> None:
        self.create_button.setText("Make the new run")
        if not outcome.ok:
            faults = _faults_in(outcome.output)
            self.settings.show_faults(faults)
            elsewhere = [sentence for key, sentence in faults.items() if key not in self.settings.fields]
            self._say(" ".join(elsewhere) if faults else outcome.sentence)
            self.create_button.setEnabled(True)
            return
        self.cloned.emit(Path(outcome.sentence), self.at_once.isChecked())
        self.close()

    def closeEvent(self, event: QCloseEvent) -> None:
        if not is_held_open(self, self._task, event):
            super().closeEvent(event)


def _checkpoint_text(saved: SavedWeights, newest: SavedWeights, best: SavedWeights | None) -> str:
    """“Step 40, reward 2.31, the newest and the best”."""
    reward = "" if saved.score is None else f", reward {figure(saved.score)}"
    marks = [mark for mark, one in (("the newest", newest), ("the best", best)) if saved == one]
    return f"Step {saved.step:,}{reward}{', ' if marks else ''}{' and '.join(marks)}"


def _written(key: str, value: Any) -> str:
    """A value as `--set` reads it: text as it is, everything else as YAML, nothing for a setting that is emptied."""
    if value is None or value == "":
        return ""
    return str(value) if SETTINGS[key].kind in TEXTS else json.dumps(value)


def _faults_in(output: str) -> Mapping[str, str]:
    """Key → sentence, of the lines `key: sentence` that a verb prints for mistakes."""
    pairs = (line.partition(": ") for line in output.splitlines())
    return {
        key: sentence
        for key, colon, sentence in pairs
        if colon and (key in SETTINGS or key in ("run", "checkpoint", "reference", "run_name"))
    }
