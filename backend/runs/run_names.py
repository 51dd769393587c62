"""Names of runs as the window shows them: the user's title or folder, the `label` that the window has written to
about.json, else a name by the run's sweep, its parent, or the settings that differ from the defaults."""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from backend.config.config import SETTINGS
from backend.rewards.catalogue import builtin_rewards
from backend.runs.archive import MOST_RUNS, raw_settings
from backend.runs.run_folder import RunFolder, all_runs, modified_at
from backend.runs.run_record import RunNotes, changed_settings, read_notes, read_parent, value_text
from backend.runs.sweep import text_of
from backend.runs.sweep_results import SweepFolder, SweepResults, read_results
from backend.utils.errors import UserError

MOST_SETTINGS = 2
LONGEST_VALUE = 24
AGAINST_DEFAULTS = ("learning_rate", "grpo_loss_type", "beta", "group_size", "temperature", "train_type", "iters")
"""Settings that name a run without one to compare it with."""
FIRST = ("train_mode", *AGAINST_DEFAULTS[:5], "reward_functions", "model", "train_type", "rank")  # first in a name
SHORT = {  # short names of settings; a setting with an empty one is told by its value alone
    "learning_rate": "lr",
    "group_size": "group",
    "batch_size": "batch",
    "temperature": "temp",
    "beta": "KL",
    **dict.fromkeys(("grpo_loss_type", "train_mode", "train_type", "model", "reward_functions"), ""),
    "iters": "steps",
}
UNTOLD = {
    *("data", "run_name", "lm_studio_name", "report_to", "steps_per_report", "save_every", "val_batches"),
    "best_is_lowest",  # which the mode sets
}
_DEFAULT_NAME = re.compile(r"(.+)-(\d{4}-\d\d-\d\d-\d{6})((?:-\d+)?)")
"""A folder's default name: model and kind of training, timestamp, and a number if that name existed already."""
_CLONE = re.compile(r".+-from-\d+(-\d+)?")
_MEMBER = re.compile(r"(.+)-\d+-seed(\d+)")


def split_name(name: str) -> tuple[str, str]:
    """A folder's name as (title, creation time): “qwen-lora-grpo”, “3 Nov 2025, 14:05”."""
    match = _DEFAULT_NAME.fullmatch(name)
    with suppress(ValueError):  # digits that are not a date
        if match is not None:
            then = datetime.strptime(match[2], "%Y-%m-%d-%H%M%S")
            return f"{match[1]}{match[3]}", f"{then.day} {then:%b %Y, %H:%M}"
    return name, ""


def name_of(run: RunFolder) -> str:
    return _name(run.path, *(modified_at(file) for file in (run.about, run.config, run.parent)))


@lru_cache(maxsize=1024)
def _name(path: Path, *_written: float) -> str:
    run, notes = RunFolder(path), RunNotes()
    with suppress(UserError):
        notes = read_notes(run)
    return notes.title or notes.label or label_of(run, changed_settings(raw_settings(run))) or run.name


def label_of(run: RunFolder, settings: Mapping[str, Any]) -> str:
    """The name by a run's changed `settings`; "" for a run whose folder the user has named."""
    data = short_data(settings.get("data"))
    if match := _MEMBER.fullmatch(run.name):
        results = results_of(SweepFolder(run.path.parent / "sweeps" / match[1]))
        for each in results.configurations if results is not None else ():
            if any(member.run == run.name for member in each.runs):
                seed = f"seed {match[2]}" if len(each.runs) > 1 else ""
                return _joined(data, each.settings, seed, len(each.settings))
    if _CLONE.fullmatch(run.name):
        with suppress(UserError):
            if (parent := read_parent(run)) is not None:
                is_default = any(each.fullmatch(parent.run) for each in (_DEFAULT_NAME, _CLONE, _MEMBER))
                changed = {key: _change(key, *pair) for key, pair in parent.changed.items() if key in SETTINGS}
                return _joined(data if is_default else parent.run, changed, f"from step {parent.step:,}")
    return _joined(data, _of_defaults(settings)) if _DEFAULT_NAME.fullmatch(run.name) else ""


def new_label(run: RunFolder) -> str:
    """The name of a new run: what differs from the newest other run over the same data, else from the defaults."""
    own, before, taken = changed_settings(raw_settings(run)), None, set[str]()
    for other in islice((each for each in all_runs(run.path.parent) if each != run), MOST_RUNS):
        theirs = changed_settings(raw_settings(other))
        taken.add(name_of(other))
        if before is None and theirs != own and theirs.get("data") == own.get("data"):
            before = theirs
    if before is None:
        shown = _of_defaults(own)
    else:
        keys = _fitting((key for key in own.keys() | before if own.get(key) != before.get(key)), own)
        was, now = ({key: of.get(key, SETTINGS[key].default) for key in keys} for of in (before, own))
        shown = {key: _change(key, was[key], now[key]) for key in keys}
    label = _joined(short_data(own.get("data")), shown)
    return next(name for name in chain([label], (f"{label} ({n})" for n in count(2))) if name not in taken)


def short_data(data: Any) -> str:
    """“sums” for a file sums.csv, for a folder of that name, and for somebody/sums of the Hub."""
    path = Path(str(data or ""))
    stem = path.stem if path.suffix else path.name
    return (path.parent.name if stem.lower() in ("data", "dataset", "train") else stem) or "run"


def setting_text(key: str, value: Any) -> str:
    """A setting in a name: “lr 3e-4”."""
    name = SHORT.get(key, SETTINGS[key].label.lower())
    text = text_of(value) if isinstance(value, float) else value_text(value)
    text = Path(text).name if key == "model" else text
    text = text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"
    return f"{text} {name}" if key == "iters" else f"{name} {text}".strip()


def results_of(sweep: SweepFolder) -> SweepResults | None:
    """The results of a sweep, read again only if the file has changed; None without a sound file."""
    return _results(sweep, modified_at(sweep.results))


@lru_cache(maxsize=256)
def _results(sweep: SweepFolder, _written: float) -> SweepResults | None:
    with suppress(UserError):
        return read_results(sweep)
    return None


def _of_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: settings[key] for key in _fitting(AGAINST_DEFAULTS, settings) if key in settings}


def _fitting(keys: Iterable[str], settings: Mapping[str, Any]) -> list[str]:
    """Those that the mode has a use for."""
    values = {"train_mode": SETTINGS["train_mode"].default, **settings}
    return [key for key in keys if SETTINGS[key].fits_mode(values)]


def _change(key: str, old: Any, new: Any) -> Any:
    """What a name tells of a setting: the new value; of reward functions, those that came and those that went."""
    if key != "reward_functions" or not isinstance(old, list) or not isinstance(new, list):
        return new
    if not new:
        return "no rewards"
    labels = {entry.name: entry.label for entry in builtin_rewards()}
    signed = [("+", each) for each in new if each not in old] + [("−", each) for each in old if each not in new]
    return [f"{sign}{labels.get(each, each)}" for sign, each in signed] or new


def _joined(data: str, settings: Mapping[str, Any], end: str = "", most: int | None = None) -> str:
    order = {key: place for place, key in enumerate((*SETTINGS, "iters"))}
    order |= {key: place - len(FIRST) for place, key in enumerate(FIRST)}
    keys = sorted(settings.keys() - UNTOLD, key=order.__getitem__)
    most = MOST_SETTINGS - bool(end) if most is None else most
    return " · ".join(filter(None, (data, *(setting_text(key, settings[key]) for key in keys[:most]), end)))
