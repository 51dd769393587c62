"""The rows that a run has: those of its dataset by split, those of other datasets to evaluate on, and whether they have the configured columns.

Every row is a dict of its columns. Prompts, chat templates and tokens are in `backend.data.problems`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

from backend.config.model_and_data_names import DATA_SUFFIXES as SUFFIXES
from backend.config.row_settings import evaluation_sets
from backend.config.setting_groups import ColumnSettings, DatasetSettings
from backend.data.files import PATH
from backend.data.row_steps import MapRows, RowSteps
from backend.data.row_views import (
    STEPPING,
    LazyRows,
    PickedRows,
    Rows,
    SteppedRows,
    applied,
    column_names,
    missing_columns,
)
from backend.data.sources import Check, Found, Names, Reading, find_splits
from backend.rewards.catalogue import CODE_TESTS, COMPARING_REWARDS, metric_name, without_tests
from backend.runs.start_progress import telling
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import user_path
from backend.utils.text import quote

SOURCE = 50
"""Characters of a file's path, or of a dataset's name, in a sentence that names a row or columns."""
SPLITS = ("train", "valid", "test")
SPLIT_NAMES = {"valid": ("valid", "validation", "val", "dev"), "test": ("test",), "train": ("train",)}
WHOLE = "rows"
"""The split of a dataset of which one split is wanted."""


@dataclass(frozen=True, slots=True)
class EvaluationRows:
    """The rows of one dataset to evaluate on, and the settings of the run in which it differs (`eval_data`)."""

    rows: Rows
    source: str
    settings: dict[str, Any]


@dataclass(slots=True)
class Splits:
    """Rows by split; `source[split]` names the file or Hub split they came from."""

    train: Rows
    valid: Rows = field(default_factory=list)
    test: Rows = field(default_factory=list)
    source: dict[str, str] = field(default_factory=dict)
    evals: dict[str, EvaluationRows] = field(default_factory=dict)
    """The sets of `eval_data` by name."""
    notes: list[str] = field(default_factory=list)
    """Sentences on rows that were left out."""
    about: dict[str, int] = field(default_factory=dict)
    """Split → about how many rows it has, where only the first were read."""

    def rows(self, split: str) -> Rows:
        """The rows of `split`, one of SPLITS."""
        return {"train": self.train, "valid": self.valid, "test": self.test}[split]


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_splits(config: DatasetSettings, map_rows: MapRows | None = None, *, head: bool = False) -> Splits:
    """Rows of all splits of `config.data`, a file (all of it is train), a folder, or a Hub id, and of the datasets beside it.

    `map_rows` calls the map function of the settings; without it that function is left undone. `head`: of large files only the first rows, for
    a preview. Raises UserError.
    """
    reading = Reading(config.streaming, head)
    splits = Splits([])
    steps = RowSteps.of(config, map_rows)
    for split, each in found_splits(config, reading).items():
        rows = stepped(each, steps, split, splits.notes)
        setattr(splits, split, rows)
        splits.source[split] = each.source
        if each.about is not None:
            splits.about[split] = each.about
    if not splits.train:
        raise UserError("data", f"The dataset {shown_source(config.data)} has no rows to train on.")
    splits.evals = _evaluation_rows(config, map_rows, reading, splits.notes)
    return hold_out(splits, config)


def found_splits(config: DatasetSettings, reading: Reading) -> dict[str, Found]:
    """The rows of each split as they are stored, before any step; those of another dataset where one takes a split's place. Raises
    UserError."""
    return own_splits(config, reading) | {
        split: split_elsewhere(config, split, reading) for split in splits_elsewhere(config)
    }


def own_splits(config: DatasetSettings, reading: Reading) -> dict[str, Found]:
    """Those of the run's own dataset. Raises UserError."""
    return find_splits(config.data, config.dataset_config, "data", names_by_split(config), reading, _checked(config))


def splits_elsewhere(config: DatasetSettings) -> dict[str, str]:
    """Split → the other dataset that takes its place."""
    return {split: name for split, name in (("valid", config.valid_data), ("test", config.test_data)) if name}


def names_by_split(config: DatasetSettings) -> dict[str, tuple[str, ...]]:
    """Split → the names it may have in the dataset: the configured name, or all usual names where it is the default. Without the splits that
    another dataset takes the place of."""
    configured = {"train": config.train_split, "valid": config.valid_split, "test": config.test_split}
    elsewhere = splits_elsewhere(config)
    return {
        split: SPLIT_NAMES[split] if name == split else (name,)
        for split, name in configured.items()
        if split not in elsewhere
    }


def _checked(config: DatasetSettings) -> Check:
    """A check that raises UserError for a missing training split, or a missing split that the user named. Others under their default name may
    be absent."""

    def check(available: Mapping[str, Any], existing: str) -> None:
        name = quote(config.data, 50)
        folder = f"The folder {quote(user_path(config.data, 'data'), PATH)}"
        if available["train"] is None and existing:
            raise UserError("train_split", f"{name} has no split {quote(config.train_split, 40)}; it has {existing}.")
        if available["train"] is None:
            expected = ", ".join(quote(config.train_split, 20) + suffix for suffix in SUFFIXES)
            raise UserError("data", f"{folder} has none of {expected}.")
        why = f"{name} has {existing}." if existing else f"{folder} has no file of that name."
        for key in ("valid_split", "test_split"):
            split, named = key.removesuffix("_split"), getattr(config, key)
            if split in available and named != split and available[split] is None:
                raise UserError(key, f"There is no split {quote(named, 40)}. {why}")

    return check


def split_elsewhere(config: DatasetSettings, split: str, reading: Reading) -> Found:
    """The rows of the other dataset that takes a split's place: of a folder or a Hub id the split for that use, else another that is not for
    training, else the training split. Raises UserError."""
    name = splits_elsewhere(config)[split]
    # A configuration is one of a dataset; another dataset has it only where it is the same one.
    of_same = config.dataset_config if name == config.data else ""
    return _single(name, of_same, f"{split}_data", {WHOLE: names_elsewhere(config, split)}, reading)


def names_elsewhere(config: DatasetSettings, use: str) -> tuple[str, ...]:
    """The names that the split for one use may have in another dataset, the likeliest first."""
    own = {"valid": config.valid_split, "test": config.test_split}[use]
    first, second = ("test", "valid") if use == "test" else ("valid", "test")
    usual = (*SPLIT_NAMES[first], *SPLIT_NAMES[second], *SPLIT_NAMES["train"])
    return (own,) if own not in ("", use) else usual


def _single(name: str, config_name: str, setting: str, names: Names, reading: Reading) -> Found:
    """Raises UserError for a dataset without rows."""

    def check(available: Mapping[str, Any], existing: str) -> None:
        if available[WHOLE] is None:
            raise UserError(
                setting, f"{shown_source(name)} has none of the splits {quote(', '.join(names[WHOLE]), 60)}."
            )

    found = find_splits(name, config_name, setting, names, reading, check)[WHOLE]
    if not found.rows:
        raise UserError(setting, f"The dataset {shown_source(name)} has no rows.")
    return found


def _evaluation_rows(
    config: DatasetSettings, map_rows: MapRows | None, reading: Reading, notes: list[str]
) -> dict[str, EvaluationRows]:
    """The sets of `eval_data`, each with its own columns and steps where it says so."""
    evals: dict[str, EvaluationRows] = {}
    for name, about in evaluation_sets(config.eval_data).items():
        own, found = config.model_copy(update=about), found_evaluation_set(about, reading)
        rows = stepped(found, RowSteps.of(own, map_rows), name, notes)
        evals[name] = EvaluationRows(rows, found.source, about)
    return evals


def found_evaluation_set(about: Mapping[str, Any], reading: Reading) -> Found:
    """The rows of one of `evaluation_sets` as they are stored. Raises UserError."""
    names = {WHOLE: names_of_evaluation_set(about)}
    return _single(about["data"], about.get("dataset_config", ""), "eval_data", names, reading)


def names_of_evaluation_set(about: Mapping[str, Any]) -> tuple[str, ...]:
    """The names that its split may have, the likeliest first."""
    wanted = about.get("valid_split") or about.get("test_split") or about.get("train_split")
    usual = (*SPLIT_NAMES["test"], *SPLIT_NAMES["valid"], *SPLIT_NAMES["train"])
    return (wanted,) if wanted else usual


def stepped(found: Found, steps: RowSteps, split: str, notes: list[str]) -> Rows:
    """What the steps make of rows, with a note on those that they leave out. Raises UserError where they leave out all."""
    if not steps or not found.rows:
        return found.rows

    def where(index: int) -> str:
        return row_name(index, found.source)

    if isinstance(found.rows, LazyRows):
        rows: Rows = SteppedRows(found.rows, steps, where, found.source)
    else:
        made = telling(applied(found.rows, steps, where), STEPPING, found.source, lambda done: done / len(found.rows))
        rows = [row for _, row in made if row is not None]
    left_out = len(found.rows) - len(rows)
    if not rows:
        setting = "answer_pattern" if steps.pattern else "map_function"
        raise UserError(setting, f"No row of {shown_source(found.source)} is left: {steps.left_out_words()}.")
    if left_out:
        notes.append(f"{left_out:,} of {len(found.rows):,} rows of {split} are left out: {steps.left_out_words()}.")
    return rows


def hold_out(splits: Splits, config: DatasetSettings) -> Splits:
    """Move a seeded share of the training rows to valid when there is no valid split and `validation_split` is set."""
    if splits.valid or not config.validation_split:
        return splits
    count = max(1, round(len(splits.train) * config.validation_split))
    if count >= len(splits.train):
        raise UserError("validation_split", f"Holding out {count} of {len(splits.train)} rows leaves none to train on.")
    rows = splits.train
    held_out = _drawn(len(rows), count, f"hold-out {data_seed(config)}")
    stays = bytearray(b"\1") * len(rows)
    for i in held_out:
        stays[i] = 0
    if isinstance(rows, LazyRows):
        splits.valid, splits.train = PickedRows(rows, held_out), PickedRows(rows, [*compress(range(len(rows)), stays)])
    else:
        splits.valid, splits.train = [rows[i] for i in held_out], [*compress(rows, stays)]
    return splits


MOST_SHUFFLED = 1_000_000
"""Rows up to which they are shuffled in Python, which takes some seconds for ten million."""


def _drawn(size: int, count: int, seed: str) -> list[int]:
    """`count` different numbers below `size`, in order, the same ones for the same seed."""
    if size <= MOST_SHUFFLED:
        return sorted(random.Random(seed).sample(range(size), size)[:count])
    import numpy as np

    generator = np.random.default_rng(list(seed.encode()))
    return np.sort(generator.choice(size, count, replace=False, shuffle=False)).tolist()


def data_seed(config: DatasetSettings) -> int:
    """The seed of everything that is drawn about the data."""
    return config.seed if config.data_seed is None else config.data_seed


def row_name(index: int, source: str) -> str:
    """How sentences call a row: "row 3 of train.jsonl", counted from 1."""
    return f"row {index + 1} of {shown_source(source)}"


# ── columns ───────────────────────────────────────────────────────────────────────────────────────────────────────────


NAMES_LISTED = 60
"""Characters of the list of columns in a sentence."""


def shown_source(source: str) -> str:
    """The name of a split in a sentence: a path with its middle left out, or a dataset of Hugging Face with its split."""
    return quote(Path(source), SOURCE)


def check_columns(rows: Rows, config: ColumnSettings, source: str) -> list[ConfigProblem]:
    """Faults in the columns of `rows` (at least one row); the sentences name the columns that exist."""
    optional = {"type_feature": "type", "system_feature": "system"}
    wanted = ["prompt_feature", *(["answer_feature"] if _needs_answer(config) else [])]
    wanted += [key for key, default in optional.items() if getattr(config, key) not in (default, "")]
    missing = missing_columns(rows, [getattr(config, key) for key in wanted])
    # All names of columns may take reading all rows, which a dataset without a fault is spared here.
    tests = without_tests(config.reward_functions, [*column_names(rows), "answer"]) if _runs_tests(config) else []
    if not missing and not tests:
        return []
    existing = f"{shown_source(source)} has the columns {_listed(column_names(rows))}"
    faults = [
        ConfigProblem(key, f"There is no column {quote(getattr(config, key), 24)}; {existing}.")
        for key in wanted
        if getattr(config, key) in missing
    ]
    for name in tests:
        sentence = (
            f"code_tests finds no column {quote(name, 24)} with tests; {existing}. Name it: code_tests(column=…)."
        )
        faults.append(ConfigProblem("reward_functions", sentence))
    return faults


def _listed(names: Sequence[str]) -> str:
    """As many of the names as a sentence holds, and how many more there are."""
    kept: list[str] = []
    for name in names:
        kept.append(quote(name, 24))
        if sum(map(len, kept)) + 2 * len(kept) > NAMES_LISTED:
            break
    rest = len(names) - len(kept)
    return ", ".join(kept) + (f" and {rest:,} more" if rest else "")


def _runs_tests(config: ColumnSettings) -> bool:
    return any(CODE_TESTS in name for name in config.reward_functions)


def _needs_answer(config: ColumnSettings) -> bool:
    return config.answer_feature != "answer" or any(
        metric_name(name) in COMPARING_REWARDS for name in config.reward_functions
    )
