"""The settings of a run as they are now: those of its config.yaml with every change that its trainer took."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from app.model.runs.run_files import modified_ns
from backend.spec.config import Config, parse
from backend.spec.faults import Mistake
from backend.spec.run_folder import RunFolder
from backend.spec.runs.steering import Change, changed, config_at, read_changes, request_change

STEERED_STATES = ("running", "paused")


class PresentSettings:
    """Reads changes.json again when it has changed, and asks a trainer for more changes. `raw` returns what config.yaml says."""

    def __init__(self, folder: RunFolder, raw: Callable[[], Mapping[str, Any]]) -> None:
        self._folder, self._raw = folder, raw
        self._read: tuple[int, list[Change]] = (-1, [])

    def changes(self) -> list[Change]:
        """Every change, in the order of their steps; the last may be of a step to come. Raises Mistake for a damaged file."""
        written = modified_ns(self._folder.changes)
        if written != self._read[0]:
            self._read = (written, read_changes(self._folder))
        return list(self._read[1])

    def at_last(self) -> Config:
        """The settings once every change holds. Raises Mistake where config.yaml or changes.json has faults."""
        return config_at(parse(self._raw()), self.changes())

    def ask(self, settings: Mapping[str, Any], state: str, done: int) -> None:
        """Ask the trainer of a run in this state for a change. `done`: steps that are done at least. Raises Mistake for settings that
        cannot be, and for a run that does not train."""
        if state not in STEERED_STATES:
            raise Mistake("run", "Settings change while a run is training or paused.")
        changed(self.at_last(), settings, done)
        request_change(self._folder, settings)
