"""Rows of one JSONL, JSON, CSV or parquet file: all in memory, only the first, or streamed."""

from __future__ import annotations

import csv
import io
import os
import re
import sys
import threading
import weakref
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO

from backend.runs.start_progress import LOOKED, telling
from backend.utils import documents
from backend.utils.errors import UserError
from backend.utils.files import open_regular, read_regular, reason
from backend.utils.machine import machine_bytes
from backend.utils.text import quote, reason_of

Row = dict[str, Any]
Rows = Sequence[Row]  # rows of a split: a list or lazy rows. Readers index single rows or iterate once in order.

PATH = 70  # characters of a path in a message
BATCH_ROWS, UNPACKED_BYTES = 256, 64 * 2**20  # parquet rows to unpack at once, and their approximate maximum bytes
HEAD_ROWS, HEAD_BYTES = 10_000, 16 * 2**20  # maximum rows and bytes of a large file's preview
LARGE_TEXT, LARGE_PARQUET, LARGE_ROWS = 64 * 2**20, 16 * 2**20, 1_000_000
"""Bytes of text or parquet, and parquet rows, above which a file counts as large."""


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except UnicodeDecodeError:
        raise UserError("data", f"{quote(path, PATH)} is not UTF-8 text.") from None
    except MemoryError:
        raise UserError("data", f"{quote(path, PATH)} is larger than the memory that is free.") from None
    except Exception as error:
        if path.suffix.lower() == ".parquet":  # pyarrow raises anything: odd dates, broken text and pages
            why = f" as parquet: {reason_of(error)}."
        elif isinstance(error, OSError):
            why = f": {reason(error)}."
        else:
            raise
        raise UserError("data", f"{quote(path, PATH)} cannot be read{why}") from None


def read_file(path: Path) -> list[Row]:
    """All rows of one file, by its suffix. Raises UserError naming file and line."""
    kind, limit = path.suffix.lower(), max(2 * 2**30, machine_bytes() // 8)
    with _explained(path):
        if kind != ".parquet" and path.stat().st_size > limit:
            advice = "make it JSONL, CSV or parquet, and switch Streaming on"
            too_large = f"is larger than the {limit / 2**30:.3g} GB that can be read here; {advice}"
            raise UserError("data", f"{quote(path, PATH)} {too_large}.")
        if kind != ".json":
            rows = KINDS[kind](path)
            return list(telling(rows, "Reading", path, lambda done: done / len(rows)))
        try:
            value = documents.parse_loose_json(read_regular(path).decode("utf-8-sig"))
        except documents.BrokenJson as error:
            line = f" at line {error.line}" if error.line else ""
            raise UserError("data", f"The JSON in {quote(path, PATH)} is broken{line}: {error.why}.") from None
        if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
            raise UserError("data", f"{quote(path, PATH)} must hold a list of objects.")
        return value


def read_head(path: Path) -> tuple[list[Row], int] | None:
    """(first rows of a large file, approximate count); None for a small or unsplittable one. Raises UserError."""
    kind, head, read = path.suffix.lower(), list[Row](), 0
    with _explained(path):
        size = path.stat().st_size
        if kind in (".jsonl", ".csv") and size > LARGE_TEXT:
            rows = KINDS[kind](path, HEAD_BYTES)
            return rows[:HEAD_ROWS], round(len(rows) * size / rows._starts[-1])
        if kind != ".parquet" or not size:
            return None
        rows = ParquetRows(path)
        if size <= LARGE_PARQUET and len(rows) <= LARGE_ROWS:
            return None
        for row in islice(rows, HEAD_ROWS):
            head.append(row)
            read += len(str(row))
            if read > HEAD_BYTES:
                break
        return head, len(rows)


def stream_file(path: Path) -> LazyRows:
    """Rows of one file, left on disk. Raises UserError naming file and line."""
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        only = f"only {', '.join(KINDS)} files can; make it one of them"
        raise UserError("streaming", f"{quote(path, PATH)} cannot be streamed: {only}.")
    with _explained(path):
        return kind(path)


def _refuse_equal_columns(names: Iterable[str], path: Path) -> None:
    twice = next((name for name, count in Counter(names).items() if name and count > 1), None)
    if twice is not None:
        raise UserError("data", f"{quote(path, PATH)} has two columns called {quote(twice, 40)}; rename one of them.")


OFFSET = "Q"  # eight bytes per file offset
BOM = b"\xef\xbb\xbf"
_AFTER_A_RETURN = re.compile(rb"(?<=\r)(?!\n)")


class LazyRows(Sequence[Row]):
    """Rows on disk. `known` caches values computed from all of them."""

    def __init__(self, columns: Iterable[str] | None = None) -> None:
        """`columns` in order of appearance; None if only a full pass would tell."""
        self.known_columns = None if columns is None else list(columns)
        self.known: dict[Any, Any] = {}

    @property
    def columns(self) -> list[str]:
        if self.known_columns is None:
            self.known_columns = list(dict.fromkeys(name for row in self for name in row))
        return self.known_columns

    def row(self, index: int) -> Row:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Row]:
        return map(self.row, range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        numbers = range(len(self))[index]  # raises IndexError
        return [self.row(each) for each in numbers] if isinstance(numbers, range) else self.row(numbers)


class _TextRows(LazyRows):
    """Rows of a text file, found by their offsets. With `most`, only those that begin before that many bytes."""

    def __init__(self, path: Path, most: int | None = None) -> None:
        super().__init__()
        self._path = path
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        weakref.finalize(self, os.close, self._file)
        self._stamp = self._written()
        self._starts = array(OFFSET)
        with open_regular(path, 1 << 20) as file:
            share, size = (lambda _: file.tell() / size), max(1, self._stamp[1])
            for start in telling(self._index(_lines_with_places(file)), "Looking for the rows of", path, share):
                self._starts.append(start)
                if most is not None and start >= most:
                    return
        self._starts.append(self._stamp[1])  # where the last row ends

    def __len__(self) -> int:
        return len(self._starts) - 1

    def row(self, index: int) -> Row:
        """Raises UserError if the file has changed."""
        self._check_unchanged()
        start = self._starts[index]
        with _explained(self._path):
            return self._parsed(os.pread(self._file, self._starts[index + 1] - start, start).decode(), index)

    def __iter__(self) -> Iterator[Row]:
        with _explained(self._path), open_regular(self._path, 1 << 20) as file:
            file.seek(self._starts[0])
            for index, (start, end) in enumerate(pairwise(self._starts)):
                if index % LOOKED == 0:
                    self._check_unchanged()
                yield self._parsed(file.read(end - start).decode(), index)

    def _check_unchanged(self) -> None:
        if self._written() != self._stamp:
            changed = "has been changed since its rows were counted; start again"
            raise UserError("data", f"{quote(self._path, PATH)} {changed}.")

    def _written(self) -> tuple[int, int]:
        about = os.fstat(self._file)
        return about.st_mtime_ns, about.st_size

    def _index(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[int]:
        raise NotImplementedError

    def _parsed(self, text: str, index: int) -> Row:
        raise NotImplementedError


class JsonlRows(_TextRows):
    """Rows of a JSONL file; invalid lines raise when read."""

    def _index(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[int]:
        for start, line in lines:
            # Only white space that is not ASCII needs decoding.
            if line.lstrip()[:1] == b"{" or line.decode().strip():
                yield start

    def _parsed(self, text: str, index: int) -> Row:
        try:
            # Blank lines may follow.
            value = documents.parse_loose_json(text.replace("\r", "\n").partition("\n")[0])
            if isinstance(value, dict):
                return value
            why = "must be an object with columns"
        except documents.BrokenJson as error:
            why = f"is broken: {error.why}"
        with open_regular(self._path) as file:
            places = enumerate(_lines_with_places(file), 1)
            number = next((number for number, (start, _) in places if start == self._starts[index]), 0)
        raise UserError("data", f"The JSON in line {number} of {quote(self._path, PATH)} {why}.")


class CsvRows(_TextRows):
    """Rows of a CSV file; a record may span lines."""

    def _index(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[int]:
        csv.field_size_limit(sys.maxsize)  # the default refuses a cell over 128 KB
        end, line_number, line = 0, 1, b""

        def texts() -> Iterator[str]:
            nonlocal end, line
            for start, line in lines:
                end = start + len(line)
                yield line.decode()

        reader = csv.reader(texts(), strict=True)
        try:
            self._columns = next(reader, [])
            self.known_columns = list(dict.fromkeys(self._columns))
            _refuse_equal_columns(self._columns, self._path)
            if len(self._columns) == 1 and (mark := re.search(rb'^[^"]*?([;\t])', line)):
                marks, named = "semicolons" if mark[1] == b";" else "tabs", quote(self._path, PATH)
                raise UserError("data", f"The columns of {named} are separated by {marks}: save it with commas.")
            start, line_number = end, reader.line_num + 1
            for record in reader:
                if len(record) > len(self._columns):
                    raise csv.Error("it has more fields than the header has columns")
                if record:
                    yield start
                start, line_number = end, reader.line_num + 1
        except csv.Error as error:
            where = f"line {line_number} of {quote(self._path, PATH)}"
            raise UserError("data", f"The CSV in {where} is broken: {quote(error)}.") from None

    def _parsed(self, text: str, index: int) -> Row:
        record = next(csv.reader(io.StringIO(text, newline=""), strict=True))
        return dict(zip(self._columns, [*record, *[None] * (len(self._columns) - len(record))], strict=True))


def _lines_with_places(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    r"""(offset, line with its end); lines end in \n, \r\n or \r."""
    start = len(BOM) if file.read(len(BOM)) == BOM else 0
    file.seek(start)
    while line := file.readline():
        for part in _AFTER_A_RETURN.split(line) if b"\r" in line else (line,):
            if part:
                yield start, part
                start += len(part)


class ParquetRows(LazyRows):
    """One batch in memory at a time. Reading a row starts at its row group's beginning; the Hub's are small."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet

        if not path.stat().st_size:
            raise UserError("data", f"{quote(path, PATH)} cannot be read as parquet: it is empty.")
        self._path, self._lock = path, threading.Lock()
        self._open = lambda: pyarrow.parquet.ParquetFile(path)
        self._file = self._open()
        super().__init__(self._file.schema_arrow.names)
        _refuse_equal_columns(self.columns, path)
        groups = self._file.metadata
        sizes = (groups.row_group(group).num_rows for group in range(groups.num_row_groups))
        self._starts = array(OFFSET, accumulate(sizes, initial=0))
        # The group that `row` reads, its batches, the one in memory, and the number of that one's first row.
        self._group, self._batches, self._first = -1, iter(()), 0
        self._batch: Any = None

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> Row:
        with self._lock, _explained(self._path):
            group = bisect_right(self._starts, index) - 1
            if group != self._group or index < self._first:
                batches = self._file.iter_batches(BATCH_ROWS, row_groups=[group], use_threads=False)
                self._batch, self._first = next(batches), self._starts[group]
                self._group, self._batches = group, batches
            while index >= (after := self._first + self._batch.num_rows):
                self._batch, self._first = next(self._batches), after
            return self._batch.slice(index - self._first, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[Row]:
        """In a pass of its own, with less work than row by row."""
        with _explained(self._path):
            for batch in self._open().iter_batches(BATCH_ROWS, use_threads=False):
                at_once = max(1, UNPACKED_BYTES // max(1, batch.nbytes))  # equal texts share memory until converted
                for start in range(0, batch.num_rows, at_once):
                    yield from batch.slice(start, at_once).to_pylist()


KINDS: dict[str, Any] = {".jsonl": JsonlRows, ".csv": CsvRows, ".parquet": ParquetRows}  # suffix → rows left on disk
