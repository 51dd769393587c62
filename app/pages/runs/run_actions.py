"""What can be done with the selected runs: when an action applies, the trash, and the dialogs."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PySide6.QtCore import QFile, Qt, Signal
from PySide6.QtWidgets import QLineEdit, QListWidget, QListWidgetItem, QWidget

from app import theme
from app.state.messages import problems_to
from app.state.processes import ProcessOutcome
from app.state.run import LIVE
from app.widgets.basic.controls import CheckBox, ComboBox, LinkButton, Segments
from app.widgets.basic.dialogs import Dialog
from app.widgets.basic.labels import button, label, show_text
from app.widgets.basic.layout import TabArea, column, configure, grid, holder, row
from app.widgets.basic.number_format import counted, file_size
from app.widgets.form.fields import Field, make_field
from app.widgets.form.setting_search import SettingSearch
from app.widgets.hub_dialogs import VerbDialog
from backend.config.config import SETTINGS, TEXTS, problems
from backend.runs.run_folder import RunFolder
from backend.runs.run_names import name_of
from backend.runs.run_record import FreeableSpace, RunRecord, as_number, free_space, value_text
from backend.runs.saved_weights import all_checkpoints, best_of
from backend.runs.steering import run_config
from backend.utils.command import backend_command
from backend.utils.errors import UserError

RESUMABLE = ("stopped", "failed", "crashed")
Runs = Sequence[RunRecord]
WAYS = {"warm": "Continue from there", "cold": "Start over with its weights"}
EXPLAINED = {
    "warm": "Keeps weights, optimizer, data position and charts up to that step. Unchanged, it repeats the run.",
    "cold": "Keeps the weights alone. Starts at step 0 with a new optimizer and the data from the beginning.",
}
REWARD_SETTINGS = ("reward_functions_file", "reward_functions", "stages")  # settings that name files of code
CREATE = "Create the run"


def restore(path: Path, trashed: Path | None) -> None:
    """Move a run back out of the trash. Raises UserError."""
    if trashed is None or not trashed.exists():
        raise UserError("run", f"{path.name} is no longer in the trash.")
    if path.exists():
        raise UserError("run", f"{path} exists again; move that one away first.")
    if not QFile.rename(str(trashed), str(path)):  # copies where the trash is on another disk
        raise UserError("run", f"{trashed} could not be moved back to {path}.")
    # On Linux (https://specifications.freedesktop.org/trash-spec/1.0/) the trash would go on listing it.
    if trashed.parent.name == "files":
        (trashed.parents[1] / "info" / f"{trashed.name}.trashinfo").unlink(missing_ok=True)


def ticked_data(listed: QListWidget) -> list[Any]:
    items = [listed.item(i) for i in range(listed.count())]
    return [item.data(Qt.ItemDataRole.UserRole) for item in items if item.checkState() == Qt.CheckState.Checked]


@dataclass(frozen=True, slots=True)
class RunAction:
    """An entry of the menu: its text for a run, what it `needs` of `abilities`, its keys, its text for several runs.

    `off` is the text of one that sets a flag of the notes, `key`, where all runs have it.
    """

    key: str
    one: str
    needs: str
    do: Callable[[], object]
    keys: str = ""
    several: str = ""
    off: str = ""

    def applies(self, runs: Runs) -> bool:
        return abilities(runs)[self.needs]

    def text(self, runs: Runs) -> str:
        if self.off and runs and all(getattr(run.notes, self.key) for run in runs):
            return self.off
        return self.several.format(len(runs)) if self.several and len(runs) > 1 else self.one


def abilities(runs: Runs) -> dict[str, bool]:
    is_one, is_idle = len(runs) == 1, bool(runs) and not any(run.summary.state in LIVE for run in runs)
    has_steps = is_one and (runs[0].summary.step or 0) > 0
    found = {"any": bool(runs), "one": is_one, "several": len(runs) > 1, "idle": is_idle, "steps": has_steps}
    has_adapters = has_steps and is_idle and runs[0].setting("train_type") != "full"
    found |= {"trained": has_steps and is_idle, "adapters": has_adapters}
    return found | {"ended": is_one and runs[0].summary.state in RESUMABLE}


class FreeSpaceDialog(Dialog):
    freed = Signal(list)

    def __init__(self, spaces: Sequence[FreeableSpace], parent: QWidget | None = None) -> None:
        super().__init__("Free space", parent, (560, 420))
        self.list = configure(QListWidget(), accessibleName="Runs with checkpoints to spare")
        for space in spaces:
            steps = [f"{saved.step:,}" for saved in space.checkpoints]
            listed = ", ".join(steps) if len(steps) <= 4 else f"{steps[0]} … {steps[-1]}"
            count = f"{counted(len(steps), 'checkpoint')} (step {listed})"
            item = QListWidgetItem(f"{name_of(space.run)}  –  {count}, {file_size(space.bytes)}")
            item.setData(Qt.ItemDataRole.UserRole, space)
            item.setCheckState(Qt.CheckState.Checked)
            self.list.addItem(item)
        self.list.itemChanged.connect(lambda _item: self._show_sum())
        self.outcome = label(wrap=True)
        self.start = button("", self.delete, primary=True, default=False)  # it cannot be undone
        intro = label(
            "Deletes all checkpoints but the best and the newest of each run. This cannot be undone. Event logs, "
            "completions and exported models stay. A run that is training is left alone.",
            wrap=True,
        )
        buttons = row(None, button("Close", self.close), self.start)
        column(intro, (self.list, 1), self.outcome, buttons, into=self, spacing=12, margins=2 * theme.SPACE)
        self._show_sum()

    def chosen(self) -> list[FreeableSpace]:
        return ticked_data(self.list)

    def delete(self) -> None:
        refused, done, total = list[str](), list[Path](), 0
        for space in self.chosen():
            with problems_to(refused.append):
                total += free_space(space.run)
                done.append(space.run.path)
        for i in reversed(range(self.list.count())):
            if self.list.item(i).data(Qt.ItemDataRole.UserRole).run.path in done:
                self.list.takeItem(i)
        self._show_sum()
        self.outcome.setText(" ".join([f"Freed {file_size(total)}.", *refused]))
        self.freed.emit(done)

    def _show_sum(self) -> None:
        total = sum(space.bytes for space in self.chosen())
        self.start.setText(f"Delete checkpoints, free {file_size(total)}" if total else "Nothing to delete")
        self.start.setEnabled(total > 0)
        self.outcome.setText("" if self.list.count() else "No run has other checkpoints than its best and its newest.")


class ChangedSettings(QWidget):
    changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.fields: dict[str, Field] = {}
        self._now: Mapping[str, Any] = {}
        self.search = SettingSearch([about for key, about in SETTINGS.items() if key != "run_name"])
        configure(self.search, placeholderText="Change a setting…", chosen=self.add)
        self._column = column(self.search, into=self)

    def set_now(self, now: Mapping[str, Any]) -> None:
        self._now = now
        for key, field in self.fields.items():
            field.show_note(f"Now {value_text(self.now(key))}")
        self._check()

    def add(self, key: str) -> None:
        if key not in self.fields:
            line = QWidget(self)
            field = self.fields[key] = make_field(SETTINGS[key], line)
            field.show_value(self.now(key))
            field.show_note(f"Now {value_text(self.now(key))}")
            field.edited.connect(lambda *_: self._check())
            name = f"Do not change {SETTINGS[key].label}"
            remove = LinkButton("Remove", on_click=lambda: self.remove(key), name=name)
            row((field, 1), (remove, 0, Qt.AlignmentFlag.AlignVCenter), into=line, spacing=12)
            self._column.addWidget(line)
            self._check()
        self.search.clear()
        control = self.fields[key].control
        control.setFocus()
        if isinstance(control, QLineEdit):
            control.selectAll()  # typing replaces the value

    def remove(self, key: str) -> None:
        if (line := self.fields.pop(key).parentWidget()) is not None:
            line.hide()
            line.deleteLater()
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

    def _check(self) -> None:
        errors = self.errors()
        for key, field in self.fields.items():
            field.show_problem(errors.get(key, ""))
        self.changed.emit()


class CloneDialog(VerbDialog):
    cloned = Signal(object, bool)  # path of the new run; whether to train it as soon as no other run trains

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
        super().__init__(f"New run from {title}", "clone", parent, (600, 560))
        self.run, self._may_run_code = run, may_run_code
        self._problem = ""
        self.step = ComboBox(name="Starting step")
        checkpoints = list(reversed(all_checkpoints(run)))
        best = best_of(checkpoints)
        for saved in checkpoints:  # “Step 40, reward 2.31, the newest and the best”
            marks = [mark for mark, one in (("the newest", checkpoints[0]), ("the best", best)) if saved == one]
            title = ", ".join([saved.title, *filter(None, [" and ".join(marks)])])
            self.step.addItem(title[:1].upper() + title[1:], saved.step)
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
        area = TabArea(content=holder(column(self.settings, None, margins=(0, 0, theme.GUTTER, 0))))
        buttons = row(self.at_once, None, button("Cancel", self.close), self.create_button)
        fields = [(label(text, role="muted"), part) for text, part in lines]
        head = grid(fields, stretch=1, spacing=(12, theme.SPACE))
        column(head, (area, 1), self.differs, self.outcome, buttons, into=self, spacing=12, margins=2 * theme.SPACE)
        self._show_step()

    def _show_step(self) -> None:
        self._problem, now = "", dict[str, Any]()
        if not self.step.count():
            self._problem = f"The run {self.run.name} has no checkpoint to start from."
        else:
            with problems_to(partial(setattr, self, "_problem")):
                now = run_config(self.run, self.step.currentData()).model_dump()
        self.name.setPlaceholderText(f"{self.run.name}-from-{self.step.currentData()}")
        self.settings.setEnabled(not self._problem)
        self.settings.set_now(now)  # which leads to `_show_ready`

    def _show_ready(self) -> None:
        if self.is_running:
            return
        self.explained.setText(EXPLAINED[self.way.key])
        new, errors = self.settings.values(), self.settings.errors()
        text = "Changes:" if new else "Nothing changes: a second run from the same point."
        for key, value in new.items():
            text += f"\n{SETTINGS[key].label}: {value_text(self.settings.now(key))} → {value_text(value)}"
        self.differs.setText(text)
        settings = {key: new.get(key, self.settings.now(key)) for key in ("iters", "epochs", "stages")}
        step, most, no_steps_left = self.step.currentData(), settings["iters"], ""
        is_warm = self.way.key == "warm" and not self._problem
        if is_warm and not (settings["epochs"] or settings["stages"] or step < most):
            more = f"Increase {SETTINGS['iters'].label}, or start earlier."
            no_steps_left = f"The run has done {step:,} of its {most:,} steps. {more}"
        name = self.name.text().strip()
        taken = bool(name) and os.path.exists(self.run.path.parent / name)  # a name too long is False, not an error
        reasons = [
            self._problem or no_steps_left,
            "A run of this name exists." if taken else "",
            *(sentence for key, sentence in errors.items() if key not in self.settings.fields),
        ]
        show_text(self.outcome, " ".join(filter(None, reasons)))
        self.create_button.setEnabled(not any(reasons) and not errors)

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
        configure(self.create_button, text="Creating the run…", enabled=False)
        self.run_verb(self.command())

    def show_progress(self, sentence: str, done: float | None) -> None:
        pass  # it takes a moment

    def on_end(self, outcome: ProcessOutcome) -> None:
        self.create_button.setText(CREATE)
        if outcome.ok:
            self.cloned.emit(Path(outcome.sentence), self.at_once.isChecked())
            self.close()
            return
        pairs = (line.partition(": ") for line in outcome.output.splitlines())
        refused = [sentence for key, _, sentence in pairs if key in SETTINGS]
        show_text(self.outcome, " ".join(refused) or outcome.problem)
        self.create_button.setEnabled(True)
