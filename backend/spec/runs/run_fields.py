"""What can be shown, sorted and searched of a run, by name: one table for the window's columns, the search and the command line.

Beside the fields listed here every setting is one by its key, every metric of the newest step by its name, and every metric of the
newest evaluation as `held_out/NAME`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from backend.spec.config import SETTINGS
from backend.spec.events import METRICS
from backend.spec.runs.run_record import RunRecord

Kind = Literal["text", "number", "steps", "duration", "time", "bytes", "curve", "change", "flag"]
HELD_OUT = "held_out/"


@dataclass(frozen=True, slots=True)
class RunField:
    """`value(record)` is None where the run has none. `kind` says how it is written and sorted."""

    key: str
    title: str
    kind: Kind
    value: Callable[[RunRecord], Any]
    help: str = ""
    unit: str = ""


def _change(record: RunRecord) -> float | None:
    before, after = record.summary.reward_before, record.summary.reward_after
    return None if before is None or after is None else after - before


def _short_model(record: RunRecord) -> str:
    return "/".join(Path(record.summary.model).parts[-2:])


# fmt: off
FIELDS: dict[str, RunField] = {about.key: about for about in (
    RunField("name", "Run", "text", lambda record: record.title, "Its title, else the name of its folder."),
    RunField("state", "State", "text", lambda record: record.summary.state),
    RunField("model", "Model", "text", _short_model),
    RunField("steps", "Steps", "steps", lambda record: record.summary.step or 0),
    RunField("curve", "Curve", "curve", lambda record: record.curve or None, "The reward over the run."),
    RunField("reward", "Reward", "number", lambda record: record.summary.reward_after, "Mean over the last steps."),
    RunField("change", "Change", "change", _change, "Of the reward, against the mean over the first steps."),
    RunField("held_out", "Held-out", "number", lambda record: record.held_out.get("reward"), "Reward of the newest evaluation on prompts that are not trained on."),
    RunField("began", "Began", "time", lambda record: record.summary.began),
    RunField("worked", "Worked", "duration", lambda record: record.summary.worked_s, "Without loading and pauses."),
    RunField("ranks", "Ranks", "number", lambda record: record.summary.ranks, "Processes that it trains on: one, or one and more on each of several machines."),
    RunField("machines", "Machines", "text", lambda record: ", ".join(dict.fromkeys(record.summary.machines)) or None, "Of a run on several."),
    RunField("tokens", "Tokens", "number", lambda record: record.summary.metrics.get("num_tokens"), "Seen since the run began."),
    RunField("disk", "Disk", "bytes", lambda record: record.bytes),
    RunField("tags", "Tags", "text", lambda record: " ".join(record.notes.tags)),
    RunField("note", "Note", "text", lambda record: record.notes.note.partition("\n")[0]),
    RunField("parent", "Parent", "text", lambda record: record.parent, "The run that it was cloned from."),
    RunField("favourite", "Favourite", "flag", lambda record: record.notes.favourite),
    RunField("folder", "Folder", "text", lambda record: record.summary.name),
)}
# fmt: on


def field_of(key: str) -> RunField | None:
    """The field of this name: one of FIELDS, a setting, else a metric; None for a name that no metric can have."""
    if key in FIELDS:
        return FIELDS[key]
    if key in SETTINGS:
        about = SETTINGS[key]
        numeric = about.kind in ("int", "float")
        return RunField(
            key, about.label, "number" if numeric else "text", lambda record: record.setting(key), about.help
        )
    if key.startswith(HELD_OUT):
        metric = key.removeprefix(HELD_OUT)
        return RunField(key, f"Held-out {metric}", "number", lambda record: record.held_out.get(metric))
    if not key:
        return None
    return RunField(key, key, "number", lambda record: record.summary.metrics.get(key), unit=METRICS.get(key, ""))


def all_keys(records: Iterable[RunRecord]) -> list[str]:
    """Names of everything that a column can show: fields, then settings, then the metrics of these runs."""
    metrics = dict.fromkeys(METRICS)
    held_out: dict[str, None] = {}
    for record in records:
        metrics.update(dict.fromkeys(record.summary.metrics))
        held_out.update(dict.fromkeys(HELD_OUT + name for name in record.held_out if name != "reward"))
    return [*FIELDS, *SETTINGS, *(name for name in metrics if name not in FIELDS and name not in SETTINGS), *held_out]
