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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, TextIO

from backend.config.model_and_data_names import of_no_known_type
from backend.runs.start_progress import telling
from backend.utils import documents
from backend.utils.errors import UserError
from backend.utils.files import reason
from backend.utils.machine import machine_bytes
from backend.utils.text import quote

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
    """What is at `path`; "" for nothing. Raises UserError for what cannot be read as rows: a pipe, a device, a circle of links, a folder that
    may not be entered."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            return ""
        raise UserError(setting, f"{quote(path, PATH)} cannot be read: {reason(error)}.") from None
    if stat.S_ISDIR(mode):
        return "folder"
    if not stat.S_ISREG(mode):
        raise UserError(setting, f"{quote(path, PATH)} is no file with rows, but a pipe, a socket or a device.")
    return "file"


HEAD_ROWS, HEAD_BYTES = 10_000, 16 * 2**20
"""A preview of a large file shows at most so many rows, from at most so many bytes."""
LARGE_TEXT, LARGE_PARQUET = 64 * 2**20, 16 * 2**20
"""Bytes above which a file is large: what takes seconds to read."""
LARGE_ROWS = 1_000_000
"""Rows above which a parquet file is large, however few bytes it has: equal values pack to nothing."""


@dataclass(frozen=True, slots=True)
class Head:
    """The first rows of a file, and about how many it has."""

    rows: list[Row]
    about: int


def read_head(path: Path, streamed: bool = False) -> Head | None:
    """The first rows of a large file; None for a file that is not large, or of a kind that only opens as a whole. A parquet file that is `streamed`
    is large where its rows are, however few bytes they pack to. Raises UserError."""
    kind = path.suffix.lower()
    try:
        size = path.stat().st_size
        if kind in (".jsonl", ".csv") and size > LARGE_TEXT:
            return _head_of_text(path, kind, size)
        if kind == ".parquet" and (size > LARGE_PARQUET or _rows_of_parquet(path) > LARGE_ROWS):
            return _head_of_parquet(path)
        if kind == ".parquet" and streamed and size:
            head = _head_of_parquet(path)
            return head if len(head.rows) < head.about else None
    except UnicodeDecodeError:
        raise UserError("data", f"{quote(path, PATH)} is not UTF-8 text.") from None
    except OSError as error:
        raise UserError("data", f"{quote(path, PATH)} cannot be read: {reason(error)}.") from None
    return None


def _head_of_text(path: Path, kind: str, size: int) -> Head:
    newline = "" if kind == ".csv" else None
    read = 0

    def lines() -> Iterator[str]:
        nonlocal read
        for line in _lines(path, newline, whole=False):
            if read > HEAD_BYTES:
                return
            read += len(line.encode(errors="replace"))
            yield line

    made = _csv_rows(lines(), path) if kind == ".csv" else _jsonl_rows(lines(), path)
    rows = list(islice(made, HEAD_ROWS))
    return Head(rows, max(len(rows), round(size / max(read, 1) * len(rows))))


def _rows_of_parquet(path: Path) -> int:
    """As the file's end says; 0 of a broken one, about which reading it says what is wrong."""
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_metadata(path).num_rows
    except Exception:  # of pyarrow's many kinds
        return 0


def _head_of_parquet(path: Path) -> Head:
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        refuse_equal_columns(list(file.schema_arrow.names), path)
        rows: list[Row] = []
        size = 0
        for part in chain.from_iterable(map(unpacked_parts, file.iter_batches(BATCH_ROWS))):
            rows += part
            size += sum(map(_bytes, part))
            if len(rows) >= HEAD_ROWS or size > HEAD_BYTES:
                break
        return Head(rows[:HEAD_ROWS], file.metadata.num_rows)
    except (MemoryError, UserError):
        raise
    except Exception as error:  # as in `_read_parquet`
        raise UserError("data", f"{quote(path, PATH)} cannot be read as parquet: {first_line(error)}") from None


def largest_file() -> int:
    """Bytes of the largest file of text: what it becomes in memory is several times as much."""
    return max(2 * 2**30, machine_bytes() // 8)


def read_file(path: Path) -> list[Row]:
    """Rows of one file by its ending. Raises UserError naming file and line."""
    if path.suffix.lower() not in READERS:
        raise of_no_known_type(path)
    try:
        return READERS[path.suffix.lower()](path)
    except UnicodeDecodeError:
        raise UserError("data", f"{quote(path, PATH)} is not UTF-8 text.") from None
    except OSError as error:
        raise UserError("data", f"{quote(path, PATH)} cannot be read: {reason(error)}.") from None
    except MemoryError:
        raise UserError("data", f"{quote(path, PATH)} is larger than the memory that is free.") from None


# ── text ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _lines(path: Path, newline: str | None = None, *, whole: bool = True) -> Iterator[str]:
    """The lines of a text file, each of a limited length. `whole`: all of them will be kept in memory. Raises UserError."""
    if whole and path.stat().st_size > (limit := largest_file()):
        raise UserError("data", f"{quote(path, PATH)} is larger than the {limit / 2**30:.3g} GB that can be read here.")
    # Not blocking: since it was looked at, a pipe may have taken the file's place.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, encoding="utf-8-sig", newline=newline) as file:
        size = max(1, os.fstat(descriptor).st_size)
        lines = _limited(file, path)
        if whole:
            lines = telling(lines, "Reading", path, lambda _: os.lseek(descriptor, 0, os.SEEK_CUR) / size, unit="lines")
        yield from lines


def _limited(file: TextIO, path: Path) -> Iterator[str]:
    """The lines of an open file. Raises UserError for one that is too long."""
    number = 0
    while line := file.readline(LINE_LIMIT):
        number += 1
        if len(line) == LINE_LIMIT:
            raise UserError("data", f"Line {number:,} of {quote(path, PATH)} is longer than {LINE_LIMIT:,} characters.")
        yield line


def _read_jsonl(path: Path) -> list[Row]:
    return list(_jsonl_rows(_lines(path), path))


def _jsonl_rows(lines: Iterable[str], path: Path) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield json_object(line, f"line {number} of {quote(path, PATH)}")


def json_object(text: str, where: str) -> Row:
    """A row of a JSONL file; `where` names it. Raises UserError."""
    try:
        value = documents.parse_loose_json(text)
    except documents.BrokenJson as error:
        raise UserError("data", f"The JSON in {where} is broken: {error.why}.") from None
    if not isinstance(value, dict):
        raise UserError("data", f"The JSON in {where} must be an object with columns.")
    return value


def _read_json(path: Path) -> list[Row]:
    text = "".join(_lines(path))
    try:
        value = documents.parse_loose_json(text)
    except documents.BrokenJson as error:
        line = f" at line {error.line}" if error.line else ""
        raise UserError("data", f"The JSON in {quote(path, PATH)} is broken{line}: {error.why}.") from None
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise UserError("data", f"{quote(path, PATH)} must hold a list of objects.")
    return value


def _read_csv(path: Path) -> list[Row]:
    return list(_csv_rows(_lines(path, newline=""), path))


def _csv_rows(lines: Iterable[str], path: Path) -> Iterator[Row]:
    # The default refuses a cell over 128 KB; prompts that are too long are left out later.
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(lines, strict=True)
    try:
        refuse_equal_columns([name for name in reader.fieldnames or () if name], path)
        for row in reader:
            if None in row:
                raise ragged()
            yield dict(row)
    except csv.Error as error:
        line = reader.reader.line_num
        raise UserError("data", f"The CSV in line {line} of {quote(path, PATH)} is broken: {quote(error)}.") from None


def ragged() -> csv.Error:
    """Of a record that is longer than the header."""
    return csv.Error("it has more fields than the header has columns")


def refuse_equal_columns(names: Sequence[str], path: Path) -> None:
    """Raise UserError for a name that two columns have: of their values, all but the last column's would be lost."""
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise UserError("data", f"{quote(path, PATH)} has two columns called {quote(twice, 40)}; rename one of them.")


# ── parquet ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    if not path.stat().st_size:
        raise UserError("data", f"{quote(path, PATH)} cannot be read as parquet: it is empty.")
    try:
        return _unpacked(pyarrow.parquet.ParquetFile(path), path)
    except (MemoryError, UserError):
        raise
    except Exception as error:  # of any kind: dates out of Python's range, unknown time zones, broken text and pages
        raise UserError("data", f"{quote(path, PATH)} cannot be read as parquet: {first_line(error)}") from None


def _unpacked(file: Any, path: Path) -> list[Row]:
    """The rows of an open parquet file, counted while they are unpacked: a small file may stand for any number of them."""
    names = list(file.schema_arrow.names)
    refuse_equal_columns(names, path)
    limit = UNPACKED * path.stat().st_size + UNPACKED_FREE
    rows: list[Row] = []
    size = 0
    count = max(1, file.metadata.num_rows)
    batches = telling(
        file.iter_batches(BATCH_ROWS),
        "Reading",
        path,
        lambda _: len(rows) / count,
        amount=lambda _: len(rows),
        looked=1,
    )
    for part in chain.from_iterable(map(unpacked_parts, batches)):
        size += sum(map(_bytes, part))
        if size > limit:
            raise UserError(
                "data", f"{quote(path, PATH)} unpacks to more than {UNPACKED:,} times its size; it is not read."
            )
        rows += part
    return rows


def unpacked_parts(batch: Any) -> Iterator[list[Row]]:
    """The rows of a batch of a parquet file, some at a time: a column that is a dictionary shares its values between rows until they are
    Python's, at most all of it in every row."""
    at_once = max(1, UNPACKED_FREE // max(1, batch.nbytes))
    for start in range(0, batch.num_rows, at_once):
        yield batch.slice(start, at_once).to_pylist()


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
    return f"{quote(lines[0].rstrip('.'), 90)}."


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an exception's own code
        return ""


READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet,
}  # fmt: skip
"""Ending → what reads such a file. Each raises UserError, UnicodeDecodeError or OSError."""
