"""A dataset as a person looks at it before training: its splits, its columns, which of them are what, and its gaps.

Rows come from `backend.data.rows` alone, so what is shown is what training reads, and what is wrong is said as `check` says
it. Nothing is changed here, nothing is tokenised (`backend.data.prompt_preview` does), and nothing is fetched unless told to.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.data.rows import Row, Splits, check_columns, read_splits
from backend.spec.config import Config, keys_used_by, problems
from backend.spec.dataset_columns import NAMES
from backend.spec.faults import Fault, Mistake
from backend.spec.model_and_data_names import DATA_SUFFIXES, check_data

SPLITS = ("train", "valid", "test")
READING = keys_used_by("rows")
"""Settings that decide which rows there are."""
MAPPING = keys_used_by("row_view", "prompt_limit")
"""Settings that decide what becomes of a row."""
LIKELY = {key: NAMES[key] for key in ("prompt_feature", "answer_feature")}
"""Setting → names that such a column goes by, the likeliest first. The others may be absent, and are not guessed."""
LOOKED_AT = 200
"""Rows that a column's kind is judged by."""


def settings_of(raw: Mapping[str, Any]) -> Config:
    """The settings that a preview needs; one that cannot be used stands at its default, for the form says so itself."""
    given = {key: raw[key] for key in (*READING, *MAPPING) if raw.get(key) not in (None, "")}
    wrong = {fault.setting for fault in problems(given)} - {"model", "data"}
    return Config(**{key: value for key, value in given.items() if key not in wrong})


# ── reading, once ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Opened:
    """A dataset that was read. `noted` keeps what was costly to find out about its rows, by what that depends on."""

    splits: Splits
    noted: dict[Any, Any] = field(default_factory=dict)

    def rows(self, split: str) -> list[Row]:
        return getattr(self.splits, split)

    def source(self, split: str, config: Config) -> str:
        """What sentences call the split, as `check` and training do."""
        return self.splits.source.get(split, config.data)


_opened: tuple[Any, Opened] | None = None
_reading = threading.Lock()


def open_dataset(config: Config) -> Opened:
    """The rows of all splits; read again only when the settings or the files are others now. Raises Mistake."""
    global _opened
    with _reading:
        stamp = (*(getattr(config, key) for key in READING), _written(Path(config.data).expanduser()))
        if _opened is None or _opened[0] != stamp:
            _opened = None  # two datasets at once may be more than memory holds
            _opened = (stamp, Opened(read_splits(config)))
        return _opened[1]


def _written(path: Path) -> list[tuple[str, int, int]]:
    """Name, time and size of every file that the rows may come from."""
    files = [path] if path.is_file() else _data_files(path) if path.is_dir() else []
    return [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files]


def _data_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in DATA_SUFFIXES and file.is_file())


def form_of(data: str) -> str:
    """file, folder or hub; a file or folder that is not there is a file."""
    path = Path(data).expanduser()
    if path.is_dir():
        return "folder"
    try:
        check_data(data)
    except Mistake:
        return "file"
    return "file" if path.is_file() else "hub"


def is_here(data: str) -> bool:
    """Whether the dataset can be read without fetching it. What looks like a path is looked for on this machine alone."""
    if form_of(data) != "hub":
        return True
    from huggingface_hub.constants import HF_HOME, HF_HUB_CACHE

    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets")
    names = [_plain(folder.name) for folder in prepared.iterdir()] if prepared.is_dir() else []
    downloaded = Path(HF_HUB_CACHE, f"datasets--{data.replace('/', '--')}", "snapshots").is_dir()
    return downloaded or _plain(data.replace("/", "___")) in names


def _plain(name: str) -> str:
    """`datasets` keeps MyData as my_data."""
    return name.lower().replace("_", "")


# ── splits and columns ───────────────────────────────────────────────────────────────────────────────────────────────


def split_names(data: str) -> list[str]:
    """The splits that a folder has files for; a single file has none, and the Hub is asked by `hub_choices`."""
    path = Path(data).expanduser()
    return list(dict.fromkeys(file.stem for file in _data_files(path))) if path.is_dir() else []


def hub_choices(data: str, config_name: str) -> dict[str, list[str]]:
    """Configurations and splits of a dataset on Hugging Face; empty where neither cache nor network tells."""
    import datasets

    configs = _asked(lambda: datasets.get_dataset_config_names(data))
    chosen = config_name if config_name in configs else configs[0] if len(configs) == 1 else config_name or None
    return {"configs": configs, "splits": _asked(lambda: datasets.get_dataset_split_names(data, chosen))}


def _asked(ask: Any) -> list[str]:
    try:
        return [str(name) for name in ask()]
    except Exception:  # whatever is wrong, reading the rows meets it too, and says it
        return []


def columns_of(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Every column of the rows, in the order they come up: its name, kind of value and an example."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{"name": name, **_about(name, rows[:LOOKED_AT])} for name in names]


def _about(name: str, rows: Sequence[Row]) -> dict[str, str]:
    found = next((row[name] for row in rows if row.get(name) not in (None, "", [])), None)
    return {"kind": kind_of(found), "example": shown(found, 120)}


def kind_of(value: Any) -> str:
    """What a cell holds, in a word."""
    if isinstance(value, list):
        is_chat = bool(value) and all(isinstance(one, dict) and {"role", "content"} <= one.keys() for one in value)
        return "messages" if is_chat else "list"
    kinds = {str: "text", bool: "yes or no", int: "number", float: "number", dict: "object", type(None): "empty"}
    return kinds.get(type(value), type(value).__name__)


def shown(value: Any, most: int) -> str:
    """A cell as text, at most `most` characters of it."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value[:most]
    if kind_of(value) == "messages":
        return "\n".join(f"{one['role']}: {one['content']}" for one in value)[:most]
    return json.dumps(value, ensure_ascii=False, default=str)[:most]


def likely(columns: Sequence[Mapping[str, str]], config: Config) -> dict[str, str]:
    """For the prompt and the answer, where the column that is set does not exist: the one that it probably is."""
    there = {column["name"]: column["kind"] for column in columns}
    found: dict[str, str] = {}
    for key, names in LIKELY.items():
        if getattr(config, key) in there:
            continue
        taken = {*found.values(), *(getattr(config, other) for other in LIKELY if other != key)}
        free = [name for name, kind in there.items() if name not in taken and _may_be(key, kind)]
        if (name := _best(names, free)) is not None:
            found[key] = name
    return found


def _may_be(key: str, kind: str) -> bool:
    return kind in ("text", "messages") if key == "prompt_feature" else kind in ("text", "number", "yes or no")


def _best(names: Sequence[str], free: Sequence[str]) -> str | None:
    """The column of the likeliest name, else one whose name holds such a name as a word."""
    exact = (column for name in names for column in free if column.strip().lower() == name)
    within = (column for name in names for column in free if name in column.lower().replace("-", "_").split("_"))
    return next(exact, None) or next(within, None)


# ── what is wrong, what is missing ───────────────────────────────────────────────────────────────────────────────────


def column_faults(opened: Opened, config: Config) -> list[Fault]:
    """What `check` says of the columns: the faults of the first split that has any."""
    found = (check_columns(opened.rows(split), config, opened.source(split, config))
             for split in SPLITS if opened.rows(split))  # fmt: skip
    return next((faults for faults in found if faults), [])


def gaps(rows: Sequence[Row], config: Config) -> dict[str, int | None]:
    """Rows without an answer, and rows whose prompt stood in an earlier row; None where there is no such column."""
    missing = sum(not shown(row.get(config.answer_feature), 64).strip() for row in rows)
    repeated = len(rows) - len({_identity(row, config) for row in rows})
    return {
        "unanswered": missing if any(config.answer_feature in row for row in rows) else None,
        "repeated": repeated if any(config.prompt_feature in row for row in rows) else None,
    }


def _identity(row: Row, config: Config) -> Any:
    prompt, system = row.get(config.prompt_feature), row.get(config.system_feature)
    return prompt if isinstance(prompt, str) and not system else (shown(prompt, 1 << 30), shown(system, 1 << 30))


def overview(config: Config) -> dict[str, Any]:
    """All that can be said of a dataset at once: {form, splits {split: {rows, source, unanswered, repeated}}, names (of
    splits), columns, likely, faults, written (what tells one version of the files from another)}. What cannot be read is a fault, and the rest is said all the same."""
    said: dict[str, Any] = {
        "form": form_of(config.data), "names": split_names(config.data), "splits": {}, "columns": [], "likely": {},
        "faults": [], "written": _written(Path(config.data).expanduser()),
    }  # fmt: skip
    try:
        opened = open_dataset(config)
    except Mistake as mistake:
        return said | {"faults": [fault.to_dict() for fault in mistake.faults]}
    present = [split for split in SPLITS if opened.rows(split)]
    columns = columns_of([row for split in present for row in opened.rows(split)])
    return said | {
        "splits": {split: _split(opened, split, config) for split in present},
        "columns": columns,
        "likely": likely(columns, config),
        "faults": [fault.to_dict() for fault in column_faults(opened, config)],
    }


def _split(opened: Opened, split: str, config: Config) -> dict[str, Any]:
    key = ("gaps", split, config.prompt_feature, config.system_feature, config.answer_feature)
    if key not in opened.noted:
        opened.noted[key] = gaps(opened.rows(split), config)
    source = opened.splits.source.get(split, "")
    return {"rows": len(opened.rows(split)), "source": source, **opened.noted[key]}
