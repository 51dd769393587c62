"""The app's own settings, typed: window geometry, theme, recent files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar, cast

from PySide6.QtCore import QByteArray, QObject, QSettings

from backend.utils import file_lock, places
from backend.utils.files import make_private_folder

RECENT = 10
MAX_WINDOWS = 100
FOLDERS = {"runs": places.RUNS_VARIABLE, "models": "HF_HUB_CACHE"}  # a folder to choose → the variable that moves it

T = TypeVar("T")


class Pref(Generic[T]):
    """An attribute of Prefs, stored under its name. Reads name the type: INI files return False as "false"."""

    def __init__(self, default: T) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._key = name

    def __get__(self, prefs: Prefs, owner: type | None = None) -> T:
        return cast("T", prefs.settings.value(self._key, self._default, type=type(self._default)))

    def __set__(self, prefs: Prefs, value: T) -> None:
        prefs.settings.setValue(self._key, value)


class Prefs(QObject):
    """Typed access to QSettings. `folder` holds everything; `slot` is the number of this window's form, from 1."""

    theme = Pref[str]("system")  # or light, dark
    sidebar_collapsed = Pref[bool](False)
    train_density = Pref[str]("essentials")  # or all
    run_details_shown = Pref[bool](True)
    chart_marks = Pref[bool](True)
    notifies = Pref[bool](True)
    shows_progress = Pref[bool](True)
    when_closing = Pref[str]("ask")  # or keep, stop
    endpoint_port = Pref[int](8080)
    geometry = Pref(QByteArray())
    folded_charts = Pref[str]("Other")  # sections, one a line

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.folder = folder or places.preferences_folder()
        make_private_folder(self.folder)
        self.slot = 1
        self.lock: int | None = None  # of the form; held until the process ends
        self._rewards: list[str] = []
        self.settings = QSettings(str(self.folder / "prefs.ini"), QSettings.Format.IniFormat)

    def claim(self) -> int:
        """Lock the first form that no other window has; returns its number."""
        for number in range(1, MAX_WINDOWS + 1):
            self.lock = file_lock.try_hold(self.folder / f"draft-{number}.lock")
            if self.lock is not None:
                self.slot = number
                break
        return self.slot

    @property
    def draft_file(self) -> Path:
        return self.folder / ("draft.yaml" if self.slot == 1 else f"draft-{self.slot}.yaml")

    @property
    def config_file(self) -> Path | None:
        return self._path(self._config_key)

    @config_file.setter
    def config_file(self, path: Path | None) -> None:
        self.settings.setValue(self._config_key, str(path or ""))

    @property
    def _config_key(self) -> str:
        return "config_file" if self.slot == 1 else f"config_file_{self.slot}"

    def folder_of(self, kind: str) -> Path | None:
        return self._path(f"folder_{kind}")

    def remember_folder(self, kind: str, folder: Path) -> None:
        self.settings.setValue(f"folder_{kind}", str(folder))

    def folder_for(self, kind: str) -> str:
        """The chosen one of FOLDERS, or ""."""
        return self._text(f"{kind}_are_in")

    def set_folder_for(self, kind: str, folder: Path) -> None:
        self.settings.setValue(f"{kind}_are_in", str(folder))

    def use_folders(self) -> None:
        """Move what the user has chosen a folder for, in this process and those that it starts."""
        for kind, variable in FOLDERS.items():
            if folder := self.folder_for(kind):
                os.environ.setdefault(variable, folder)

    def remember(self, config: Path) -> None:
        self.remember_used("config", str(config))
        self.remember_folder("config", config.parent)

    def used(self, kind: str) -> list[str]:
        """The newest first: configs, or what settings of this kind were set to."""
        return self._list(f"used_{kind}")

    def remember_used(self, kind: str, name: str) -> None:
        others = [other for other in self.used(kind) if other != name]
        self.settings.setValue(f"used_{kind}", "\n".join([name, *others][:RECENT]))

    def members(self, key: str) -> set[str]:
        return set(self._list(key))

    def set_member(self, key: str, text: str, is_in: bool) -> None:
        members = self.members(key) - {text}
        self.settings.setValue(key, "\n".join(sorted(members | {text} if is_in else members)))

    def reward_number(self, name: str) -> int:
        """The place of a reward function's name among all that any window has shown, which gives it its colour."""
        if name not in self._rewards:
            self.settings.sync()
            self._rewards = self._list("rewards")
            if name not in self._rewards:
                self._rewards.append(name)
                self.settings.setValue("rewards", "\n".join(self._rewards))
                self.settings.sync()
        return self._rewards.index(name)

    @property
    def run_columns(self) -> list[tuple[str, int]]:
        """Columns of the table of runs, as (key, width in pixels)."""
        try:
            return [(str(key), int(width)) for key, width in json.loads(self._text("run_columns") or "[]")]
        except (TypeError, ValueError):
            return []

    @run_columns.setter
    def run_columns(self, columns: Sequence[tuple[str, int]]) -> None:
        self.settings.setValue("run_columns", json.dumps(columns))

    def _text(self, key: str) -> str:
        return str(self.settings.value(key, "", type=str))

    def _path(self, key: str) -> Path | None:
        return Path(text) if (text := self._text(key)) else None

    def _list(self, key: str) -> list[str]:
        return [text for text in self._text(key).split("\n") if text]
