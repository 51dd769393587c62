"""The search for runs, `lr>1e-5 tag:math loss:dapo -state:failed addition`, and the columns of the list.

All words and conditions must hold; `-` negates one, and quotes keep spaces. `:` means "contains" for text and "equals"
for numbers.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from backend.config.config import SETTINGS
from backend.config.other_programs.keys import as_number
from backend.config.other_programs.translation import NAMES
from backend.rewards.catalogue import nearest
from backend.runs.events import METRICS
from backend.runs.metric_names import COMPARISONS, EVALUATION, our_name
from backend.runs.run_record import RunRecord
from backend.utils.errors import UserError

Kind = Literal["text", "number", "steps", "duration", "time", "bytes", "curve", "change", "flag"]
HELD_OUT = "held_out/"


@dataclass(frozen=True, slots=True)
class RunField:
    """A column of the list of runs. `value(record)` is None where the run has none."""

    key: str
    title: str
    kind: Kind
    value: Callable[[RunRecord], Any]
    help: str = ""
    unit: str = ""


def _change(record: RunRecord) -> float | None:
    about = record.summary
    if about.reward_before is None or about.reward_after is None or about.measure != "reward":
        return None
    return round(about.reward_after - about.reward_before, 9)  # means of equal rewards differ by 1e-17


def _reward(record: RunRecord) -> float | None:
    return record.summary.reward_after if record.summary.measure == "reward" else None


_FIELDS = (
    RunField("name", "Run", "text", lambda r: r.title, "Its title, else the name of its folder."),
    RunField("state", "State", "text", lambda r: r.summary.state),
    RunField("model", "Model", "text", lambda r: "/".join(Path(r.summary.model).parts[-2:])),
    RunField("steps", "Steps", "steps", lambda r: r.summary.step or 0),
    RunField("curve", "Curve", "curve", lambda r: r.curve or None, "The reward, else the loss, over the run."),
    RunField("reward", "Reward", "number", _reward, "Mean over the last steps."),
    RunField("change", "Change", "change", _change, "Of the reward, against the mean over the first steps."),
    RunField("held_out", "Held-out", "number", lambda r: r.held_out.get("reward"), "Reward of the newest evaluation."),
    RunField("began", "Began", "time", lambda r: r.summary.began),
    RunField("worked", "Worked", "duration", lambda r: r.summary.worked_s, "Without loading and pauses."),
    RunField("ranks", "Ranks", "number", lambda r: r.summary.ranks, "Processes that it trains on."),
    RunField("machines", "Machines", "text", lambda r: ", ".join(dict.fromkeys(r.summary.machines)) or None),
    RunField("tokens", "Tokens", "number", lambda r: r.summary.metrics.get("num_tokens"), "Since the run began."),
    RunField("disk", "Disk", "bytes", lambda r: r.bytes),
    RunField("tags", "Tags", "text", lambda r: " ".join(r.notes.tags)),
    RunField("note", "Note", "text", lambda r: r.notes.note.partition("\n")[0]),
    RunField("parent", "Parent", "text", lambda r: r.parent, "The run that it was cloned from."),
    RunField("favourite", "Favourite", "flag", lambda r: r.notes.favourite),
    RunField("folder", "Folder", "text", lambda r: r.summary.name),
)
FIELDS = {about.key: about for about in _FIELDS}


def field_of(key: str) -> RunField | None:
    """The field of this name: one of FIELDS, a setting, else a metric; None for ""."""
    if key in FIELDS:
        return FIELDS[key]
    if key in SETTINGS:
        about = SETTINGS[key]
        kind: Kind = "number" if about.kind in ("int", "float") else "text"
        return RunField(key, about.label, kind, lambda record: record.setting(key), about.help)
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


HINT = "Words, and conditions such as lr>1e-5  tag:math  loss:dapo  state:failed  is:favourite  reward>=2  -tag:old"
SHORT_NAMES = {
    "lr": "learning_rate",
    "loss": "grpo_loss_type",
    "batch": "batch_size",
    "group": "group_size",
    "rewards": "reward_functions",
    "tag": "tags",
    "title": "name",
    "run": "name",
    "hours": "worked",
    "gb": "disk",
    "step": "steps",
    "heldout": "held_out",
    "held-out": "held_out",
    **NAMES,
}
Test = Callable[[RunRecord], bool]
FLAGS: dict[str, Test] = {
    "favourite": lambda record: record.notes.favourite,
    "archived": lambda record: record.notes.archived,
    "live": lambda record: record.summary.state in ("starting", "running"),
    "cloned": lambda record: bool(record.parent),
}
_SEARCHED: dict[str, Callable[[RunRecord], Any]] = {  # fields that are searched by another value than they show
    "name": lambda record: [record.title, record.summary.name],
    "model": lambda record: record.summary.model,
    "tags": lambda record: list(record.notes.tags),
    "note": lambda record: record.notes.note,
    "worked": lambda record: None if record.summary.worked_s is None else record.summary.worked_s / 3600,
    "disk": lambda record: record.bytes / 1e9,
}
_PART = re.compile(r'-?(?:[^\s"]|"[^"]*"?)+')
_CONDITION = re.compile(r"(-?)([A-Za-z_][\w./-]*)(>=|<=|[:=<>])(.*)", re.DOTALL)


def search(query: str, metrics: Collection[str] = tuple(METRICS)) -> Test:
    """The test of a query; "" passes every run. `metrics`: names besides fields. Raises UserError."""
    tests: list[tuple[bool, Test]] = []
    for part in _PART.findall(query):
        if condition := _CONDITION.fullmatch(part):
            minus, name, sign, value = condition.groups()
            tests.append((not minus, _condition(name, sign, value.replace('"', ""), metrics)))
        else:
            word = part.lstrip("-").replace('"', "").lower()
            tests.append((not part.startswith("-") or len(part) == 1, partial(_has_word, word)))
    return lambda record: all(test(record) == wanted for wanted, test in tests)


def asks_for_archived(query: str) -> bool:
    return "is:archived" in query.lower()


def _has_word(word: str, record: RunRecord) -> bool:
    about, notes, data = record.summary, record.notes, str(record.settings.get("data", ""))
    texts = record.title, about.name, about.model, data, about.state, *notes.tags, notes.note
    return word in "\n".join(texts).lower()


def _condition(name: str, sign: str, value: str, metrics: Collection[str]) -> Test:
    if not value:
        raise UserError("search", f"{name}{sign} needs a value after it.")
    if name.lower() == "is":
        if value.lower() not in FLAGS:
            known = ", ".join(f"is:{flag}" for flag in FLAGS)
            raise UserError("search", f"is:{value} is not known; there are {known}.")
        return FLAGS[value.lower()]
    key = _key(name, sign, metrics)
    field = field_of(key)
    assert field is not None
    read = _SEARCHED.get(key, field.value)
    if sign not in COMPARISONS:
        return lambda record: _matches(read(record), value, whole=sign == "=")
    bound, compare = as_number(value), COMPARISONS[sign]
    if bound is None:
        raise UserError("search", f"{name}{sign} needs a number, not {value}.")
    return lambda record: (number := as_number(read(record))) is not None and compare(number, bound)


def _key(name: str, sign: str, metrics: Collection[str]) -> str:
    lower = name.lower()
    is_metric = lower in metrics and sign in COMPARISONS
    ours = our_name(name)  # a metric may have TRL's name
    ours = HELD_OUT + ours.removeprefix(EVALUATION) if ours.startswith(EVALUATION) else ours
    for key in (lower, name, ours) if is_metric else (SHORT_NAMES.get(lower, ""), lower, name, ours):
        if key in FIELDS or key in SETTINGS or key in metrics or (key.startswith(HELD_OUT) and key != HELD_OUT):
            return key
    near = nearest(lower, [*FIELDS, *SHORT_NAMES, *SETTINGS, *metrics])
    raise UserError("search", f"Runs have no {name}." + (f" Did you mean {near}?" if near else ""))


def _matches(value: Any, wanted: str, *, whole: bool) -> bool:
    if value is None:
        return False
    if isinstance(value, list | tuple):
        return any(_matches(item, wanted, whole=whole) for item in value)
    number, bound = as_number(value), as_number(wanted)
    if number is not None and bound is not None and not isinstance(value, str):
        return math.isclose(number, bound, rel_tol=1e-9)
    text, wanted = str(value).lower(), wanted.lower()
    return text == wanted if whole else wanted in text
