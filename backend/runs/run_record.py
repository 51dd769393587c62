"""Everything that a list of runs shows of one: its summary, settings, newest metrics, notes, parent, disk use and reward curve.

Reading a record takes a few milliseconds; `stamp` tells in a fraction of one whether a record that was read before still holds.
"""

from __future__ import annotations

import csv
import io
import json
import math
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast

from backend.config.config import SETTINGS
from backend.config.other_programs.translation import translate
from backend.runs import archive
from backend.runs.archive import Summary, first_and_last_means, raw_settings
from backend.runs.disk_use import disk_use
from backend.runs.events import LONGEST_LINE, Event, parse_line
from backend.runs.run_folder import RunFolder
from backend.runs.steering import read_changes
from backend.utils.documents import read_json, whole_number
from backend.utils.errors import UserError
from backend.utils.files import open_regular, user_path
from backend.utils.places import path_text
from backend.utils.text import about_path, quote, visible
from backend.utils.whole_file import replace_file

# What the user has noted about a run: title, note, tags, favourite, archived. Kept in the run folder's about.json.


@dataclass(frozen=True, slots=True)
class RunNotes:
    """`archived` hides a run from the list, and moves nothing."""

    title: str = ""
    note: str = ""
    tags: tuple[str, ...] = ()
    favourite: bool = False
    archived: bool = False


def read_notes(run: RunFolder) -> RunNotes:
    """The notes of a run; empty ones where there are none. Raises UserError for a file that holds something else."""
    return _notes(_content(run), run)


def change_notes(run: RunFolder, **changes: Any) -> RunNotes:
    """Change some fields and keep the others, those of a later version included; returns the notes as saved.

    The file is read again first, so two windows that change different fields lose nothing, and replaced by a rename.
    Raises UserError for a file that cannot be read, which then stays as it is, or cannot be written.
    """
    content = _content(run)
    notes = replace(_notes(content, run), **changes)
    text = json.dumps({**content, **asdict(notes)}, ensure_ascii=False, indent=1) + "\n"
    replace_file(run.about, text)
    return notes


def tags_in(text: str) -> tuple[str, ...]:
    """The tags in a line that a user typed: words between commas or spaces, each once, in the order typed."""
    return tuple(dict.fromkeys(word for word in re.split(r"[\s,]+", text) if word))


def _content(run: RunFolder) -> dict[str, Any]:
    if not os.path.lexists(run.about):
        return {}
    content = read_json(run.about, "about", advice="mend or delete it")
    if not isinstance(content, dict):
        raise UserError("about", about_path(run.about, " does not hold the notes of a run; mend or delete it."))
    return cast("dict[str, Any]", content)


def _notes(content: dict[str, Any], run: RunFolder) -> RunNotes:
    known: dict[str, Any] = {field.name: content[field.name] for field in fields(RunNotes) if field.name in content}
    if "tags" in known and _is_list_of_text(known["tags"]):
        known["tags"] = tuple(known["tags"])
    wrong = [name for name, value in known.items() if type(value) is not type(getattr(RunNotes(), name))]
    if wrong:
        raise UserError("about", about_path(run.about, f" has a value for {wrong[0]} that is none; mend or delete it."))
    return RunNotes(**{name: _visible(value) for name, value in known.items()})


def _visible(value: Any) -> Any:
    """A value with what cannot be seen in it escaped: a title must not turn the letters of the row that it stands in."""
    if isinstance(value, tuple):
        return tuple(visible(tag) for tag in cast("tuple[str, ...]", value))
    return visible(value) if isinstance(value, str) else value


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in cast("Iterable[Any]", value))


# ── reward curve ─────────────────────────────────────────────────────────────────────────────────────────────────────

# A run's reward as a few points, for a sparkline: read from places spread evenly over the event log, however long it is.

POINTS = 40
WINDOW = 8 << 10
"""Bytes read for one point of a long event log: a few steps, whose mean is the point."""
EVALUATION = b'"kind": "eval"'
REACH = 16 << 20
"""How far from the end of the event log an evaluation is looked for: ten thousand steps."""


def reward_curve(event_log: Path, points: int = POINTS) -> tuple[float, ...]:
    """At most `points` rewards in the order of the steps; empty before the first step.

    Of a short event log every step is read. Of a long one each point is the mean over the steps in a window of WINDOW bytes.
    """
    try:
        with open_regular(event_log) as file:
            size = file.seek(0, 2)
            if size <= points * WINDOW:
                file.seek(0)
                return _thinned([value for line in file if (value := _reward(line)) is not None], points)
            means = (_mean_reward(file, size * index // points) for index in range(points))
            return tuple(mean for mean in means if mean is not None)
    except OSError:
        return ()


def newest_evaluation(event_log: Path) -> Event | None:
    """The last evaluation on held-out prompts in the last REACH bytes of an event log; that of the test split is none."""
    try:
        with open_regular(event_log) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            end, floor = len(text), max(0, len(text) - REACH)
            while (found := text.rfind(EVALUATION, floor, end)) >= 0:
                start = text.rfind(b"\n", 0, found) + 1
                stop = text.find(b"\n", found)
                event = parse_line(text[start:stop]) if stop >= 0 else None
                if event is not None and event.get("kind") == "eval" and event.get("split") != "test":
                    return event
                end = start
    except (OSError, ValueError):  # an empty file cannot be mapped
        return None
    return None


def _mean_reward(file: BinaryIO, offset: int) -> float | None:
    file.seek(offset)
    chunk = file.read(WINDOW)
    lines = chunk.split(b"\n")[0 if offset == 0 else 1 : -1]  # the first and the last line of a window are cut
    rewards = [value for line in lines if (value := _reward(line)) is not None]
    return sum(rewards) / len(rewards) if rewards else None


def _reward(line: bytes) -> float | None:
    if b'"step"' not in line:
        return None
    event = parse_line(line)
    metrics = event.get("metrics") if event is not None and event.get("kind") == "step" else None
    reward = cast("dict[str, Any]", metrics).get("reward") if isinstance(metrics, dict) else None
    if not isinstance(reward, int | float) or isinstance(reward, bool) or not math.isfinite(reward):
        return None
    return float(reward)


def _thinned(values: list[float], points: int) -> tuple[float, ...]:
    """Means of `points` runs of neighbours of about equal length."""
    if len(values) <= points:
        return tuple(values)
    edges = [len(values) * index // points for index in range(points + 1)]
    return tuple(sum(values[start:stop]) / (stop - start) for start, stop in pairwise(edges))


# ── lineage ──────────────────────────────────────────────────────────────────────────────────────────────────────────

# Where a cloned run comes from: parent.json in its folder, and by it the children of any run.


@dataclass(frozen=True, slots=True)
class Parent:
    """The run that a clone began from. `path`: its folder at that time. `warm`: the clone goes on from `step`; else it took the weights
    alone, and counts from 0. `changed`: key → (the parent's value at that step, the clone's)."""

    run: str
    path: Path
    step: int
    warm: bool
    changed: dict[str, tuple[Any, Any]]

    def to_dict(self) -> dict[str, Any]:
        changed = {key: list(pair) for key, pair in self.changed.items()}
        return {"run": self.run, "path": str(self.path), "step": self.step, "warm": self.warm, "changed": changed}

    def folder_beside(self, clone: RunFolder) -> RunFolder | None:
        """The parent's folder where it was, else beside the clone's, as after both were moved; None if it is gone."""
        places = (self.path, clone.path.parent / self.run)
        return next((RunFolder(path) for path in places if os.path.isfile(path / "config.yaml")), None)


def read_parent(run: RunFolder) -> Parent | None:
    """The parent of a clone; None for a run that is none. Raises UserError for a file that cannot be read."""
    if not os.path.lexists(run.parent):
        return None
    try:
        kept = read_json(run.parent, "run")
        changed = {str(key): (old, new) for key, (old, new) in kept["changed"].items()}
        path = user_path(str(kept["path"]), "run")
        name = str(user_path(str(kept["run"]), "run"))
        return Parent(name, path, whole_number(kept["step"], "step"), bool(kept["warm"]), changed)
    except (ValueError, TypeError, KeyError, AttributeError, UserError):
        sentence = about_path(
            run.parent, f" does not tell the parent of the run {quote(run.name, 40)}; mend or delete it."
        )
        raise UserError("run", sentence) from None


def write_parent(run: RunFolder, parent: Parent) -> None:
    """Raises DiskError."""
    replace_file(run.parent, json.dumps(parent.to_dict(), ensure_ascii=False, indent=1) + "\n")


def children(run: RunFolder, runs: Iterable[RunFolder]) -> list[RunFolder]:
    """Those of `runs` that were cloned from this one, in their order."""
    return [each for each in runs if _is_child(each, run)]


def _is_child(candidate: RunFolder, run: RunFolder) -> bool:
    parent = _parent_or_none(candidate)
    folder = parent.folder_beside(candidate) if parent else None
    return folder is not None and folder.path == run.path


def _parent_or_none(run: RunFolder) -> Parent | None:
    try:
        return read_parent(run)
    except UserError:
        return None


# ── run record ───────────────────────────────────────────────────────────────────────────────────────────────────────

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
    except UserError as mistake:
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
    except UserError:
        return ""
    return parent.run if parent is not None else ""


MISSING = "–"
_OWN = ("run_name",)
"""Settings that differ between any two runs and explain nothing."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run has reached; None where it has no such number.

    `reward_first` and `reward_last` are means over the first and the last few steps (`archive.averaging_window`). `held_out_best` is the
    highest reward of an evaluation on held-out prompts, at step `best_step`: the first of equal ones.
    """

    name: str
    title: str
    state: str
    steps: int
    reward_first: float | None
    reward_last: float | None
    held_out_first: float | None
    held_out_last: float | None
    held_out_best: float | None
    best_step: int | None
    tokens: float | None
    worked_s: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


RESULTS = {
    "state": "State", "steps": "Steps", "reward_first": "Reward, first", "reward_last": "Reward, last", "held_out_first": "Held-out, first",
    "held_out_last": "Held-out, last", "held_out_best": "Held-out, best", "best_step": "Best at step", "tokens": "Tokens",
    "worked_s": "Worked",
}  # fmt: skip
"""Field of a RunResult → its title in a table."""


def differing_settings(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Setting → its value in each config, for settings that are not the same in all, in the order of the form.

    `configs` are raw; a setting that one of them does not have counts with its default, so that writing a default out is no difference.
    """
    changed = [changed_settings(raw) for raw in configs]
    rows = {key: [one.get(key, about.default) for one in changed] for key, about in SETTINGS.items() if key not in _OWN}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def settings_in_course(run: RunFolder) -> dict[str, Any]:
    """A run's raw settings; one that was changed during the run is a text with every value: “3e-05, from step 15 on 1e-05”. Two runs
    that end with the same value and began with different ones do differ."""
    settings = raw_settings(run)
    course: dict[str, str] = {}
    try:
        changes = read_changes(run)
    except UserError:  # a damaged list is told where the run goes on
        return settings
    for change in changes:
        for key, (old, new) in change.settings.items():
            course[key] = f"{course.get(key) or value_text(old)}, from step {change.step:,} on {value_text(new)}"
    return settings | course


def result_of(
    record: RunRecord, evaluations: Sequence[tuple[int, float]], rewards: Iterable[Any] | None = None
) -> RunResult:
    """A run's result. `evaluations`: (step, held-out reward), ascending; `rewards`: of every step, where they were read."""
    about = record.summary
    first, last = (
        (about.reward_before, about.reward_after) if rewards is None else first_and_last_means(rewards, about.step)
    )
    best = max(evaluations, key=lambda pair: (pair[1], -pair[0]), default=None)
    return RunResult(
        name=about.name,
        title=record.title,
        state=about.state,
        steps=about.step or 0,
        reward_first=first,
        reward_last=last,
        held_out_first=evaluations[0][1] if evaluations else None,
        held_out_last=evaluations[-1][1] if evaluations else None,
        held_out_best=best[1] if best else None,
        best_step=best[0] if best else None,
        tokens=about.metrics.get("num_tokens"),
        worked_s=about.worked_s,
    )


def evaluations(run: RunFolder) -> list[tuple[int, float]]:
    """(step, reward) of every evaluation on held-out prompts. Reads the whole event log, but parses only its evaluations."""
    found: list[tuple[int, float]] = []
    try:
        with open_regular(run.events) as file:
            while line := file.readline(LONGEST_LINE):
                if EVALUATION not in line:
                    continue
                event = parse_line(line) or {}
                step, metrics = event.get("step"), event.get("metrics")
                reward = metrics.get("reward") if isinstance(metrics, dict) else None  # pyright: ignore
                if event.get("split") != "test" and isinstance(step, int) and isinstance(reward, int | float):
                    found.append((step, float(reward)))
    except OSError:
        return []
    return found


def compare(runs: Sequence[RunFolder]) -> tuple[dict[str, list[Any]], list[RunResult]]:
    """(settings that differ, results), both in the order of `runs`."""
    settings = differing_settings([settings_in_course(run) for run in runs])
    return settings, [result_of(read_record(run), evaluations(run)) for run in runs]


# Tables


def settings_table(titles: Sequence[str], settings: Mapping[str, Sequence[Any]]) -> list[list[str]]:
    """A header with the runs' titles, and a row for each setting that differs."""
    return [["Setting", *titles], *([SETTINGS[key].label, *map(value_text, row)] for key, row in settings.items())]


def results_table(
    results: Sequence[RunResult], write: Callable[[str, Any], str] = lambda _name, value: value_text(value)
) -> list[list[str]]:
    """A header, and a row for each run. `write(field, value)` gives a cell's text."""
    rows = ([one.title, *(write(name, getattr(one, name)) for name in RESULTS)] for one in results)
    return [["Run", *RESULTS.values()], *rows]


def value_text(value: Any) -> str:
    """A value in one line, numbers with the digits that tell them apart, a path of ours without the folder of this machine."""
    if value is None or value == "":
        return MISSING
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(value_text, value)) or MISSING  # pyright: ignore
    return path_text(" ".join(str(value).split()))


def as_csv(table: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    return text.getvalue()


def as_markdown(table: Sequence[Sequence[str]]) -> str:
    """A GitHub table; a bar inside a cell is escaped."""

    def lines() -> Iterator[str]:
        for number, row in enumerate(table):
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
            if number == 0:
                yield f"|{'---|' * len(row)}"

    return "\n".join(lines()) + "\n"
