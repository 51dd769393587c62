"""What the Dataset page shows of a dataset before training: its splits, its columns, their likely roles, its gaps.

Rows come from `backend.data.rows` alone, so the page shows what training reads, and faults have the sentences of `check`.
Nothing is changed here, nothing is tokenised (`backend.data.prompt_preview` does), and nothing is downloaded unless asked.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from backend.config.config import Config, keys_used_by, problems
from backend.config.model_and_data_names import DATA_SUFFIXES, check_data
from backend.config.setting_groups import ColumnSettings, DatasetSettings
from backend.data.dataset_columns import likeliest_column
from backend.data.files import Row, kind_of_path
from backend.data.row_steps import MapRows
from backend.data.row_views import Rows, column_names, missing_columns
from backend.data.rows import SPLITS, Splits, check_columns, read_splits
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import user_path
from backend.utils.hub_cache import is_dataset_cached

READING = keys_used_by("rows")
"""Settings that decide which rows the dataset has."""
MAPPING = keys_used_by("row_view", "prompt_limit")
"""Settings that decide how a row becomes a prompt."""
CODE = ("reward_functions_file", "reward_network", "reward_timeout")
"""Settings of the process in which a map function is called."""
COLUMNS_OF_STEPS = ("prompt_feature", "answer_feature", "reward_functions_file")
"""Settings that the steps of rows depend on besides: the columns that they write, and the file of the map function."""
KINDS_GUESSED = {"prompt_feature": ("text", "messages"), "answer_feature": ("text", "number", "yes or no")}
"""Settings whose column is guessed → the kinds that its cells may have. Type and system may be absent, and are not guessed."""
INSPECTED_ROWS = 200
"""Rows from which the kind of a column is inferred."""


def settings_of(raw: Mapping[str, Any]) -> Config:
    """The settings that a preview needs; an invalid setting is left at its default, because the form reports it."""
    given = {key: raw[key] for key in (*READING, *MAPPING, *CODE) if raw.get(key) not in (None, "", [])}
    wrong = {fault.setting for fault in problems(given)} - {"model", "data"}
    return Config(**{key: value for key, value in given.items() if key not in wrong})


# ── reading, once ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class LoadedDataset:
    """A dataset that was read. `computed` caches what is costly to compute from its rows, by what that depends on."""

    splits: Splits
    computed: dict[Any, Any] = field(default_factory=dict)

    def rows(self, split: str) -> Rows:
        return self.splits.rows(split)

    def source(self, split: str, config: DatasetSettings) -> str:
        """The name of the split in sentences, the same as in `check` and in training."""
        return self.splits.source.get(split, config.data)


_opened: tuple[Any, LoadedDataset] | None = None
_reading = threading.Lock()


def open_dataset(config: Config, map_rows: MapRows | None = None) -> LoadedDataset:
    """The rows of all splits, of large files the first ones; read again only when the settings or the files have changed. `map_rows`: as in
    `read_splits`. Raises UserError."""
    global _opened
    with _reading:
        files = [user_path(name, "data") for name in (config.data, config.valid_data, config.test_data) if name]
        makes = config.prompt_template or config.answer_pattern or config.map_function
        depends = (*READING, *(COLUMNS_OF_STEPS if makes else ()))
        stamp = (*(getattr(config, key) for key in depends), map_rows is None, [_written(file) for file in files])
        if _opened is None or _opened[0] != stamp:
            _opened = None  # frees the old rows first: two datasets may not fit in memory
            # The sets of `eval_data` are read when a run begins: the page shows the splits.
            own = config.model_copy(update={"eval_data": {}})
            _opened = (stamp, LoadedDataset(read_splits(own, map_rows, head=True)))
        return _opened[1]


def _written(path: Path) -> list[tuple[str, int, int]]:
    """Name, time and size of every file that the rows may come from."""
    try:
        files = [path] if path.is_file() else _data_files(path) if path.is_dir() else []
        return [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files]
    except OSError:  # reading the rows meets the same error, and reports it
        return []


def _data_files(folder: Path) -> list[Path]:
    try:
        return sorted(file for file in folder.iterdir() if file.suffix in DATA_SUFFIXES and file.is_file())
    except OSError:  # as above
        return []


def form_of(data: str) -> str:
    """file, folder or hub; a path that does not exist is a file."""
    try:
        kind = kind_of_path(user_path(data, "data"))
        check_data(data)
    except UserError:
        return "file"
    return kind or "hub"


def is_here(data: str) -> bool:
    """Whether the dataset can be read without a download. A name that looks like a path is never looked up on the Hub."""
    return form_of(data) != "hub" or is_dataset_cached(data)


# ── splits and columns ───────────────────────────────────────────────────────────────────────────────────────────────


def split_names(data: str) -> list[str]:
    """The splits that a folder has files for; a single file has none, and `hub_choices` lists those of the Hub."""
    if form_of(data) != "folder":
        return []
    return list(dict.fromkeys(file.stem for file in _data_files(user_path(data, "data"))))


def hub_choices(data: str, config_name: str) -> dict[str, list[str]]:
    """Configurations and splits of a dataset on Hugging Face; empty where neither cache nor network has them."""
    import datasets

    configs = _names_or_none(lambda: datasets.get_dataset_config_names(data))
    chosen = config_name if config_name in configs else configs[0] if len(configs) == 1 else config_name or None
    return {"configs": configs, "splits": _names_or_none(lambda: datasets.get_dataset_split_names(data, chosen))}


def _names_or_none(look_up: Callable[[], Iterable[Any]]) -> list[str]:
    try:
        return [str(name) for name in look_up()]
    except Exception:  # reading the rows meets the same error, and reports it
        return []


def columns_of(splits: Sequence[Rows]) -> list[dict[str, str]]:
    """Every column of the splits, in order of appearance: its name, kind of value and an example."""
    examples: dict[str, Any] = dict.fromkeys(name for rows in splits for name in column_names(rows))
    for row in islice(chain.from_iterable(splits), INSPECTED_ROWS):
        for name, cell in row.items():
            if examples[name] is None and cell not in ("", []):
                examples[name] = cell
    return [{"name": name, "kind": kind_of(cell), "example": cell_text(cell, 120)} for name, cell in examples.items()]


def kind_of(value: Any) -> str:
    """The kind of a cell's value, in a word."""
    if isinstance(value, list):
        is_chat = bool(value) and all(isinstance(item, dict) and {"role", "content"} <= item.keys() for item in value)
        return "messages" if is_chat else "list"
    kinds = {str: "text", bool: "yes or no", int: "number", float: "number", dict: "object", type(None): "empty"}
    return kinds.get(type(value), type(value).__name__)


def cell_text(value: Any, most: int) -> str:
    """A cell as text, at most `most` characters of it."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value[:most]
    if kind_of(value) == "messages":
        return "\n".join(f"{message['role']}: {message['content']}" for message in value)[:most]
    return json.dumps(value, ensure_ascii=False, default=str)[:most]


def likely(columns: Sequence[Mapping[str, str]], config: ColumnSettings) -> dict[str, str]:
    """Setting → the column that is probably meant, for prompt and answer where the configured column does not exist."""
    kinds = {column["name"]: column["kind"] for column in columns}
    guessed: dict[str, str] = {}
    for key, allowed in KINDS_GUESSED.items():
        if getattr(config, key) in kinds:
            continue
        taken = {*guessed.values(), *(getattr(config, other) for other in KINDS_GUESSED if other != key)}
        free = [name for name, kind in kinds.items() if name not in taken and kind in allowed]
        if (name := likeliest_column(key, free)) is not None:
            guessed[key] = name
    return guessed


# ── what is wrong, what is missing ───────────────────────────────────────────────────────────────────────────────────


def column_faults(opened: LoadedDataset, config: Config) -> list[ConfigProblem]:
    """The faults that `check` finds in the columns: those of the first split that has any."""
    by_split = (check_columns(opened.rows(split), config, opened.source(split, config))
                for split in SPLITS if opened.rows(split))  # fmt: skip
    return next((faults for faults in by_split if faults), [])


def gaps(rows: Rows, config: ColumnSettings) -> dict[str, int | None]:
    """Rows without an answer, and rows that repeat the prompt of an earlier row; None where there is no such column."""
    missing, prompts = 0, set[Any]()
    for row in rows:
        missing += not cell_text(row.get(config.answer_feature), 64).strip()
        prompts.add(_identity(row, config))
    absent = missing_columns(rows, (config.answer_feature, config.prompt_feature))
    return {
        "unanswered": None if config.answer_feature in absent else missing,
        "repeated": None if config.prompt_feature in absent else len(rows) - len(prompts),
    }


def _identity(row: Row, config: ColumnSettings) -> Any:
    prompt, system = row.get(config.prompt_feature), row.get(config.system_feature)
    return (
        prompt if isinstance(prompt, str) and not system else (cell_text(prompt, 1 << 30), cell_text(system, 1 << 30))
    )


def overview(config: Config, map_rows: MapRows | None = None) -> dict[str, Any]:
    """Everything that the page shows of the dataset: {form, splits {split: {rows, about, source, unanswered, repeated}}, names (of splits),
    columns, likely, faults, notes, written (names, times and sizes of the files)}. `about`: how many rows a large file has, of which `rows` were
    read; else None. A dataset that cannot be read gives its faults beside what is known all the same."""
    known: dict[str, Any] = {
        "form": form_of(config.data), "names": split_names(config.data), "splits": {}, "columns": [], "likely": {},
        "faults": [], "notes": [], "written": [],
    }  # fmt: skip
    try:
        known["written"] = _written(user_path(config.data, "data"))
        opened = open_dataset(config, map_rows)
    except UserError as mistake:
        return known | {"faults": [fault.to_dict() for fault in mistake.faults]}
    present = [split for split in SPLITS if opened.rows(split)]
    columns = columns_of([opened.rows(split) for split in present])
    return known | {
        "splits": {split: _split(opened, split, config) for split in present},
        "columns": columns,
        "likely": likely(columns, config),
        "faults": [fault.to_dict() for fault in column_faults(opened, config)],
        "notes": opened.splits.notes,
    }


def _split(opened: LoadedDataset, split: str, config: ColumnSettings) -> dict[str, Any]:
    key = ("gaps", split, config.prompt_feature, config.system_feature, config.answer_feature)
    if key not in opened.computed:
        opened.computed[key] = gaps(opened.rows(split), config)
    source, about = opened.splits.source.get(split, ""), opened.splits.about.get(split)
    return {"rows": len(opened.rows(split)), "about": about, "source": source, **opened.computed[key]}
