"""Which columns a file of rows has, from its first line, and which of them are meant as prompt, answer, type and
system.

Only the first bytes of text files are read. Parquet files and datasets on Hugging Face are left to `backend.data`,
which loads them.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from backend.utils.files import open_regular

HEAD_BYTES = 1 << 16
NAMES: dict[str, tuple[str, ...]] = {
    "prompt_feature": (
        *("prompt", "question", "problem", "query", "instruction", "input"),
        *("messages", "conversation", "text"),
    ),
    "answer_feature": (
        *("answer", "solution", "final_answer", "expected_answer", "ground_truth", "gold", "target", "label"),
        *("expected", "reference", "output", "response", "result"),
    ),
    "type_feature": ("type", "category", "kind"),
    "system_feature": ("system", "system_prompt"),
}
"""Setting → usual names of that column, the likeliest first."""


def columns_of(path: Path) -> list[str]:
    """Names of the columns of a csv, jsonl or json file, in their order; empty where the first lines do not show
    them."""
    try:
        with open_regular(path) as file:  # a pipe would never answer, and neither would some files of /proc
            head = codecs.getincrementaldecoder("utf-8-sig")().decode(file.read(HEAD_BYTES) or b"")
        if path.suffix.lower() == ".csv":
            rows: list[list[str]] = [row for row in csv.reader(head.splitlines()[:2]) if row]
            return rows[0] if rows else []
    except (OSError, ValueError, csv.Error):  # not to be read, no UTF-8, no path, no CSV
        return []
    return _keys_of_first_object(head.lstrip().removeprefix("[").lstrip())


def guessed(columns: Iterable[str]) -> dict[str, str]:
    """Setting of a column → the column that is meant: one of the usual names, else one that holds such a name as a
    word."""
    free, guesses = list(columns), dict[str, str]()
    for key in NAMES:
        column = likeliest_column(key, free)
        if column is not None:
            guesses[key] = column
            free.remove(column)
    return guesses


def likeliest_column(setting: str, free: Sequence[str]) -> str | None:
    """The column among `free` with the likeliest name for `setting`, else one whose name has such a name as a word."""
    names = NAMES[setting]
    plain = {column: column.strip().lower().replace("-", "_").replace(" ", "_") for column in free}
    exact = (column for name in names for column in free if plain[column] == name)
    within = (column for name in names for column in free if name in plain[column].split("_"))
    return next(exact, None) or next(within, None)


def _keys_of_first_object(text: str) -> list[str]:
    try:
        value, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return []
    return [str(key) for key in cast("dict[str, Any]", value)] if isinstance(value, dict) else []
