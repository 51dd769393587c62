"""The config being edited: the one place in the app where a setting has a value.

It holds what the form holds, raw and unjudged ("1e-" is a fine thing to be half way through typing), keeps it on disk
across quits and crashes, and says what is wrong with it. It knows no widget and starts nothing.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from PySide6.QtCore import QObject, QTimer, Signal

from app.model import run_summary
from app.model.form_step import FormState, FormStep
from app.model.form_values import Values, defaults, is_equivalent, is_identical, typed_value, values_from
from app.model.presets import Preset
from backend.spec import config, places
from backend.spec.aliases import left_out
from backend.spec.command import backend_command, shown
from backend.spec.config import SETTINGS, Config
from backend.spec.faults import Fault, Mistake
from backend.spec.model_and_data_names import source_faults
from backend.spec.rewards import catalog
from backend.spec.rewards.catalog import RewardEntry

AUTOSAVE_MS = 400
"""How long typing must rest before the form is written to disk."""
TYPED = ("int", "float", "text", "prose", "file", "model", "dataset", "list", "numbers", "mapping", "stages")
"""Kinds of settings that are typed key by key: what is typed in one go is undone in one."""


class Draft(QObject):
    """Raw settings by key; every key of SETTINGS is always there.

    Attributes: path – the YAML file it was opened from or saved to, or None; left_out – what that file says and no setting
    of ours is, key → why.
    Signals: changed(key, or "" when all may have changed); edited(Edit) – by a person, and it can be undone; begun –
    nothing before this can be undone; judged – `problems` may say something else, though no setting was changed; saved;
    trouble(a sentence, when autosaving fails).
    """

    changed = Signal(str)
    edited = Signal(object)
    history_cleared = Signal()
    problems_changed = Signal()
    saved = Signal()
    save_failed = Signal(str)

    def __init__(self, autosave: Path | None = None, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.path: Path | None = None
        self.left_out: dict[str, str] = {}
        self.autosave = autosave
        self._refused = ("", "")
        self._values = defaults()
        self._on_disk: Mapping[str, Any] = defaults()
        self._timer = QTimer(self, singleShot=True, interval=AUTOSAVE_MS)
        self._timer.timeout.connect(self.flush)

    # Values

    def value(self, key: str) -> Any:
        return self._values[key]

    def values(self) -> Values:
        return copy.deepcopy(self._values)

    def set(self, key: str, value: Any) -> None:
        """Take a value as it stands in the form. Raises KeyError for what is no setting."""
        self.update({key: value})

    def update(self, values: Mapping[str, Any], what: str = "") -> None:
        """Take several at once: whoever hears of the first change sees all of them. `what` names the act for undoing it,
        else the settings do."""
        fresh = {key: value for key, value in values.items() if not is_identical(self._values[key], value)}
        if not fresh:
            return
        before, one = self.state, next(iter(fresh))
        self._values = self._values | fresh
        typed = one if len(fresh) == 1 and not what and SETTINGS[one].kind in TYPED else ""
        self.edited.emit(FormStep(what or run_summary.changed_labels(list(fresh)), before, self.state, typed))
        self._emit_changed(list(fresh))

    def _emit_changed(self, keys: list[str]) -> None:
        self._timer.start()
        for key in keys:
            self.changed.emit(key)

    def reset(self) -> None:
        """Every setting back to its default, with no file behind it."""
        self._replace(defaults(), None, "New config")

    def apply(self, preset: Preset) -> None:
        """Take a preset's settings over; one that replaces everything leaves no file behind the form."""
        if preset.replaces:
            self._replace(preset.applied(self._values), None, preset.title)
        else:
            self.update(preset.applied(self._values), preset.title)

    def start(self, values: Mapping[str, Any], what: str) -> None:
        """Another form: these values, the defaults for the others, and no file behind it."""
        self._replace(defaults() | dict(values), None, what)

    @property
    def state(self) -> FormState:
        """All that it is now; values are replaced and never changed in place, so it stays as it is."""
        return FormState(dict(self._values), self._on_disk, self.path)

    def restore_state(self, state: FormState, *, with_file: bool = False) -> None:
        """Be as it was, or as it was to become: the one way back and forth. The file behind the form stays, since it may
        have been saved meanwhile, unless it was the file that was changed."""
        keys = [key for key in SETTINGS if not is_identical(self._values[key], state.values[key])]
        self._values = dict(state.values)
        if with_file:
            self._on_disk, self.path, self.left_out = state.on_disk, state.path, {}
        self._emit_changed([""] if with_file else keys)

    @property
    def dirty(self) -> bool:
        """Whether it differs from the file it came from (or, without one, from what it began with)."""
        return not all(is_equivalent(self._values[key], self._on_disk[key]) for key in SETTINGS)

    # Files

    def load(self, path: Path, *, as_preset: bool = False) -> None:
        """Take over a YAML file. Raises Mistake, and stays as it is, where the file has what the form has no place for;
        a value that is merely wrong is taken over and shown with its problem. A preset is not saved over."""
        raw = config.read(path)
        values, faults = values_from(raw)
        if faults:
            raise Mistake(faults)
        self._replace(values, None if as_preset else Path(path), f"Open {Path(path).name}", left_out(raw))

    def save(self, path: Path) -> None:
        """Write the YAML file, whole or not at all. Raises Mistake when it cannot be written."""
        _write(path, self.as_yaml())
        self.path = path
        self._on_disk = self.values()
        self.saved.emit()

    def restore(self, path: Path | None) -> list[Fault]:
        """Bring back the autosaved form, and the file that it belongs to if that can still be read.

        Raises Mistake when the autosaved form cannot be read; returns what of it has no place here any more.
        """
        assert self.autosave is not None
        values, faults = values_from(config.read(self.autosave))
        self._values, self._on_disk, self.path = values, copy.deepcopy(values), None
        if path is not None and path.exists():
            try:
                self._on_disk, _ = values_from(config.read(path))
                self.path = path
            except Mistake:  # the file was spoilt meanwhile: the form stands without it, as unsaved
                self._on_disk = defaults()
        self._emit_changed([""])
        self.history_cleared.emit()
        return faults

    def flush(self) -> None:
        """Autosave now. The untouched demo is not kept: a later version may bring a better one, elsewhere on disk."""
        self._timer.stop()
        if self.autosave is None:
            return
        if self.is_demo:
            self.autosave.unlink(missing_ok=True)
            return
        try:
            _write(self.autosave, self._raw_yaml())
        except Mistake as mistake:
            self.save_failed.emit(mistake.faults[0].sentence)

    def _replace(self, values: Values, path: Path | None, what: str, left: dict[str, str] | None = None) -> None:
        before = self.state
        self._values, self._on_disk, self.path = values, copy.deepcopy(values), path
        self.left_out = left or {}
        self.edited.emit(FormStep(what, before, self.state))
        self._emit_changed([""])

    # What it amounts to

    def problems(self) -> list[Fault]:
        """Everything wrong with it that can be known without the trainer, in the form's order."""
        found = [*config.problems(self._values), *self._reward_faults(), *source_faults(self.valid_values())]
        if not any(fault.setting == "model" for fault in found):
            found += self._refusal()
        order = list(SETTINGS)
        return sorted(found, key=lambda fault: order.index(fault.setting) if fault.setting in order else -1)

    def refuse_model(self, name: str, sentence: str) -> None:
        """What somebody found out who can look into models: why this one cannot be loaded, or "". It is a problem for as
        long as the form names that model."""
        if self._refused != (name, sentence):
            self._refused = (name, sentence)
            self.problems_changed.emit()

    def _refusal(self) -> list[Fault]:
        name, sentence = self._refused
        if not sentence or str(self._values["model"]).strip() != name:
            return []
        return [Fault("model", f"{name if name.count('/') == 1 else Path(name).name} cannot be trained. {sentence}")]

    def config(self) -> Config:
        """The settings as the trainer would read them. Raises Mistake."""
        return config.parse(self._values)

    def as_yaml(self) -> str:
        """The text to save: the resolved settings; where there are problems, what stands in the form."""
        try:
            return config.dump(self.config())
        except Mistake:
            return self._raw_yaml()

    def _raw_yaml(self) -> str:
        """All that stands in the form. Written apart from the rest, epochs do not push out the iterations, which are
        wanted again once epochs are back at 0."""
        rest = {key: value for key, value in self._values.items() if key != "epochs"}
        return f"{config.dump(rest)}\n{config.dump({'epochs': self._values['epochs']})}"

    def valid_values(self) -> Values:
        """A value of the right type for every setting: the default stands in where the form's cannot be read."""
        return {key: typed_value(about, self._values[key]) for key, about in SETTINGS.items()}

    def summary(self, seconds: float | None = None, memory: str = "") -> str:
        """What the run will do, in a sentence; with the time for one completion and the memory where they are known."""
        return run_summary.summary(self.valid_values(), seconds, memory)

    def details(self) -> list[str]:
        """What else is worth knowing before pressing Run, a short phrase each."""
        return run_summary.details(self.valid_values())

    def command(self) -> list[str]:
        """The command that does in a terminal what Run does here."""
        saved = self.path if self.path is not None and not self.dirty else self.autosave
        file = places.demo_config() if self.is_demo else saved
        return backend_command("train", str(file or "config.yaml"))

    def command_text(self) -> str:
        return shown(self.command())

    def short_command(self) -> str:
        """The same with names in place of paths: enough to know it by."""
        return shown([Path(word).name for word in self.command() if word != "-P"])

    @property
    def is_demo(self) -> bool:
        """Whether it is the bundled demo, untouched."""
        demo = self._demo
        return demo is not None and all(is_equivalent(self._values[key], demo[key]) for key in SETTINGS)

    @cached_property
    def _demo(self) -> Values | None:
        try:
            return values_from(config.read(places.demo_config()))[0]
        except Mistake:
            return None

    # Rewards

    def rewards(self) -> list[RewardEntry]:
        """Every reward function that can be ticked: the built-in ones, those of the person's file, then each entry that is
        more than a name (arguments, `file.py::function`), under the entry itself."""
        known, names = self._known_rewards(), self._values["reward_functions"]
        plain = {entry.name for entry in known}
        called = [text for text in map(str, names if isinstance(names, list) else ()) if text not in plain]
        entries = (catalog.entry_of(text, known) for text in dict.fromkeys(called))
        return known + [entry for entry in entries if entry is not None]

    def _known_rewards(self) -> list[RewardEntry]:
        own = self._user_rewards()[0]
        replaced = {entry.name for entry in own}
        return [entry for entry in catalog.builtin_rewards() if entry.name not in replaced] + own

    def _user_rewards(self) -> tuple[list[RewardEntry], list[Fault]]:
        path = self._reward_file()
        if path is None:
            return [], []
        try:
            return catalog.rewards_in_file(path), []
        except Mistake as mistake:
            return [], mistake.faults

    def _reward_faults(self) -> list[Fault]:
        own, faults = self._user_rewards()
        path = self._reward_file()
        if path is not None and not own and not faults and not self._file_computes_names():
            return [Fault("reward_functions_file", _no_rewards_sentence(path))]
        names = self._values["reward_functions"]
        if faults or not isinstance(names, list) or self._file_computes_names():
            return faults  # what a broken file would have registered cannot be known
        return catalog.reward_faults([str(name) for name in names], self._known_rewards())

    def _reward_file(self) -> Path | None:
        text = str(self._values["reward_functions_file"] or "").strip()
        return catalog.locate_reward_file(text) if text else None

    def _file_computes_names(self) -> bool:
        path = self._reward_file()
        return path is not None and catalog.computes_names(path)


def _no_rewards_sentence(path: Path) -> str:
    """What to do about a reward file in which no function is registered: TRL's are named one by one."""
    plain = catalog.plain_rewards_in_file(path)
    if plain:
        how = f"name its functions among the reward functions instead, as {path}::{plain[0].name}"
    else:
        how = 'put @register_reward_function("name") above each'
    return f"{path.name} registers no reward function; {how}."


def _write(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise Mistake("config", f"{path} cannot be written: {error.strerror}.") from None
