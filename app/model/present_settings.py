"""The settings of a run as they are now: those of its config.yaml with every change that its trainer took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.model.run_files import modified_ns
from backend.spec.config import Config, parse
from backend.spec.places import RunFolder
from backend.spec.steering import Change, changed, config_at, read_changes, request_change


class PresentSettings:
    """Reads changes.json again when it has changed, and asks a trainer for more changes."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._read: tuple[int, list[Change]] = (-1, [])

    def changes(self) -> list[Change]:
        """Every change, in the order of their steps; the last may be of a step to come. Raises Mistake for a damaged file."""
        written = modified_ns(self._folder.changes)
        if written != self._read[0]:
            self._read = (written, read_changes(self._folder))
        return list(self._read[1])

    def at_last(self, raw: Mapping[str, Any]) -> Config:
        """The settings once every change holds; `raw` is what config.yaml says. Raises Mistake where it has faults."""
        changes = self.changes()
        return config_at(parse(raw), changes, changes[-1].step if changes else 0)

    def ask(self, raw: Mapping[str, Any], settings: Mapping[str, Any], done: int) -> None:
        """Ask the trainer for a change. `done`: steps that are done at least. Raises Mistake for settings that cannot be."""
        changed(self.at_last(raw), settings, done)
        request_change(self._folder, settings)
