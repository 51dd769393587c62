"""Several runs side by side: the settings that differ, and the results. As rows of text for a terminal, CSV and Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from backend.config.config import SETTINGS
from backend.runs.archive import first_and_last_means, raw_settings
from backend.runs.events import LONGEST_LINE, parse_line
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import EVALUATION, RunRecord, changed_settings, read_record
from backend.runs.steering import read_changes
from backend.utils.errors import UserError
from backend.utils.files import open_regular
from backend.utils.places import path_text

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
