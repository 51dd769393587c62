"""The dialog that makes a new run from a checkpoint of another, with settings changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QCloseEvent
from PySide6.QtWidgets import QLabel, QLineEdit, QWidget

from app import theme
from app.state.processes import VerbProcess
from app.widgets.basic.controls import CheckBox, ComboBox, LinkButton, Segments
from app.widgets.basic.dialogs import Dialog
from app.widgets.basic.labels import button, label, show_text
from app.widgets.basic.layout import TabArea, column, configure, grid, holder, row
from app.widgets.basic.number_format import figure
from app.widgets.form.field import Field
from app.widgets.form.fields import make_field
from app.widgets.form.setting_search import SettingSearch
from app.widgets.upload_dialog import cancel_before_closing
from backend.config.config import SETTINGS, TEXTS, problems
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import as_number, value_text
from backend.runs.saved_weights import all_checkpoints, best_of
from backend.runs.steering import run_config
from backend.utils.command import backend_command
from backend.utils.errors import UserError

WAYS = {"warm": "Continue from there", "cold": "Start over with its weights"}
EXPLAINED = {
    "warm": "Keeps weights, optimizer, data position and charts up to that step. Unchanged, it repeats the run.",
    "cold": "Keeps the weights alone. Starts at step 0 with a new optimizer and the data from the beginning.",
}
REWARD_SETTINGS = ("reward_functions_file", "reward_functions", "stages")
"""Settings that name files of code."""
OTHER_SUBJECTS = ("run", "checkpoint", "reference", "run_name")
"""Subjects of errors of the verb that are not settings of the form."""
CREATE = "Create the run"


class ChangedSettings(QWidget):
    """Settings to change: searched, added one by one, each beside its present value."""

    changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.fields: dict[str, Field] = {}
        self._rows: dict[str, tuple[QWidget, QLabel]] = {}
        self._now: Mapping[str, Any] = {}
        self.search = SettingSearch([about for key, about in SETTINGS.items() if key != "run_name"])
        configure(self.search, placeholderText="Change a setting…", chosen=self.add)
        self._column = column(self.search, into=self)

    def set_now(self, now: Mapping[str, Any]) -> None:
        """The values before any change, by key."""
        self._now = now
        for key, (_, caption) in self._rows.items():
            caption.setText(f"now {value_text(self.now(key))}")
        self._check()

    def add(self, key: str) -> None:
        if key not in self.fields:
            holder = QWidget(self)
            field = make_field(SETTINGS[key], holder)
            field.show_value(self.now(key))
            field.edited.connect(lambda *_: self._check())
            caption = label(f"now {value_text(self.now(key))}", role="muted", wrap=True)
            remove = LinkButton("Remove", on_click=lambda: self.remove(key))
            remove.setAccessibleName(f"Do not change {SETTINGS[key].label}")
            centre = Qt.AlignmentFlag.AlignVCenter
            row((field, 1), (caption, 1, centre), (remove, 0, centre), into=holder, spacing=12)
            self._column.addWidget(holder)
            self.fields[key], self._rows[key] = field, (holder, caption)
            self._check()
        self.search.clear()
        control = self.fields[key].control
        control.setFocus()
        if isinstance(control, QLineEdit):
            control.selectAll()  # typing replaces the value

    def remove(self, key: str) -> None:
        holder, _ = self._rows.pop(key)
        del self.fields[key]
        holder.hide()
        holder.deleteLater()
        self.search.setFocus()
        self._check()

    def now(self, key: str) -> Any:
        return self._now.get(key, SETTINGS[key].default)

    def values(self) -> dict[str, Any]:
        new = {key: as_number(key, field.value()) for key, field in self.fields.items()}
        return {key: value for key, value in new.items() if value != self.now(key)}

    def errors(self) -> dict[str, str]:
        before = {problem.setting for problem in problems(self._now)}
        return {
            problem.setting: problem.sentence
            for problem in problems({**self._now, **self.values()})
            if problem.setting in self.fields or problem.setting not in before
        }

    def show_errors(self, errors: Mapping[str, str]) -> str:
        for key, field in self.fields.items():
            field.show_problem(errors.get(key, ""))
        return " ".join(sentence for key, sentence in errors.items() if key not in self.fields)

    def _check(self) -> None:
        self.show_errors(self.errors())
        self.changed.emit()


class CloneDialog(Dialog):
    """Not modal. Closing it while the folder is being made cancels that.

    Signals:
        cloned(path, starts) – the new run's folder is there; `starts`: train it as soon as no other run trains.
    """

    cloned = Signal(object, bool)

    def __init__(
        self,
        run: RunFolder,
        title: str,
        parent: QWidget | None = None,
        *,
        will_wait: bool = False,
        may_run_code: Callable[[Mapping[str, Any]], bool] = lambda _settings: True,
    ) -> None:
        """`will_wait`: another run trains now. `may_run_code` asks if the reward files of settings may be run."""
        super().__init__(f"New run from {title}", parent, (600, 560))
        self.run, self._may_run_code = run, may_run_code
        self._task: VerbProcess | None = None
        self._problem = ""
        self.step = ComboBox(name="Starting step")
        checkpoints = list(reversed(all_checkpoints(run)))
        best = best_of(checkpoints)
        for saved in checkpoints:  # “Step 40, reward 2.31, the newest and the best”
            marks = [mark for mark, one in (("the newest", checkpoints[0]), ("the best", best)) if saved == one]
            reward = "" if saved.state.score is None else f"reward {figure(saved.state.score)}"
            parts = filter(None, (f"Step {saved.step:,}", reward, " and ".join(marks)))
            self.step.addItem(", ".join(parts), saved.step)
        self.step.currentIndexChanged.connect(lambda _: self._show_step())
        show_ready = self._show_ready
        self.way = Segments(WAYS, "How the new run starts", chosen=lambda _: show_ready())
        self.explained = label(role="muted", wrap=True)
        self.name = configure(QLineEdit(), accessibleName="Name of the new run", textChanged=lambda _: show_ready())
        self.settings = configure(ChangedSettings(), changed=show_ready)
        self.differs = label(wrap=True, align=Qt.AlignmentFlag.AlignTop)
        self.at_once = CheckBox("Add it to the queue" if will_wait else "Train it at once", checked=True)
        self.outcome = label(role="problem", wrap=True, selectable=True)
        self.create_button = button(CREATE, self.create_run, primary=True)

        lines = (("From", self.step), ("It will", row(self.way, None)), ("", self.explained), ("Name", self.name))
        fields = [(label(text, role="muted"), part) for text, part in lines]
        area = TabArea(content=holder(column(self.settings, None, margins=(0, 0, theme.GUTTER, 0))))
        buttons = row(self.at_once, None, button("Cancel", self.close), self.create_button)
        everything = (
            grid(fields, stretch=1, spacing=(12, theme.SPACE)),
            (area, 1),
            self.differs,
            self.outcome,
            buttons,
        )
        column(*everything, into=self, spacing=12, margins=2 * theme.SPACE)
        self._show_step()

    def _show_step(self) -> None:
        self._problem, now = "", dict[str, Any]()
        if not self.step.count():
            self._problem = f"The run {self.run.name} has no checkpoint to start from."
        else:
            try:
                now = run_config(self.run, self.step.currentData()).model_dump()
            except UserError as error:
                self._problem = error.faults[0].sentence
        self.name.setPlaceholderText(f"{self.run.name}-from-{self.step.currentData()}")
        self.settings.setEnabled(not self._problem)
        self.settings.set_now(now)
        self._show_ready()

    def _show_ready(self) -> None:
        if self._task is not None and self._task.is_running:
            return
        self.explained.setText(EXPLAINED[self.way.key])
        new, errors = self.settings.values(), self.settings.errors()
        lines = [
            f"{SETTINGS[key].label}: {value_text(self.settings.now(key))} → {value_text(value)}"
            for key, value in new.items()
        ]
        same = "Nothing changes: a second run from the same point."
        self.differs.setText("Changes:\n" + "\n".join(lines) if lines else same)
        name = self.name.text().strip()
        taken = bool(name) and os.path.exists(self.run.path.parent / name)  # a name too long is False, not an error
        reasons = [
            self._problem or self._no_steps_left(new),
            "A run of this name exists." if taken else "",
            *(sentence for key, sentence in errors.items() if key not in self.settings.fields),
        ]
        show_text(self.outcome, " ".join(filter(None, reasons)))
        self.create_button.setEnabled(not any(reasons) and not errors)

    def _no_steps_left(self, new: Mapping[str, Any]) -> str:
        settings = {key: new.get(key, self.settings.now(key)) for key in ("iters", "epochs", "stages")}
        step = self.step.currentData()
        if self.way.key != "warm" or settings["epochs"] or settings["stages"] or step < settings["iters"]:
            return ""
        more = f"Increase {SETTINGS['iters'].label}, or start earlier."
        return f"The run has done {step:,} of its {settings['iters']:,} steps. {more}"

    def command(self) -> list[str]:
        changes = []
        for key, value in self.settings.values().items():
            # Text as it is, everything else as YAML, nothing for a setting that is emptied.
            is_text, is_empty = SETTINGS[key].kind in TEXTS, value is None or value == ""
            changes += ["--set", f"{key}={'' if is_empty else value if is_text else json.dumps(value)}"]
        name = self.name.text().strip()
        options = ["--step", str(self.step.currentData()), f"--{self.way.key}", *changes]
        options += [*(["--name", name] if name else []), "--runs-dir", str(self.run.path.parent)]
        return backend_command("clone", str(self.run.path), *options)

    def create_run(self) -> None:
        new = self.settings.values()
        if new and not self._may_run_code({key: self.settings.now(key) for key in REWARD_SETTINGS} | new):
            show_text(self.outcome, "The code was not allowed to run, so no run was made.")
            return
        show_text(self.outcome, "")
        self._task = VerbProcess(self.command(), self)
        self._task.done.connect(self._end)
        self.create_button.setEnabled(False)
        self.create_button.setText("Creating the run…")
        self._task.start()

    def _end(self, outcome: Any) -> None:
        self.create_button.setText(CREATE)
        if outcome.ok:
            self.cloned.emit(Path(outcome.sentence), self.at_once.isChecked())
            self.close()
            return
        pairs = [line.partition(": ") for line in outcome.output.splitlines()]
        errors = {key: text for key, colon, text in pairs if colon and (key in SETTINGS or key in OTHER_SUBJECTS)}
        elsewhere = self.settings.show_errors(errors)
        show_text(self.outcome, elsewhere if errors else outcome.sentence)
        self.create_button.setEnabled(True)

    def closeEvent(self, event: QCloseEvent) -> None:
        if not cancel_before_closing(self, self._task, event):
            super().closeEvent(event)
