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

from app import wording
from backend.spec import catalog, config, places
from backend.spec.catalog import RewardEntry
from backend.spec.command import backend_command, shown
from backend.spec.config import SETTINGS, Config
from backend.spec.faults import Fault, Mistake
from backend.spec.setting import Setting
from backend.spec.spelling import translate

Values = dict[str, Any]

AUTOSAVE_MS = 400
"""How long typing must rest before the form is written to disk."""


class Draft(QObject):
    """Raw settings by key; every key of SETTINGS is always there.

    Attributes: path – the YAML file it was opened from or saved to, or None.
    Signals: changed(key, or "" when all may have changed); saved; trouble(a sentence, when autosaving fails).
    """

    changed = Signal(str)
    saved = Signal()
    trouble = Signal(str)

    def __init__(self, autosave: Path | None = None, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.path: Path | None = None
        self.autosave = autosave
        self._values = defaults()
        self._on_disk = defaults()
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

    def update(self, values: Mapping[str, Any]) -> None:
        """Take several at once: whoever hears of the first change sees all of them."""
        fresh = {key: value for key, value in values.items() if not _same(self._values[key], value)}
        self._values |= fresh
        for key in fresh:
            self._timer.start()
            self.changed.emit(key)

    def reset(self) -> None:
        """Every setting back to its default, with no file behind it."""
        self._replace(defaults(), None)

    @property
    def dirty(self) -> bool:
        """Whether it differs from the file it came from (or, without one, from what it began with)."""
        return not all(_alike(self._values[key], self._on_disk[key]) for key in SETTINGS)

    # Files

    def load(self, path: Path, *, as_preset: bool = False) -> None:
        """Take over a YAML file. Raises Mistake, and stays as it is, where the file has what the form has no place for;
        a value that is merely wrong is taken over and shown with its problem. A preset is not saved over."""
        values, faults = values_from(config.read(path))
        if faults:
            raise Mistake(faults)
        self._replace(values, None if as_preset else Path(path))

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
        self._replace(values, None)
        if path is not None and path.exists():
            try:
                self._on_disk, _ = values_from(config.read(path))
                self.path = path
            except Mistake:  # the file was spoilt meanwhile: the form stands without it, as unsaved
                self._on_disk = defaults()
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
            self.trouble.emit(mistake.faults[0].sentence)

    def _replace(self, values: Values, path: Path | None) -> None:
        self._values, self._on_disk, self.path = values, copy.deepcopy(values), path
        self._timer.start()
        self.changed.emit("")

    # What it amounts to

    def problems(self) -> list[Fault]:
        """Everything wrong with it that can be known without the trainer, in the form's order."""
        found = [*config.problems(self._values), *self._reward_faults(), *self._path_faults()]
        order = list(SETTINGS)
        return sorted(found, key=lambda fault: order.index(fault.setting) if fault.setting in order else -1)

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

    def sound(self) -> Values:
        """A value of the right type for every setting: the default stands in where the form's cannot be read."""
        return {key: reading(about, self._values[key]) for key, about in SETTINGS.items()}

    def summary(self) -> str:
        """What the run will do, in a sentence."""
        return wording.summary(self.sound())

    def details(self) -> list[str]:
        """What else is worth knowing before pressing Run, a short phrase each."""
        return wording.details(self.sound())

    def command(self) -> list[str]:
        """The command that does in a terminal what Run does here."""
        saved = self.path if self.path is not None and not self.dirty else self.autosave
        file = places.demo_config() if self.is_demo else saved
        return backend_command("train", str(file or "config.yaml"))

    def shown_command(self) -> str:
        return shown(self.command())

    def short_command(self) -> str:
        """The same with names in place of paths: enough to know it by."""
        return shown([Path(word).name for word in self.command() if word != "-P"])

    @property
    def is_demo(self) -> bool:
        """Whether it is the bundled demo, untouched."""
        demo = self._demo
        return demo is not None and all(_alike(self._values[key], demo[key]) for key in SETTINGS)

    @cached_property
    def _demo(self) -> Values | None:
        try:
            return values_from(config.read(places.demo_config()))[0]
        except Mistake:
            return None

    # Rewards

    def rewards(self) -> list[RewardEntry]:
        """Every reward function that can be ticked: the built-in ones, then those of the person's file."""
        own = self._own_rewards()[0]
        replaced = {entry.name for entry in own}
        return [entry for entry in catalog.builtin_rewards() if entry.name not in replaced] + own

    def _own_rewards(self) -> tuple[list[RewardEntry], list[Fault]]:
        text = str(self._values["reward_functions_file"] or "").strip()
        if not text:
            return [], []
        try:
            return catalog.rewards_in_file(catalog.locate_reward_file(text)), []
        except Mistake as mistake:
            return [], mistake.faults

    def _reward_faults(self) -> list[Fault]:
        faults = self._own_rewards()[1]
        names = self._values["reward_functions"]
        if faults or not isinstance(names, list) or self._file_computes_names():
            return faults  # what a broken file would have registered cannot be known
        return catalog.reward_faults([str(name) for name in names], self.rewards())

    def _file_computes_names(self) -> bool:
        text = str(self._values["reward_functions_file"] or "").strip()
        return bool(text) and catalog.computes_names(catalog.locate_reward_file(text))

    def _path_faults(self) -> list[Fault]:
        found = [(key, _path_sentence(about, self._values[key])) for key, about in SETTINGS.items()]
        return [Fault(key, sentence) for key, sentence in found if sentence]


def defaults() -> Values:
    return {key: copy.deepcopy(about.default) for key, about in SETTINGS.items()}


def values_from(raw: Mapping[str, Any]) -> tuple[Values, list[Fault]]:
    """(a value for every setting, what of `raw` has no place in the form). Other programs' spellings are understood."""
    given, misread = translate(raw)
    homeless = [fault for fault in config.problems(raw) if fault.setting not in SETTINGS and fault not in misread]
    values = defaults() | {key: value for key, value in given.items() if key in SETTINGS}
    if isinstance(values["reward_functions"], list):
        values["reward_functions"] = [catalog.canonical(str(name)) for name in values["reward_functions"]]
    return values, [*misread, *homeless]


def reading(about: Setting, raw: Any) -> Any:
    """`raw` as the type of its setting; the default where it cannot be read so."""
    if about.optional and raw in ("", None):
        return None
    try:
        if about.kind == "int":
            return int(str(raw))
        if about.kind == "float":
            return float(str(raw))
    except ValueError:
        return about.default
    fits = isinstance(raw, type(about.default)) or about.default is None
    return raw if fits else about.default


def _path_sentence(about: Setting, raw: Any) -> str:
    """Why a model or dataset that is plainly meant as a path cannot be one; ids on Hugging Face are not looked up."""
    text = str(raw or "").strip()
    if about.kind not in ("model", "dataset") or not text.startswith(("/", "~", "./", "../")):
        return ""
    path = Path(text).expanduser()
    if not path.exists():
        return f"There is no file or folder {text}."
    if about.kind == "model" and not (path / "config.json").is_file():
        return f"{text} holds no config.json, so it is not a model."
    return ""


def _same(one: Any, other: Any) -> bool:
    """Equal and of one type: 1, 1.0 and True are three values in a form."""
    return type(one) is type(other) and one == other


def _alike(one: Any, other: Any) -> bool:
    """Equal to a reader: 1e-5 typed and 1e-05 read are one number, None and "" are both empty."""
    if one == other or (one in (None, "") and other in (None, "")):
        return True
    try:
        return not isinstance(one, bool) and float(str(one)) == float(str(other))
    except ValueError:
        return False


def _write(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise Mistake("config", f"{path} cannot be written: {error.strerror}.") from None
