"""A dataset's rows by split, from a file, a folder or the Hugging Face Hub, and whether they have the configured columns.

Every row is a dict of its columns. Prompts, chat templates and tokens are in `backend.data.problems`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.data.files import PATH, Row, first_line, kind_of_path, read_file
from backend.spec.faults import Fault, Mistake
from backend.spec.model_and_data_names import DATA_SUFFIXES as SUFFIXES
from backend.spec.model_and_data_names import check_data
from backend.spec.rewards.catalog import COMPARING_REWARDS, metric_name
from backend.spec.rewards.code_tests import without_tests
from backend.spec.setting_groups import ColumnSettings, DatasetSettings
from backend.spec.user_input.paths import user_path
from backend.spec.user_input.text import shown

SOURCE = 50
"""Characters of a file's path, or of a dataset's name, in a sentence that names a row or columns."""
SPLITS = ("train", "valid", "test")
SPLIT_NAMES = {"valid": ("valid", "validation", "val", "dev"), "test": ("test",), "train": ("train",)}


@dataclass(slots=True)
class Splits:
    """Raw rows by split; `source[split]` names the file or Hub split they came from."""

    train: list[Row]
    valid: list[Row] = field(default_factory=list)
    test: list[Row] = field(default_factory=list)
    source: dict[str, str] = field(default_factory=dict)

    def rows(self, split: str) -> list[Row]:
        """The rows of `split`, one of SPLITS."""
        return {"train": self.train, "valid": self.valid, "test": self.test}[split]


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_splits(config: DatasetSettings) -> Splits:
    """Rows of all splits of `config.data`: a file (all of it is train), a folder, or a Hub id. Raises Mistake."""
    path = user_path(config.data, "data")
    kind = kind_of_path(path)
    if kind == "file":
        splits = Splits(read_file(path), source={"train": str(path)})
    elif kind == "folder":
        splits = _read_folder(path, config)
    else:
        splits = _read_hub(config)
    if not splits.train:
        raise Mistake("data", f"The dataset {shown_source(config.data)} has no rows to train on.")
    return _hold_out(splits, config)


def _read_folder(folder: Path, config: DatasetSettings) -> Splits:
    files = {split: _split_file(folder, names) for split, names in _names_by_split(config).items()}
    if files["train"] is None:
        expected = ", ".join(shown(config.train_split, 20) + suffix for suffix in SUFFIXES)
        raise Mistake("data", f"The folder {shown(folder, PATH)} has none of {expected}.")
    _check_named_splits(files, config, f"The folder {shown(folder, PATH)} has no file of that name.")
    rows = {split: read_file(file) if file else [] for split, file in files.items()}
    return Splits(**rows, source={split: str(file) for split, file in files.items() if file})


def _names_by_split(config: DatasetSettings) -> dict[str, tuple[str, ...]]:
    """Split → the names it may have in the dataset: the configured name, or all usual names where it is the default."""
    configured = {"train": config.train_split, "valid": config.valid_split, "test": config.test_split}
    return {split: SPLIT_NAMES[split] if name == split else (name,) for split, name in configured.items()}


def _check_named_splits(available: Mapping[str, Any], config: DatasetSettings, why: str) -> None:
    """Raise Mistake for a missing split that the user named. Splits under their default name may be absent."""
    for key in ("valid_split", "test_split"):
        split, name = key.removesuffix("_split"), getattr(config, key)
        if name != split and available[split] is None:
            raise Mistake(key, f"There is no split {shown(name, 40)}. {why}")


def _split_file(folder: Path, names: Sequence[str]) -> Path | None:
    for name in names:
        for suffix in SUFFIXES:
            path = user_path(name + suffix, "data", folder)
            if kind_of_path(path) == "file":
                return path
    return None


def _read_hub(config: DatasetSettings) -> Splits:
    """A dataset on Hugging Face through `datasets`. Raises Mistake where it cannot be reached or does not exist."""
    check_data(config.data)
    from backend.data import hub_rows

    name = shown(config.data, 50)
    try:
        dataset = hub_rows.load(config.data, config.dataset_config or None)
        available = {str(split): split for split in dataset}
        chosen = {
            split: next((name for name in names if name in available), None)
            for split, names in _names_by_split(config).items()
        }
        existing = shown(", ".join(available), 60)
        if chosen["train"] is None:
            raise Mistake("train_split", f"{name} has no split {shown(config.train_split, 40)}; it has {existing}.")
        _check_named_splits(chosen, config, f"{name} has {existing}.")
        rows = {
            split: [dict(row) for row in dataset[available[name]]] if name else [] for split, name in chosen.items()
        }
    except Mistake:
        raise
    except Exception as error:  # `datasets` raises anything at all for rows it cannot read
        raise Mistake("data", f"There is no file or folder {name}, and Hugging Face's dataset of that name "
                      f"cannot be loaded: {shown(first_line(error).rstrip('.'), 60)}.") from error  # fmt: skip
    return Splits(**rows, source={split: f"{config.data}, {name}" for split, name in chosen.items() if name})


def _hold_out(splits: Splits, config: DatasetSettings) -> Splits:
    """Move a seeded share of the training rows to valid when there is no valid split and `validation_split` is set."""
    if splits.valid or not config.validation_split:
        return splits
    count = max(1, round(len(splits.train) * config.validation_split))
    if count >= len(splits.train):
        raise Mistake("validation_split", f"Holding out {count} of {len(splits.train)} rows leaves none to train on.")
    order = random.Random(f"hold-out {config.seed}").sample(range(len(splits.train)), len(splits.train))
    held_out, remaining = sorted(order[:count]), sorted(order[count:])
    rows = splits.train
    splits.valid, splits.train = [rows[i] for i in held_out], [rows[i] for i in remaining]
    return splits


# ── columns ───────────────────────────────────────────────────────────────────────────────────────────────────────────


NAMES_LISTED = 60
"""Characters of the list of columns in a sentence."""


def shown_source(source: str) -> str:
    """The name of a split in a sentence: a path with its middle left out, or a dataset of Hugging Face with its split."""
    return shown(Path(source), SOURCE)


def check_columns(rows: Sequence[Row], config: ColumnSettings, source: str) -> list[Fault]:
    """Faults in the columns of `rows` (at least one row); the sentences name the columns that exist."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    existing = f"{shown_source(source)} has the columns {_listed(columns)}"
    faults: list[Fault] = []
    if config.prompt_feature not in columns:
        faults.append(Fault("prompt_feature", f"There is no column {shown(config.prompt_feature, 24)}; {existing}."))
    if config.answer_feature not in columns and _needs_answer(config):
        faults.append(Fault("answer_feature", f"There is no column {shown(config.answer_feature, 24)}; {existing}."))
    for name in without_tests(config.reward_functions, [*columns, "answer"]):
        sentence = (
            f"code_tests finds no column {shown(name, 24)} with tests; {existing}. Name it: code_tests(column=…)."
        )
        faults.append(Fault("reward_functions", sentence))
    for key, default in (("type_feature", "type"), ("system_feature", "system")):
        name = getattr(config, key)
        if name not in (default, "") and name not in columns:
            faults.append(Fault(key, f"There is no column {shown(name, 24)}; {existing}."))
    return faults


def _listed(names: Sequence[str]) -> str:
    """As many of the names as a sentence holds, and how many more there are."""
    kept: list[str] = []
    for name in names:
        kept.append(shown(name, 24))
        if sum(map(len, kept)) + 2 * len(kept) > NAMES_LISTED:
            break
    rest = len(names) - len(kept)
    return ", ".join(kept) + (f" and {rest:,} more" if rest else "")


def _needs_answer(config: ColumnSettings) -> bool:
    return config.answer_feature != "answer" or any(
        metric_name(name) in COMPARING_REWARDS for name in config.reward_functions
    )
