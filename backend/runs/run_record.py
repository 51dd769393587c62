"""A run in a list: summary, notes, parent, disk use, reward curve; the comparison of runs; checkpoints to spare."""

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter, ValidationError

from backend.config.config import SETTINGS
from backend.config.other_programs.translation import translate
from backend.runs import archive
from backend.runs.archive import Summary, first_and_last_means, raw_settings
from backend.runs.events import EVALUATION_KIND, Event, is_number, lines_from_end, parse_line
from backend.runs.metric_names import MEASURES, measure_of
from backend.runs.run_folder import RunFolder, hold_lock
from backend.runs.saved_weights import Checkpoint, spare_checkpoints
from backend.runs.steering import read_changes
from backend.utils.disk import remove_folder, replace_file
from backend.utils.documents import read_json
from backend.utils.errors import UserError
from backend.utils.files import open_regular, remove_tree, walk
from backend.utils.places import path_text
from backend.utils.text import about_path, quote, visible


@dataclass(frozen=True, slots=True)
class RunNotes:
    """The user's notes on a run, in its about.json. `archived` hides a run from the list. `label`: the name that the
    window gave it, shown where there is no title. `correctness`: the scores that say if a completion is right."""

    title: str = ""
    note: str = ""
    tags: tuple[str, ...] = ()
    favourite: bool = False
    archived: bool = False
    label: str = ""
    correctness: str = ""


_NOTES = TypeAdapter(RunNotes)


def read_notes(run: RunFolder) -> RunNotes:
    """The notes of a run, empty without a file. Raises UserError for a file that holds something else."""
    return _notes(run)[1]


def change_notes(run: RunFolder, **changes: Any) -> RunNotes:
    """Change some fields and return the notes as saved, with unknown fields of a later version. The file is read again
    first, so that two windows lose nothing. Raises UserError for one that cannot be read, which stays, or written."""
    content, notes = _notes(run)
    notes = replace(notes, **changes)
    replace_file(run.about, json.dumps({**content, **asdict(notes)}, ensure_ascii=False, indent=1) + "\n")
    return notes


def tags_in(text: str) -> tuple[str, ...]:
    """The tags in a line that a user typed: words between commas or spaces, each once."""
    return tuple(dict.fromkeys(word for word in re.split(r"[\s,]+", text) if word))


def _notes(run: RunFolder) -> tuple[dict[str, Any], RunNotes]:
    content = read_json(run.about, "about", advice="fix or delete it") if os.path.lexists(run.about) else {}
    try:
        notes = _NOTES.validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        wrong = "".join(f" has a wrong value for {name}" for name in error.errors()[0]["loc"][:1])
        wrong = wrong or " does not hold the notes of a run"
        raise UserError("about", about_path(run.about, f"{wrong}; fix or delete it.")) from None
    # Escape what cannot be seen: a title must not turn the letters of the row that it stands in.
    tags = tuple(map(visible, notes.tags))
    notes = replace(notes, title=visible(notes.title), label=visible(notes.label), note=visible(notes.note), tags=tags)
    return content, notes


POINTS = 40  # of a reward curve
WINDOW = 8 << 10  # bytes read for one point of a long event log: a few steps, whose mean is the point


def reward_curve(event_log: Path) -> tuple[float, ...]:
    """At most POINTS rewards, or losses of a run without rewards, from places spread evenly over the event log."""
    try:
        with open_regular(event_log) as file:
            size = file.seek(0, 2)
            if size <= POINTS * WINDOW:
                file.seek(0)
                values = [value for line in file if (value := _reward(line)) is not None]
                edges = [len(values) * index // POINTS for index in range(POINTS + 1)]
                return tuple(fmean(values[start:stop]) for start, stop in pairwise(edges) if stop > start)
            means: list[float] = []
            for index in range(POINTS):
                offset = size * index // POINTS
                file.seek(offset)
                # The first and the last line of a window are cut.
                lines = file.read(WINDOW).split(b"\n")[0 if offset == 0 else 1 : -1]
                if rewards := [value for line in lines if (value := _reward(line)) is not None]:
                    means.append(fmean(rewards))
            return tuple(means)
    except OSError:
        return ()


def _reward(line: bytes) -> float | None:
    if b'"step"' not in line:
        return None
    event = parse_line(line)
    metrics = event.get("metrics") if event is not None and event.get("kind") == "step" else None
    value = (metrics or {}).get(measure_of(metrics or {}))
    return float(value) if is_number(value) else None


def newest_evaluation(event_log: Path) -> Event | None:
    """The last evaluation on held-out prompts in the last REACH bytes of an event log."""
    with suppress(OSError), open_regular(event_log) as file:
        return next(_held_out(lines_from_end(file)), None)
    return None


def _held_out(lines: Iterable[bytes]) -> Iterator[Event]:
    """The evaluations among the lines of an event log, without those of the test split."""
    events = (parse_line(line) or {} for line in lines if EVALUATION_KIND in line)
    return (event for event in events if event.get("kind") == "eval" and event.get("split") != "test")


@dataclass(frozen=True, slots=True)
class Parent:
    """The run that a clone began from, in its parent.json. `warm`: the clone continues from `step`; else it took only
    the weights. `changed`: key → (the parent's value at that step, the clone's)."""

    run: str
    path: Path
    step: int
    warm: bool
    changed: dict[str, tuple[Any, Any]]


_PARENT = TypeAdapter(Parent)


def read_parent(run: RunFolder) -> Parent | None:
    """The parent of a clone; None for any other run. Raises UserError for a file that cannot be read."""
    if not os.path.lexists(run.parent):
        return None
    try:
        return _PARENT.validate_python(read_json(run.parent, "run"))
    except (ValidationError, UserError):
        problem = f" does not tell the parent of the run {quote(run.name, 40)}; fix or delete it."
        raise UserError("run", about_path(run.parent, problem)) from None


def write_parent(run: RunFolder, parent: Parent) -> None:
    replace_file(run.parent, json.dumps(asdict(parent), default=str, ensure_ascii=False, indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Everything that a list of runs shows of one. `settings`: those that differ from the defaults. `held_out`: metrics
    of the newest evaluation. `notes_problem`: why about.json cannot be read. `disk`: part of the folder → bytes.
    `name`: what the window calls a run without a title."""

    summary: Summary
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    held_out: Mapping[str, Any] = field(default_factory=dict[str, Any])
    notes: RunNotes = field(default_factory=RunNotes)
    notes_problem: str = ""
    parent: str = ""
    disk: Mapping[str, int] = field(default_factory=dict[str, int])
    curve: tuple[float, ...] = ()
    name: str = ""

    @property
    def title(self) -> str:
        return self.notes.title or self.name or self.summary.name

    @property
    def bytes(self) -> int:
        return sum(self.disk.values())

    def setting(self, key: str) -> Any:
        return self.settings[key] if key in self.settings else SETTINGS[key].default

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        return {**values, **values.pop("summary"), **values.pop("notes"), "bytes": self.bytes}


def read_record(run: RunFolder) -> RunRecord:
    """Read a run. Never raises: what is missing or broken is empty, and broken notes are in `notes_problem`."""
    notes, problem, parent = RunNotes(), "", None
    try:
        notes = read_notes(run)
    except UserError as error:
        problem = error.faults[0].sentence
    with suppress(UserError):
        parent = read_parent(run)
    return RunRecord(
        summary=archive.summary(run),
        settings=changed_settings(raw_settings(run)),
        held_out=(newest_evaluation(run.events) or {}).get("metrics") or {},
        notes=notes,
        notes_problem=problem,
        parent=parent.run if parent else "",
        disk=disk_use(run),
        curve=reward_curve(run.events),
    )


def record_of(values: Mapping[str, Any]) -> RunRecord:
    """The record that `asdict` made these values of. Raises TypeError or KeyError for values of another version."""
    notes = values["notes"] | {"tags": tuple(values["notes"]["tags"])}
    parts = {"notes": RunNotes(**notes), "summary": Summary(**values["summary"]), "curve": tuple(values["curve"])}
    return RunRecord(**{**values, **parts})


def changed_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a config under our names, without those that have their default. Nothing is validated."""
    values = {key: as_number(key, value) for key, value in translate(raw).values.items() if key in SETTINGS}
    return {key: value for key, value in values.items() if value is not None and value != SETTINGS[key].default}


def as_number(key: str, value: Any) -> Any:
    """A number that YAML reads as text, such as 1e-5, as a number."""
    if isinstance(value, str) and SETTINGS[key].kind in ("int", "float"):
        with suppress(ValueError):
            return float(value)
    return value


def stamp(run: RunFolder) -> list[int]:
    """Numbers that change whenever a file that a record is read from does; much faster than reading it."""
    numbers: list[int] = []
    files = run.config, run.events, run.about, run.parent, run.changes, run.completions
    for path in (*files, run.checkpoints, run.evaluations, run.path):
        try:
            status = os.stat(path)
            numbers += [status.st_size, status.st_mtime_ns]
        except OSError:
            numbers += [0, 0]
    return numbers


MISSING = "–"


RunResult = dict[str, Any]  # name, title, measure and RESULTS of a run. `best_step`: the first with the best evaluation

RESULTS = {
    "state": "State",
    "steps": "Steps",
    "reward_first": "Reward, first",
    "reward_last": "Reward, last",
    "held_out_first": "Held-out, first",
    "held_out_last": "Held-out, last",
    "held_out_best": "Held-out, best",
    "best_step": "Best at step",
    "tokens": "Tokens",
    "worked_s": "Worked",
}


def differing_settings(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Setting → its value in each raw config, for settings that are not the same in all, in the order of the form."""
    changed = [changed_settings(raw) for raw in configs]
    rows = {key: [one.get(key, about.default) for one in changed] for key, about in SETTINGS.items()}
    del rows["run_name"]
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def settings_in_course(run: RunFolder) -> dict[str, Any]:
    """A run's raw settings; one that was changed is a text with every value: “3e-05, from step 15 on 1e-05”."""
    settings = raw_settings(run)
    course: dict[str, str] = {}
    with suppress(UserError):  # a damaged list is reported where the run is resumed
        for change in read_changes(run):
            for key, (old, new) in change.settings.items():
                course[key] = f"{course.get(key) or value_text(old)}, from step {change.step:,} on {value_text(new)}"
    return settings | course


def result_of(
    record: RunRecord, evaluations: Sequence[tuple[int, float]], values: Iterable[Any] | None = None
) -> RunResult:
    """`evaluations`: (step, the run's measure on held-out prompts), ascending; `values`: of every step, if read."""
    about = record.summary
    first, last = about.reward_before, about.reward_after
    if values is not None:
        first, last = first_and_last_means(values, about.step)
    sign = 1 if about.measure == "reward" else -1
    best = max(evaluations, key=lambda pair: (sign * pair[1], -pair[0]), default=None)
    return {
        "measure": about.measure,
        "name": about.name,
        "title": record.title,
        "state": about.state,
        "steps": about.step or 0,
        "reward_first": first,
        "reward_last": last,
        "held_out_first": evaluations[0][1] if evaluations else None,
        "held_out_last": evaluations[-1][1] if evaluations else None,
        "held_out_best": best[1] if best else None,
        "best_step": best[0] if best else None,
        "tokens": about.metrics.get("num_tokens"),
        "worked_s": about.worked_s,
    }


def evaluations(run: RunFolder, measure: str = "reward") -> list[tuple[int, float]]:
    """(step, measure) of every evaluation on held-out prompts."""
    with suppress(OSError), open_regular(run.events) as file:
        values = [(event.get("step"), (event.get("metrics") or {}).get(measure)) for event in _held_out(file)]
        return [(step, float(value)) for step, value in values if step is not None and value is not None]
    return []


def compare(runs: Sequence[RunFolder]) -> tuple[dict[str, list[Any]], list[RunResult]]:
    """(settings that differ, results), both in the order of `runs`."""
    settings = differing_settings([settings_in_course(run) for run in runs])
    records = [(run, read_record(run)) for run in runs]
    return settings, [result_of(record, evaluations(run, record.summary.measure)) for run, record in records]


def settings_table(titles: Sequence[str], settings: Mapping[str, Sequence[Any]]) -> list[list[str]]:
    return [["Setting", *titles], *([SETTINGS[key].label, *map(value_text, row)] for key, row in settings.items())]


def results_table(results: Sequence[RunResult]) -> list[list[str]]:
    table = [["Run", *RESULTS.values()]]
    for one in results:
        worked = value_text(one["worked_s"]) if one["worked_s"] is None else f"{one['worked_s']:,.0f} s"
        texts = {key: value_text(one[key]) for key in RESULTS} | {"worked_s": worked}
        table.append([one["title"], *(with_measure(key, one, text) for key, text in texts.items())])
    return table


def with_measure(name: str, result: RunResult, text: str) -> str:
    """“loss 0.41” for a reward field of a run without rewards; other fields as they are."""
    is_other = result["measure"] != "reward" and name.startswith(("reward", "held_out")) and result[name] is not None
    return f"{MEASURES[result['measure']]} {text}" if is_other else text


def value_text(value: Any) -> str:
    if value is None or value == "":
        return MISSING
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(value_text, value)) or MISSING
    return path_text(" ".join(str(value).split()))


def as_csv(table: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    return text.getvalue()


def as_markdown(table: Sequence[Sequence[str]], rest: str = "---") -> str:
    """A GitHub table; a bar inside a cell is escaped. `rest`: the alignment of all columns but the first."""
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in table]
    return "\n".join([lines[0], f"|---|{f'{rest}|' * (len(table[0]) - 1)}", *lines[1:]]) + "\n"


PARTS = {  # file or folder of a run → its title
    "checkpoints": "Checkpoints",
    "adapters": "Adapters",
    "model": "Model",
    "fused": "Fused model",
    "completions.jsonl": "Completions",
    "events.jsonl": "Event log",
    "evaluations": "Evaluations",
    "uploads": "Uploads",
    "log.txt": "Log",
    "other": "Other",
}


def disk_use(run: RunFolder) -> dict[str, int]:
    """Part (a key of PARTS) → bytes, the largest first. Links are not followed."""
    sizes: Counter[str] = Counter()
    start = len(os.fspath(run.path)) + 1
    for path, size in file_sizes(run.path):
        part = path[start:].split(os.sep, 1)[0]
        sizes[part if part in PARTS else "other"] += size
    return {part: size for part, size in sizes.most_common() if size}


def file_sizes(folder: Path) -> Iterator[tuple[str, int]]:
    """(path, bytes) of everything below a folder that is none itself; of a link, its own."""
    for entry in walk(folder):
        try:
            if not entry.is_dir(follow_symlinks=False):
                yield entry.path, entry.stat(follow_symlinks=False).st_size
        except OSError:  # deleted meanwhile
            continue


def _folder_size(folder: Path) -> int:
    return sum(size for _, size in file_sizes(folder))


@dataclass(frozen=True, slots=True)
class FreeableSpace:
    run: RunFolder
    checkpoints: tuple[Checkpoint, ...]
    bytes: int


def freeable_space(runs: Iterable[RunFolder]) -> list[FreeableSpace]:
    """The runs that have checkpoints to spare and are not being trained, the largest saving first."""
    spare = ((run, tuple(spare_checkpoints(run))) for run in runs if not run.is_locked())
    found = [FreeableSpace(run, saved, sum(_folder_size(each.path) for each in saved)) for run, saved in spare if saved]
    return sorted(found, key=lambda space: -space.bytes)


def free_space(run: RunFolder) -> int:
    """Delete a run's checkpoints but the best and the newest. → bytes freed. Raises UserError for a run in training."""
    handle = hold_lock(run)
    before = _folder_size(run.checkpoints)
    try:
        for saved in spare_checkpoints(run):
            remove_folder(saved.path)
        for folder in run.checkpoints.glob(".*.deleted"):  # by a process that was killed
            remove_tree(folder)
    finally:
        os.close(handle)
    return before - _folder_size(run.checkpoints)
