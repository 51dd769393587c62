"""A dataset that is an object of the program, written into the run's folder: the run can then be resumed, cloned and evaluated as any other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from backend.spec.faults import Mistake
from backend.spec.user_input.text import shown
from backend.spec.whole_file import replace_file

FOLDER = "data"
"""Of a run: the rows of each split, as JSON lines."""
MOST_BYTES = 1 << 30
"""Of a split as text. What is larger has a file of its own already, or should."""
_SPLITS = {"train": "train", "valid": "valid", "validation": "valid", "test": "test"}


def write_dataset(dataset: Any, folder: Path) -> None:
    """Write rows (an iterable of mappings, as a list or a `datasets.Dataset`), or splits of such rows by name, below `folder`. Raises Mistake
    on `dataset`, and DiskFault."""
    splits = dataset if isinstance(dataset, Mapping) else {"train": dataset}
    for name, rows in splits.items():
        if name not in _SPLITS:
            raise Mistake("dataset", f"A dataset has the splits train, valid and test, not {shown(name, 40)}.")
        if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
            raise Mistake(
                "dataset",
                f"Rows are an iterable of mappings, not {type(rows).__name__}; a path or an id goes under data.",
            )
        folder.mkdir(exist_ok=True)
        replace_file(folder / f"{_SPLITS[name]}.jsonl", _lines(rows, name))


def _lines(rows: Iterable[Any], split: str) -> Iterator[bytes]:
    size = 0
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise Mistake("dataset", f"Row {number:,} of {split} is {type(row).__name__}, not a mapping of columns.")
        line = _line(row, f"row {number:,} of {split}")
        size += len(line)
        if size > MOST_BYTES:
            raise Mistake(
                "dataset",
                f"The rows of {split} take more than {MOST_BYTES >> 30} GB; write them to a file, and name it under data.",
            )
        yield line


def _line(row: Mapping[Any, Any], where: str) -> bytes:
    try:
        return json.dumps(dict(row), ensure_ascii=False).encode(errors="replace") + b"\n"
    except (TypeError, ValueError, RecursionError):
        raise Mistake(
            "dataset",
            f"The column {shown(_odd_column(row), 40)} in {where} holds what JSON cannot: a run keeps its rows as text.",
        ) from None


def _odd_column(row: Mapping[Any, Any]) -> Any:
    for name, value in row.items():
        try:
            json.dumps({name: value})
        except (TypeError, ValueError, RecursionError):
            return name
    return ""
