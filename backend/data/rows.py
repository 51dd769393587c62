"""A dataset's rows by split, from a file, a folder or the Hugging Face Hub, and whether they have the configured columns.

Every row is a dict of its columns. Prompts, chat templates and tokens are in `backend.data.problems`.
"""

from __future__ import annotations

import csv
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.spec.faults import Fault, Mistake
from backend.spec.model_and_data_names import DATA_SUFFIXES as SUFFIXES
from backend.spec.model_and_data_names import check_data
from backend.spec.rewards.catalog import COMPARING_REWARDS, metric_name
from backend.spec.setting_groups import ColumnSettings, DatasetSettings
from backend.spec.user_input.text import shown

Row = dict[str, Any]
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
    path = Path(config.data).expanduser()
    if path.is_file():
        splits = Splits(_read_file(path), source={"train": str(path)})
    elif path.is_dir():
        splits = _read_folder(path, config)
    else:
        splits = _read_hub(config)
    if not splits.train:
        raise Mistake("data", f"The dataset {config.data} has no rows to train on.")
    return _hold_out(splits, config)


def _read_folder(folder: Path, config: DatasetSettings) -> Splits:
    files = {split: _split_file(folder, names) for split, names in _names_by_split(config).items()}
    if files["train"] is None:
        expected = ", ".join(config.train_split + suffix for suffix in SUFFIXES)
        raise Mistake("data", f"The folder {folder} has none of {expected}.")
    _check_named_splits(files, config, f"The folder {folder} has no file of that name.")
    rows = {split: _read_file(file) if file else [] for split, file in files.items()}
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
            raise Mistake(key, f"There is no split {name}. {why}")


def _split_file(folder: Path, names: Sequence[str]) -> Path | None:
    for name in names:
        for suffix in SUFFIXES:
            if (folder / (name + suffix)).is_file():
                return folder / (name + suffix)
    return None


def _read_file(path: Path) -> list[Row]:
    """Rows of one file by its ending. Raises Mistake naming file and line."""
    readers: dict[str, Callable[[Path], list[Row]]] = {
        ".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet,
    }  # fmt: skip
    check_data(str(path))  # refuses a suffix without a reader
    reader = readers[path.suffix.lower()]
    try:
        return reader(path)
    except UnicodeDecodeError:
        raise Mistake("data", f"{path} is not UTF-8 text.") from None
    except OSError as error:
        raise Mistake("data", f"{path} cannot be read: {error.strerror or error}.") from None


def _read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                rows.append(_json_object(line, f"line {number} of {path}"))
    return rows


def _json_object(text: str, where: str) -> Row:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise Mistake("data", f"The JSON in {where} is broken: {error.msg}.") from None
    if not isinstance(value, dict):
        raise Mistake("data", f"The JSON in {where} must be an object with columns.")
    return value


def _read_json(path: Path) -> list[Row]:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise Mistake("data", f"The JSON in {path} is broken at line {error.lineno}: {error.msg}.") from None
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise Mistake("data", f"{path} must hold a list of objects.")
    return value


def _read_csv(path: Path) -> list[Row]:
    # The default refuses a cell over 128 KB; prompts that are too long are left out later.
    csv.field_size_limit(sys.maxsize)
    rows: list[Row] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                if None in row:
                    raise csv.Error("it has more fields than the header has columns")
                rows.append(dict(row))
        except csv.Error as error:
            raise Mistake("data", f"The CSV in line {reader.reader.line_num} of {path} is broken: {error}.") from None
    return rows


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise Mistake("data", f"{path} cannot be read as parquet: {first_line(error)}") from None


def _read_hub(config: DatasetSettings) -> Splits:
    """A dataset on Hugging Face through `datasets`. Raises Mistake where it cannot be reached or does not exist."""
    check_data(config.data)
    from backend.data import hub_rows

    try:
        dataset = hub_rows.load(config.data, config.dataset_config or None)
    except Mistake:
        raise
    except Exception as error:  # `datasets` raises anything at all for rows it cannot read
        raise Mistake("data", f"There is no file or folder {config.data}, and Hugging Face's dataset of that name "
                      f"cannot be loaded: {first_line(error)}") from error  # fmt: skip
    available = ", ".join(map(str, dataset))
    names = {
        split: next((name for name in names if name in dataset), None)
        for split, names in _names_by_split(config).items()
    }
    if names["train"] is None:
        raise Mistake("train_split", f"{config.data} has no split {config.train_split}; it has {available}.")
    _check_named_splits(names, config, f"{config.data} has {available}.")
    rows = {split: [dict(row) for row in dataset[name]] if name else [] for split, name in names.items()}
    return Splits(**rows, source={split: f"{config.data}, {name}" for split, name in names.items() if name})


def first_line(error: Exception) -> str:
    """The first line of an exception's text as a sentence; its class where it has no text."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text if text.endswith(".") else f"{text}."


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


def check_columns(rows: Sequence[Row], config: ColumnSettings, source: str) -> list[Fault]:
    """Faults in the columns of `rows` (at least one row); the sentences name the columns that exist."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    existing = f"{shown(Path(source), 80)} has the columns {shown(', '.join(columns), 60)}"
    faults: list[Fault] = []
    if config.prompt_feature not in columns:
        faults.append(Fault("prompt_feature", f"There is no column {shown(config.prompt_feature, 40)}; {existing}."))
    if config.answer_feature not in columns and _needs_answer(config):
        faults.append(Fault("answer_feature", f"There is no column {shown(config.answer_feature, 40)}; {existing}."))
    for key, default in (("type_feature", "type"), ("system_feature", "system")):
        name = getattr(config, key)
        if name not in (default, "") and name not in columns:
            faults.append(Fault(key, f"There is no column {shown(name, 40)}; {existing}."))
    return faults


def _needs_answer(config: ColumnSettings) -> bool:
    return config.answer_feature != "answer" or any(
        metric_name(name) in COMPARING_REWARDS for name in config.reward_functions
    )
