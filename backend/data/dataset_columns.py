"""Column names from a dataset file's first bytes, and guesses of their roles. Not of parquet files and the Hub."""

import codecs
import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from backend.utils.files import open_regular

HEAD_BYTES = 1 << 16
NAMES: dict[str, tuple[str, ...]] = {  # setting → usual column names, most likely first
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


def columns_of(path: Path) -> list[str]:
    """Column names of a csv, jsonl or json file; empty if the first lines do not show them."""
    try:
        with open_regular(path) as file:  # a pipe would never answer, and neither would some files of /proc
            head = codecs.getincrementaldecoder("utf-8-sig")().decode(file.read(HEAD_BYTES) or b"")
        if path.suffix.lower() == ".csv":
            rows: list[list[str]] = [row for row in csv.reader(head.splitlines()[:2]) if row]
            return rows[0] if rows else []
    except (OSError, ValueError, csv.Error):  # not to be read, no UTF-8, no path, no CSV
        return []
    try:
        value, _ = json.JSONDecoder().raw_decode(head.lstrip().removeprefix("[").lstrip())
    except (ValueError, RecursionError):
        return []
    return [str(key) for key in cast("dict[str, Any]", value)] if isinstance(value, dict) else []


def guessed(columns: Iterable[str]) -> dict[str, str]:
    """Setting → likely column: a usual name, else one that contains a usual name as a word."""
    free, guesses = list(columns), dict[str, str]()
    for key in NAMES:
        column = likeliest_column(key, free)
        if column is not None:
            guesses[key] = column
            free.remove(column)
    return guesses


def likeliest_column(setting: str, free: Sequence[str]) -> str | None:
    names = NAMES[setting]
    plain = {column: column.strip().lower().replace("-", "_").replace(" ", "_") for column in free}
    exact = (column for name in names for column in free if plain[column] == name)
    within = (column for name in names for column in free if name in plain[column].split("_"))
    return next(exact, None) or next(within, None)
