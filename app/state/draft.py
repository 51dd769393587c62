"""The config being edited, with undo."""

from __future__ import annotations

import copy
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from PySide6.QtCore import QObject, QTimer, Signal
from PySide6.QtGui import QUndoCommand, QUndoStack

from app.state.messages import problems_to
from app.state.run_summary import changed_labels
from backend.config import config
from backend.config.config import SETTINGS, Config
from backend.config.model_and_data_names import source_faults
from backend.config.other_programs.files import FileProblems, UnreadKey, file_problems
from backend.config.other_programs.translation import DEFAULTS, Translation, read_file, summary
from backend.config.setting import Kind, Setting, has_default_rewards, step_parts
from backend.config.updates import without_program_faults
from backend.distributed.hosts_file import hosts_problems
from backend.models.architectures import quantization_problems
from backend.models.model_folder import object_or_empty
from backend.rewards import catalogue
from backend.rewards.catalogue import RewardEntry
from backend.runs.saved_weights import adapter_settings, find_adapter
from backend.utils import places
from backend.utils.command import backend_command
from backend.utils.disk import replace_file, save_as
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import exists
from backend.utils.hub_cache import local_folder

if TYPE_CHECKING:
    from app.state.presets import Preset

TYPED = frozenset(kind for part in get_args(Kind) for kind in get_args(part)) - {"bool", "choice", "rewards"}
"""Kinds of settings that are typed: typing without a pause is one undo step."""
PAUSE_S = 2.0
KEPT = 200
OF_REWARDS = ("reward_functions", "reward_weights", "reward_weight_schedule", "reward_weights_final")
"""Settings that go together with the functions that are ticked."""

Values = dict[str, Any]


def defaults() -> Values:
    return {key: copy.deepcopy(about.default) for key, about in SETTINGS.items()}


def quarter_of(settings: Mapping[str, Any]) -> int:
    """A quarter of the run's steps; 1 while the field holds no number."""
    iters = settings.get("iters")
    return max(1, iters // 4) if isinstance(iters, int) else 1


def values_from(raw: Mapping[str, Any]) -> tuple[Values, list[ConfigProblem]]:
    """(a value for every setting, problems of unknown keys in `raw`)."""
    file = read_file(raw)
    unknown = [fault for fault in config.problems(raw) if fault.setting not in SETTINGS and fault not in file.faults]
    return values_of(file), [*file.faults, *unknown]


def values_of(file: Translation) -> Values:
    values = defaults() | {key: value for key, value in file.values.items() if key in SETTINGS}
    if "reward_functions" not in file.values and not has_default_rewards(values):
        values["reward_functions"] = []
    if isinstance(values["reward_functions"], list):
        values["reward_functions"] = [catalogue.canonical_entry(str(name)) for name in values["reward_functions"]]
    for key in ("reward_weights", "reward_weights_final"):
        with suppress(UserError):  # what is no list of numbers is a problem of the form
            values[key] = config.valid_value(key, values[key])  # other programs write them as text
    return values


def typed_value(about: Setting, raw: Any) -> Any:
    if about.optional and raw in ("", None):
        return None
    if about.empty_is_default and raw in ("", [], None):
        return about.default
    try:
        if about.kind == "int":
            return int(str(raw))
        if about.kind == "float":
            return float(str(raw))
    except ValueError:
        return about.default
    kinds = (str, dict) if about.key == "environment" else type(about.default)
    return raw if isinstance(raw, kinds) or about.default is None else about.default


def is_identical(left: Any, right: Any) -> bool:
    """Equal and of one type: 1, 1.0 and True are three values."""
    return type(left) is type(right) and left == right


def is_equivalent(left: Any, right: Any) -> bool:
    """Equal in meaning: 1e-5 and 1e-05, None and ""."""
    if left == right or (left in (None, "") and right in (None, "")):
        return True
    try:
        return not isinstance(left, bool) and float(str(left)) == float(str(right))
    except ValueError:
        return False


FILE_STATE = ("_on_disk", "path", "translation", "file_problems")


class Draft(QObject):
    changed = Signal(str)  # this setting, or "" when all may have changed
    problems_changed = Signal()  # `problems` may differ, though no setting was changed
    saved = Signal()
    save_failed = Signal(str)  # why

    def __init__(self, autosave: Path | None = None, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.path: Path | None = None  # the YAML file it was opened from or saved to
        self.translation: Translation | None = None  # of that file, if it has settings of another program
        self.file_problems: FileProblems | None = None  # what of the file opened last could not be read
        self.autosave = autosave  # where the form is kept between launches
        self.history = QUndoStack(self)
        self.history.setUndoLimit(KEPT)
        self._refused = ("", "")
        self._values = defaults()
        self._set_aside: Values = {}
        self._on_disk: Mapping[str, Any] = defaults()
        self._timer = QTimer(self, singleShot=True, interval=400)
        self._timer.timeout.connect(self.flush)

    def value(self, key: str) -> Any:
        return self._values[key]

    def values(self) -> Values:
        return copy.deepcopy(self._values)

    def set(self, key: str, value: Any) -> None:
        """Beside GRPO rewards are optional: another mode sets them aside until it is chosen again."""
        if key != "train_mode" or value == self._values[key]:
            self.update({key: value})
            return
        rewards: Values = {}
        if self._values["train_mode"] == "grpo":
            self._set_aside = {key: self._values[key] for key in OF_REWARDS}
            rewards = {key: copy.deepcopy(SETTINGS[key].default) for key in OF_REWARDS} | {"reward_functions": []}
        elif value == "grpo" and not self._values["reward_functions"]:
            rewards = self._set_aside
        self.update({"train_mode": value, **rewards}, SETTINGS["train_mode"].label)

    def update(self, values: Mapping[str, Any], what: str = "") -> None:
        new = {key: value for key, value in values.items() if not is_identical(self._values[key], value)}
        if not new:
            return
        keys = list(new)
        typed = keys[0] if len(keys) == 1 and not what and SETTINGS[keys[0]].kind in TYPED else ""
        with self._step(what or changed_labels(keys), keys, typed):
            self._values = self._values | new

    @contextmanager
    def _step(self, what: str, keys: Sequence[str] = ("",), typed: str = "") -> Iterator[None]:
        """The block is a change of these settings that can be undone; `typed`: the one that was typed into."""
        before = self.state
        yield
        self.history.push(_FormStep(self, what, before, typed))
        self._emit_changed(keys)

    def _emit_changed(self, keys: Sequence[str]) -> None:
        self._timer.start()
        for key in keys:
            self.changed.emit(key)

    def hold_out(self) -> None:
        """Hold out a tenth of the rows, and evaluate on them four times where the form has no evaluation."""
        every = self.value("steps_per_eval") or quarter_of(self.values())
        self.update({"validation_split": 0.1, "steps_per_eval": every})

    def reset(self) -> None:
        self.start_from({}, "New config")

    def start_from(self, values: Mapping[str, Any], what: str) -> None:
        with self._step(what):
            self._values = defaults() | dict(values)
            self._on_disk = copy.deepcopy(self._values)
            self.path = self.translation = self.file_problems = None

    def apply(self, preset: Preset) -> None:
        change = self.start_from if preset.replaces else self.update
        change(preset.applied(self._values), preset.title)

    def use_reward_file(self, path: str) -> None:
        """Set the user's reward file and tick its functions first."""
        old = {entry.name for entry in self._user_rewards()[0]}
        own = [entry.name for entry in self._user_rewards(path)[0]]  # a broken one is set too, and becomes a problem
        listed, weights = self.reward_names, self._values["reward_weights"]
        now = own + [name for name in listed if name not in own and name not in old]
        change = {"reward_functions_file": path, "reward_functions": now}
        if isinstance(weights, list) and weights and listed:
            weighed = dict(zip(listed, weights, strict=False))
            change["reward_weights"] = [weighed.get(name, 1.0) for name in now]
        self.update(change, f"Reward file {Path(path).name}")

    def use_adapter(self, text: str) -> None:
        belonging: Values = {}
        with suppress(UserError):  # it is set all the same, and becomes a problem with its message
            belonging = adapter_settings(find_adapter(text))
        if str(self._values["model"]).strip():
            belonging.pop("model", None)  # the same weights may lie in another place here
        if belonging:
            belonging = {"lora_keys": [], "modules_to_save": []} | belonging
        self.update({"adapter": text, **belonging}, f"Adapter {Path(text).name}")

    @property
    def state(self) -> dict[str, Any]:
        """Attributes by name, for `restore_state`."""
        return {"_values": self._values} | {name: getattr(self, name) for name in FILE_STATE}

    def restore_state(self, state: Mapping[str, Any], *, with_file: bool = False) -> None:
        keys = [key for key in SETTINGS if not is_identical(self._values[key], state["_values"][key])]
        for name in ("_values", *(FILE_STATE if with_file else ())):
            setattr(self, name, state[name])
        self._emit_changed([""] if with_file else keys)

    @property
    def path_to_save(self) -> Path | None:
        """Its file, unless that is another program's, which could not read ours."""
        with suppress(UserError):  # it is gone or broken
            return None if self.path is not None and read_file(config.read(self.path)).program else self.path
        return self.path

    @property
    def dirty(self) -> bool:
        """It differs from its file, or from the values it started with."""
        return not all(is_equivalent(self._values[key], self._on_disk[key]) for key in SETTINGS)

    def load(self, path: Path, *, as_preset: bool = False, over: Mapping[str, Any] | None = None) -> None:
        """Load a YAML file, with the values `over` its own. What cannot be read goes to `file_problems`.

        `as_preset`: Save does not write over this file. Raises UserError, and changes nothing, if it holds no settings.
        """
        path = Path(path)
        raw = config.read(path)
        values, faults = values_from(raw)
        found = faults or config.problems(raw)
        translation = read_file(raw)
        with self._step(f"Open {path.name}"):
            self._values = values | dict(over or {})
            self._on_disk, self.path = copy.deepcopy(self._values), None if as_preset else path
            self.translation = translation if translation.words else None
            self.file_problems = file_problems(path, raw, faults) if found else None

    def correct_key(self, unread: UnreadKey) -> None:
        """Read a misspelt key of the file as the one that was meant."""
        found = self.file_problems
        assert found is not None
        old = values_from(found.raw)[0]
        raw = {unread.meant if key == unread.key else key: value for key, value in found.raw.items()}
        new, faults = values_from(raw)
        with self._step(unread.meant):
            self.file_problems = file_problems(found.path, raw, faults)
            changed = {key: value for key, value in new.items() if not is_identical(old[key], value)}
            self._values = self._values | changed

    def show_refusal(self, path: Path, sentence: str) -> None:
        self.file_problems = FileProblems(path, refusal=sentence)
        self.problems_changed.emit()

    def close_file_problems(self) -> None:
        self.file_problems = None
        self.problems_changed.emit()

    def use_defaults(self, whose: Literal["ours", "theirs"]) -> None:
        """Give the settings that another program's file leaves out, and the user did not change, these defaults."""
        if self.translation is None:
            return
        present = values_of(self.translation)
        with self._step("Defaults"):
            self.translation = read_file(self.translation.file, {DEFAULTS: whose})
            new = values_of(self.translation)
            self._values = {
                key: new[key] if is_equivalent(value, present[key]) else value for key, value in self._values.items()
            }

    def save(self, path: Path) -> None:
        """Raises DiskError."""
        save_as(path, self.as_yaml())
        self.path, self.translation = path, None  # it is a file of ours now
        self._on_disk = self.values()
        self.close_file_problems()
        self.saved.emit()

    def restore(self, path: Path | None) -> None:
        """Restore the autosaved form and its file, if that can still be read."""
        assert self.autosave is not None
        values, _ = values_from(config.read(self.autosave))
        self._values, self._on_disk, self.path = values, copy.deepcopy(values), None
        if path is not None and exists(path):
            try:
                self._on_disk, _ = values_from(config.read(path))
                self.path = path
            except UserError:  # the file was broken meanwhile: the form is kept as unsaved
                self._on_disk = defaults()
        self._emit_changed([""])
        self.history.clear()

    def flush(self) -> None:
        self._timer.stop()
        if self.autosave is None:
            return
        if self.is_demo:
            self.autosave.unlink(missing_ok=True)
            return
        with problems_to(self.save_failed.emit):
            replace_file(self.autosave, self._raw_yaml())

    def problems(self) -> list[ConfigProblem]:
        """All problems that need no trainer to find, in the form's order."""
        sound = self.sound_config()
        folder = local_folder(sound.model.strip())
        found = [
            *config.problems(self._values),
            *(self._reward_problems() if "scoring" in step_parts(self._values) else ()),
            *source_faults(sound),
            *(quantization_problems(sound, object_or_empty(folder / "config.json")) if folder else ()),
            *hosts_problems(sound.hosts),
            *without_program_faults(sound),
        ]
        name, refusal = self._refused
        is_named = str(self._values["model"]).strip() == name
        if refusal and is_named and not any(problem.setting == "model" for problem in found):
            short = name if name.count("/") == 1 else Path(name).name
            found.append(ConfigProblem("model", f"{short} cannot be trained. {refusal}"))
        order = list(SETTINGS)
        return sorted(found, key=lambda problem: order.index(problem.setting) if problem.setting in order else -1)

    def refuse_model(self, name: str, sentence: str) -> None:
        """Set why this model cannot be trained, or ""."""
        if self._refused != (name, sentence):
            self._refused = (name, sentence)
            self.problems_changed.emit()

    def _reward_problems(self) -> list[ConfigProblem]:
        if problems := self._user_rewards()[1]:
            return problems  # the names that a broken file would register are unknown
        path = self._reward_file()
        if path is not None and catalogue.computes_names(path):
            return []
        return catalogue.reward_faults(self.reward_names, self._known_rewards())

    def config(self) -> Config:
        return config.parse(self._values)

    def as_yaml(self) -> str:
        """The resolved settings, or the raw values if there are problems."""
        name = self.path.name if self.path is not None else "a file"
        try:
            return config.dump(self.config(), summary(self.translation, name) if self.translation is not None else "")
        except UserError:
            return self._raw_yaml()

    def _raw_yaml(self) -> str:
        # `dump` drops iters beside epochs, but the form needs iters again once epochs are back at 0.
        rest = {key: value for key, value in self._values.items() if key != "epochs"}
        return f"{config.dump(rest)}\n{config.dump({'epochs': self._values['epochs']})}"

    def valid_values(self) -> Values:
        """A value of the right type for every setting, the default if it cannot be converted."""
        values = {key: typed_value(setting, self._values[key]) for key, setting in SETTINGS.items()}
        if not self._values["reward_functions"] and not has_default_rewards(values):
            values["reward_functions"] = []
        return values

    def sound_config(self) -> Config:
        """`valid_values` as a Config, not validated."""
        return Config.model_construct(**self.valid_values())

    def command(self) -> list[str]:
        saved = self.path if self.path is not None and not self.dirty else self.autosave
        return backend_command("train", str(places.demo_config() if self.is_demo else saved or "config.yaml"))

    def command_text(self) -> str:
        return shlex.join(self.command())

    def short_command(self) -> str:
        return shlex.join([Path(word).name for word in self.command() if word != "-P"])

    @property
    def is_demo(self) -> bool:
        return all(is_equivalent(self._values[key], self._demo[key]) for key in SETTINGS)

    @cached_property
    def _demo(self) -> Values:
        return values_from(config.read(places.demo_config()))[0]

    @property
    def reward_names(self) -> list[str]:
        names = self._values["reward_functions"]
        return [str(name) for name in names] if isinstance(names, list) else []

    def rewards(self) -> list[RewardEntry]:
        known = self._known_rewards()
        plain = {entry.name for entry in known}
        entries = (catalogue.find_entry(name, known) for name in dict.fromkeys(self.reward_names) if name not in plain)
        return known + [entry for entry in entries if entry is not None]

    def _known_rewards(self) -> list[RewardEntry]:
        own = self._user_rewards()[0]
        replaced = {entry.name for entry in own}
        return own + [entry for entry in catalogue.builtin_rewards() if entry.name not in replaced]

    def _user_rewards(self, file: str = "") -> tuple[list[RewardEntry], list[ConfigProblem]]:
        try:
            path = catalogue.locate_reward_file(file) if file else self._reward_file()
            return (catalogue.rewards_in_file(path) if path is not None else []), []
        except UserError as error:
            return [], error.faults

    def _reward_file(self) -> Path | None:
        text = str(self._values["reward_functions_file"] or "").strip()
        return catalogue.locate_reward_file(text) if text else None


class _FormStep(QUndoCommand):
    """A change of the form. Qt calls `redo` on push, when the draft has already changed."""

    def __init__(self, draft: Draft, what: str, before: dict[str, Any], typed: str) -> None:
        super().__init__(what)
        self._draft, self._before, self._after, self._typed = draft, before, draft.state, typed
        self._at, self._is_done = time.monotonic(), True

    def id(self) -> int:
        return 1  # Qt offers commands of the same id to mergeWith

    def redo(self) -> None:
        if not self._is_done:
            self._restore(self._after)
        self._is_done = True

    def undo(self) -> None:
        self._is_done = False
        self._restore(self._before)

    def _restore(self, state: dict[str, Any]) -> None:
        replaces_file = any(self._before[name] != self._after[name] for name in FILE_STATE)
        self._draft.restore_state(state, with_file=replaces_file)

    def mergeWith(self, other: QUndoCommand) -> bool:
        assert isinstance(other, _FormStep)
        if not self._typed or self._typed != other._typed or other._at - self._at >= PAUSE_S:
            return False
        self._after, self._at = other._after, other._at
        self.setObsolete(self._before == self._after)
        return True
