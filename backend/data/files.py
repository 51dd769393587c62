"""The rows of one file, by its ending. A file is somebody else's: whatever it holds, reading it ends, in rows or in one sentence.

Which files a dataset has is `backend.data.rows`'s.
"""

from __future__ import annotations

import csv
import errno
import os
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from backend.spec import loose_json
from backend.spec.faults import Mistake
from backend.spec.machine import machine_bytes
from backend.spec.model_and_data_names import of_no_known_type
from backend.spec.user_input.paths import reason
from backend.spec.user_input.text import shown

Row = dict[str, Any]

PATH = 70
"""Characters of a file's path in a sentence."""
LINE_LIMIT = 64 * 2**20
"""Characters of one line: a row of a JSONL file, or a line of a CSV file."""
BATCH_ROWS = 256
"""Rows of a parquet file that are unpacked at once."""
UNPACKED, UNPACKED_FREE = 200, 64 * 2**20
"""A parquet file may unpack to this many times its size, and to this many bytes whatever its size. Text packs to a third; columns that
repeat themselves pack better, and a file made to fill the memory a million times. Rows count as in Python, at 64 bytes a
value and more, so short rows that resemble each other reach some forty times."""
CELL_BYTES = 64
"""Bytes of Python's smallest value with its place in a row."""


def kind_of_path(path: Path, setting: str = "data") -> Literal["file", "folder", ""]:
    """What is at `path`; "" for nothing. Raises Mistake for what cannot be read as rows: a pipe, a device, a circle of links, a folder that
    may not be entered."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            return ""
        raise Mistake(setting, f"{shown(path, PATH)} cannot be read: {reason(error)}.") from None
    if stat.S_ISDIR(mode):
        return "folder"
    if not stat.S_ISREG(mode):
        raise Mistake(setting, f"{shown(path, PATH)} is no file with rows, but a pipe, a socket or a device.")
    return "file"


def largest_file() -> int:
    """Bytes of the largest file of text: what it becomes in memory is several times as much."""
    return max(2 * 2**30, machine_bytes() // 8)


def read_file(path: Path) -> list[Row]:
    """Rows of one file by its ending. Raises Mistake naming file and line."""
    if path.suffix.lower() not in READERS:
        raise of_no_known_type(path)
    try:
        return READERS[path.suffix.lower()](path)
    except UnicodeDecodeError:
        raise Mistake("data", f"{shown(path, PATH)} is not UTF-8 text.") from None
    except OSError as error:
        raise Mistake("data", f"{shown(path, PATH)} cannot be read: {reason(error)}.") from None
    except MemoryError:
        raise Mistake("data", f"{shown(path, PATH)} is larger than the memory that is free.") from None


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _lines(path: Path, newline: str | None = None) -> Iterator[str]:
    """The lines of a text file, each of a limited length. Raises Mistake."""
    if path.stat().st_size > (limit := largest_file()):
        raise Mistake("data", f"{shown(path, PATH)} is larger than the {limit / 2**30:.3g} GB that can be read here.")
    # Not blocking: since it was looked at, a pipe may have taken the file's place.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, encoding="utf-8-sig", newline=newline) as file:
        number = 0
        while line := file.readline(LINE_LIMIT):
            number += 1
            if len(line) == LINE_LIMIT:
                raise Mistake(
                    "data", f"Line {number:,} of {shown(path, PATH)} is longer than {LINE_LIMIT:,} characters."
                )
            yield line


def _read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            rows.append(_json_object(line, f"line {number} of {shown(path, PATH)}"))
    return rows


def _json_object(text: str, where: str) -> Row:
    try:
        value = loose_json.parse(text)
    except loose_json.BrokenJson as error:
        raise Mistake("data", f"The JSON in {where} is broken: {error.why}.") from None
    if not isinstance(value, dict):
        raise Mistake("data", f"The JSON in {where} must be an object with columns.")
    return value


def _read_json(path: Path) -> list[Row]:
    text = "".join(_lines(path))
    try:
        value = loose_json.parse(text)
    except loose_json.BrokenJson as error:
        line = f" at line {error.line}" if error.line else ""
        raise Mistake("data", f"The JSON in {shown(path, PATH)} is broken{line}: {error.why}.") from None
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise Mistake("data", f"{shown(path, PATH)} must hold a list of objects.")
    return value


def _read_csv(path: Path) -> list[Row]:
    # The default refuses a cell over 128 KB; prompts that are too long are left out later.
    csv.field_size_limit(sys.maxsize)
    rows: list[Row] = []
    reader = csv.DictReader(_lines(path, newline=""), strict=True)
    try:
        _check_columns_differ([name for name in reader.fieldnames or () if name], path)
        for row in reader:
            if None in row:
                raise csv.Error("it has more fields than the header has columns")
            rows.append(dict(row))
    except csv.Error as error:
        line = reader.reader.line_num
        raise Mistake("data", f"The CSV in line {line} of {shown(path, PATH)} is broken: {shown(error)}.") from None
    return rows


def _check_columns_differ(names: Sequence[str], path: Path) -> None:
    """Raise Mistake for a name that two columns have: of their values, all but the last column's would be lost."""
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise Mistake("data", f"{shown(path, PATH)} has two columns called {shown(twice, 40)}; rename one of them.")


# ── parquet ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    if not path.stat().st_size:
        raise Mistake("data", f"{shown(path, PATH)} cannot be read as parquet: it is empty.")
    try:
        return _unpacked(pyarrow.parquet.ParquetFile(path), path)
    except (MemoryError, Mistake):
        raise
    except Exception as error:  # of any kind: dates out of Python's range, unknown time zones, broken text and pages
        raise Mistake("data", f"{shown(path, PATH)} cannot be read as parquet: {first_line(error)}") from None


def _unpacked(file: Any, path: Path) -> list[Row]:
    """The rows of an open parquet file, counted while they are unpacked: a small file may stand for any number of them."""
    names = list(file.schema_arrow.names)
    _check_columns_differ(names, path)
    limit = UNPACKED * path.stat().st_size + UNPACKED_FREE
    rows: list[Row] = []
    size = 0
    for batch in file.iter_batches(BATCH_ROWS):
        # A column that is a dictionary shares its values between rows until they are Python's: at most all of it in every row.
        at_once = max(1, UNPACKED_FREE // max(1, batch.nbytes))
        for start in range(0, batch.num_rows, at_once):
            unpacked = batch.slice(start, at_once).to_pylist()
            size += sum(_bytes(row) for row in unpacked)
            if size > limit:
                raise Mistake(
                    "data", f"{shown(path, PATH)} unpacks to more than {UNPACKED:,} times its size; it is not read."
                )
            rows += unpacked
    return rows


def _bytes(value: Any) -> int:
    """About the memory of a cell, or of a row."""
    if isinstance(value, (str, bytes)):
        return CELL_BYTES + len(value)
    if isinstance(value, dict):
        return CELL_BYTES + sum(map(_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return CELL_BYTES + sum(map(_bytes, value))
    return CELL_BYTES


def first_line(error: BaseException) -> str:
    """The first line of an exception's text as a sentence; its class where it has no text."""
    lines = _text_of(error).strip().splitlines() or [type(error).__name__]
    return f"{shown(lines[0].rstrip('.'), 90)}."


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an exception's own code
        return ""


READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet,
}  # fmt: skip
"""Ending → what reads such a file. Each raises Mistake, UnicodeDecodeError or OSError."""
