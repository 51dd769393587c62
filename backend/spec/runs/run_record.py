"""Everything that a list of runs shows of one: its summary, settings, newest metrics, notes, parent, disk use and reward curve.

Reading a record takes a few milliseconds; `stamp` tells in a fraction of one whether a record that was read before still holds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from backend.spec.config import SETTINGS
from backend.spec.faults import Mistake
from backend.spec.other_programs.translation import translate
from backend.spec.run_folder import RunFolder
from backend.spec.runs import archive
from backend.spec.runs.archive import Summary, raw_settings
from backend.spec.runs.disk_use import disk_use
from backend.spec.runs.lineage import read_parent
from backend.spec.runs.reward_curve import newest_evaluation, reward_curve
from backend.spec.runs.run_notes import RunNotes, read_notes

_NO_VALUES: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run. `settings` are those that differ from the defaults; `held_out` the metrics of the newest evaluation; `parent` the name
    of the run that it was cloned from, "" for none; `disk` its parts and their bytes; `curve` its reward in a few points."""

    summary: Summary
    settings: Mapping[str, Any] = field(default_factory=lambda: _NO_VALUES)
    held_out: Mapping[str, Any] = field(default_factory=lambda: _NO_VALUES)
    notes: RunNotes = field(default_factory=RunNotes)
    notes_problem: str = ""
    """Why about.json cannot be read, in a sentence; "" where it can."""
    parent: str = ""
    disk: Mapping[str, int] = field(default_factory=lambda: _NO_VALUES)
    curve: tuple[float, ...] = ()

    @property
    def title(self) -> str:
        return self.notes.title or self.summary.name

    @property
    def bytes(self) -> int:
        return sum(self.disk.values())

    def setting(self, key: str) -> Any:
        """A setting's value, the default where the run does not set it. Raises KeyError for what is no setting."""
        return self.settings[key] if key in self.settings else SETTINGS[key].default

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: the summary's fields and the notes' beside one another."""
        other = {name: getattr(self, name) for name in ("settings", "held_out", "notes_problem", "parent", "disk", "curve")}  # fmt: skip
        return {**self.summary.to_dict(), **asdict(self.notes), **other, "bytes": self.bytes}


def read_record(run: RunFolder) -> RunRecord:
    """Read a run. Nothing raises: what is missing or broken is empty, and broken notes are told in `notes_problem`."""
    notes, problem = RunNotes(), ""
    try:
        notes = read_notes(run)
    except Mistake as mistake:
        problem = mistake.faults[0].sentence
    evaluation = newest_evaluation(run.events) or {}
    held_out = evaluation.get("metrics")
    return RunRecord(
        summary=archive.summary(run),
        settings=changed_settings(raw_settings(run)),
        held_out=cast("dict[str, Any]", held_out) if isinstance(held_out, dict) else {},
        notes=notes,
        notes_problem=problem,
        parent=_parent(run),
        disk=disk_use(run),
        curve=reward_curve(run.events),
    )


def record_of(values: Mapping[str, Any]) -> RunRecord:
    """The record that `asdict` made these values of. Raises TypeError or KeyError for values of another version."""
    parts: dict[str, Any] = dict(values)
    notes: dict[str, Any] = dict(values["notes"])
    notes["tags"] = tuple(notes["tags"])
    parts["summary"] = Summary(**values["summary"])
    parts["notes"] = RunNotes(**notes)
    parts["curve"] = tuple(values["curve"])
    return RunRecord(**parts)


def changed_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a config under our names, without those that have their default. Nothing is validated."""
    values = {key: as_number(key, value) for key, value in translate(raw)[0].items() if key in SETTINGS}
    return {key: value for key, value in values.items() if value is not None and value != SETTINGS[key].default}


def as_number(key: str, value: Any) -> Any:
    """A number that YAML reads as text, such as 1e-5, as a number."""
    if isinstance(value, str) and SETTINGS[key].kind in ("int", "float"):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def stamp(run: RunFolder) -> list[int]:
    """Numbers that change whenever a file that a record is read from does."""
    watched = (
        run.config,
        run.events,
        run.about,
        run.parent,
        run.changes,
        run.completions,
        run.checkpoints,
        run.evaluations,
        run.path,
    )
    return [number for path in watched for number in _size_and_time(path)]


def _size_and_time(path: os.PathLike[str]) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _parent(run: RunFolder) -> str:
    try:
        parent = read_parent(run)
    except Mistake:
        return ""
    return parent.run if parent is not None else ""
