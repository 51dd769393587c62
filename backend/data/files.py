"""Rows of one JSONL, JSON, CSV or parquet file: all in memory, only the first, or streamed."""

from __future__ import annotations

import csv
import errno
import io
import os
import re
import stat
import sys
import threading
import weakref
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn, overload

from backend.config.model_and_data_names import of_no_known_type
from backend.runs.start_progress import LOOKED, telling
from backend.utils import documents
from backend.utils.errors import UserError
from backend.utils.files import open_regular, reason
from backend.utils.machine import machine_bytes
from backend.utils.text import quote

Row = dict[str, Any]
Rows = Sequence[Row]
"""Rows of a split: a list or lazy rows. Readers index single rows or iterate once in order."""

PATH = 70
"""Characters of a path in a message."""
BATCH_ROWS, UNPACKED_BYTES = 256, 64 * 2**20
"""Parquet rows to unpack at once, and their approximate maximum bytes."""
HEAD_ROWS, HEAD_BYTES = 10_000, 16 * 2**20
"""Maximum rows and bytes of a large file's preview."""
LARGE_TEXT, LARGE_PARQUET, LARGE_ROWS = 64 * 2**20, 16 * 2**20, 1_000_000
"""Bytes of text or parquet, and parquet rows, above which a file counts as large."""


def kind_of_path(path: Path, setting: str = "data") -> Literal["file", "folder", ""]:
    """Kind of `path`; "" if it does not exist. Raises UserError for pipes and devices."""
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


def first_line(error: BaseException) -> str:
    """First line of an exception's message, or its class name."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{quote(lines[0].rstrip('.'), 90)}."


def _refuse(path: Path, error: Exception) -> NoReturn:
    if isinstance(error, UserError):
        raise error
    if isinstance(error, UnicodeDecodeError):
        sentence = "is not UTF-8 text."
    elif isinstance(error, MemoryError):
        sentence = "is larger than the memory that is free."
    elif path.suffix.lower() == ".parquet":  # pyarrow raises anything: odd dates, broken text and pages
        sentence = f"cannot be read as parquet: {first_line(error)}"
    elif isinstance(error, OSError):
        sentence = f"cannot be read: {reason(error)}."
    else:
        raise error
    raise UserError("data", f"{quote(path, PATH)} {sentence}") from None


def read_file(path: Path) -> list[Row]:
    """All rows of one file, by its suffix. Raises UserError naming file and line."""
    kind = path.suffix.lower()
    try:
        if kind == ".parquet":
            file, rows = _parquet_file(path), list[Row]()
            count, batches = max(1, file.metadata.num_rows), file.iter_batches(BATCH_ROWS)
            share, amount = (lambda _: len(rows) / count), (lambda _: len(rows))
            for batch in telling(batches, "Reading", path, share, amount=amount, looked=1):
                rows.extend(_unpacked(batch))
            return rows
        if kind == ".jsonl":
            return list(_jsonl_rows(_lines(path), path))
        if kind == ".csv":
            return list(_csv_rows(_lines(path, newline=""), path))
        if kind == ".json":
            value = _parsed_json("".join(_lines(path)), quote(path, PATH), with_line=True)
            if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
                raise UserError("data", f"{quote(path, PATH)} must hold a list of objects.")
            return value
    except Exception as error:
        _refuse(path, error)
    raise of_no_known_type(path)


def read_head(path: Path, streamed: bool = False) -> tuple[list[Row], int] | None:
    """(first rows of a large file, its approximate row count); None for a small one or one that is only read whole.

    A `streamed` parquet file counts as large. Raises UserError.
    """
    kind, rows, read = path.suffix.lower(), list[Row](), 0
    try:
        size = path.stat().st_size
        if kind in (".jsonl", ".csv") and size > LARGE_TEXT:

            def lines() -> Iterator[str]:
                nonlocal read
                for line in _lines(path, "" if kind == ".csv" else None, whole=False):
                    if read > HEAD_BYTES:
                        return
                    read += len(line.encode(errors="replace"))
                    yield line

            made = _csv_rows(lines(), path) if kind == ".csv" else _jsonl_rows(lines(), path)
            rows = list(islice(made, HEAD_ROWS))
            return rows, max(len(rows), round(size / max(read, 1) * len(rows)))
        if kind == ".parquet" and size:
            file = _parquet_file(path)
            count = file.metadata.num_rows
            if size > LARGE_PARQUET or count > LARGE_ROWS or streamed:
                for row in (row for batch in file.iter_batches(BATCH_ROWS) for row in _unpacked(batch)):
                    rows.append(row)
                    read += len(str(row))
                    if len(rows) >= HEAD_ROWS or read > HEAD_BYTES:
                        break
                return (rows, count) if len(rows) < count or not streamed else None
    except Exception as error:
        _refuse(path, error)
    return None


def _lines(path: Path, newline: str | None = None, *, whole: bool = True) -> Iterator[str]:
    """Lines of a text file. With `whole`, a huge file is refused."""
    limit = max(2 * 2**30, machine_bytes() // 8)
    if whole and path.stat().st_size > limit:
        advice = "make it JSONL, CSV or parquet, and switch Streaming on"
        too_large = f"is larger than the {limit / 2**30:.3g} GB that can be read here; {advice}"
        raise UserError("data", f"{quote(path, PATH)} {too_large}.")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # non-blocking: a pipe would never answer
    with open(descriptor, encoding="utf-8-sig", newline=newline) as file:
        if not whole:
            yield from file
            return
        size = max(1, os.fstat(descriptor).st_size)
        lines = iter(file.readline, "")  # iteration over the file forbids `tell`
        yield from telling(lines, "Reading", path, lambda _: os.lseek(descriptor, 0, os.SEEK_CUR) / size, unit="lines")


def _jsonl_rows(lines: Iterable[str], path: Path) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield json_object(line, f"line {number} of {quote(path, PATH)}")


def json_object(text: str, where: str) -> Row:
    """Parse one JSONL row; `where` names it. Raises UserError."""
    value = _parsed_json(text, where)
    if not isinstance(value, dict):
        raise UserError("data", f"The JSON in {where} must be an object with columns.")
    return value


def _parsed_json(text: str, where: str, *, with_line: bool = False) -> Any:
    try:
        return documents.parse_loose_json(text)
    except documents.BrokenJson as error:
        line = f" at line {error.line}" if with_line and error.line else ""
        raise UserError("data", f"The JSON in {where} is broken{line}: {error.why}.") from None


_TOO_MANY_FIELDS = "it has more fields than the header has columns"


def _csv_rows(lines: Iterable[str], path: Path) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # the default refuses a cell over 128 KB
    reader = csv.DictReader(lines, strict=True)
    try:
        _refuse_equal_columns([name for name in reader.fieldnames or () if name], path)
        for row in reader:
            if None in row:
                raise csv.Error(_TOO_MANY_FIELDS)
            yield dict(row)
    except csv.Error as error:
        raise _broken_csv(path, reader.reader.line_num, error) from None


def _broken_csv(path: Path, line: int, error: csv.Error) -> UserError:
    return UserError("data", f"The CSV in line {line} of {quote(path, PATH)} is broken: {quote(error)}.")


def _refuse_equal_columns(names: Sequence[str], path: Path) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise UserError("data", f"{quote(path, PATH)} has two columns called {quote(twice, 40)}; rename one of them.")


def _parquet_file(path: Path) -> Any:
    import pyarrow.parquet

    if not path.stat().st_size:
        raise UserError("data", f"{quote(path, PATH)} cannot be read as parquet: it is empty.")
    file = pyarrow.parquet.ParquetFile(path)
    _refuse_equal_columns(list(file.schema_arrow.names), path)
    return file


def _unpacked(batch: Any) -> Iterator[Row]:
    """Rows of a batch in small chunks; equal texts share memory until converted."""
    at_once = max(1, UNPACKED_BYTES // max(1, batch.nbytes))
    for start in range(0, batch.num_rows, at_once):
        yield from batch.slice(start, at_once).to_pylist()


OFFSET = "Q"
"""Eight bytes per file offset."""
BOM = b"\xef\xbb\xbf"
_AFTER_A_RETURN = re.compile(rb"(?<=\r)(?!\n)")


class LazyRows(Sequence[Row]):
    """Rows on disk. `known` caches values computed from all of them."""

    def __init__(self, columns: Iterable[str] | None = None) -> None:
        """`columns` in order of appearance; None if only a full pass would tell."""
        self._names = None if columns is None else list(columns)
        self.known: dict[Any, Any] = {}

    @property
    def columns(self) -> list[str]:
        if self._names is None:
            self._names = list(dict.fromkeys(name for row in self for name in row))
        return self._names

    def without(self, names: Iterable[str]) -> list[str]:
        """Names without a column; reads rows until all names are found."""
        if self._names is not None:
            return [name for name in names if name not in self._names]
        missing = list(names)
        for row in self if missing else ():
            missing = [name for name in missing if name not in row]
            if not missing:
                break
        return missing

    def row(self, index: int) -> Row:
        """The row at a valid index."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self.row(each) for each in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.row(index % len(self))


def stream_file(path: Path) -> LazyRows:
    """Rows of one file, left on disk. Raises UserError naming file and line."""
    kinds = {".jsonl": JsonlRows, ".csv": CsvRows, ".parquet": ParquetRows}
    kind = kinds.get(path.suffix.lower())
    if kind is None:
        only = f"only {', '.join(kinds)} files can; make it one of them"
        raise UserError("streaming", f"{quote(path, PATH)} cannot be streamed: {only}.")
    try:
        return kind(path)
    except Exception as error:
        _refuse(path, error)


class _TextRows(LazyRows):
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        weakref.finalize(self, os.close, self._file)
        self._stamp = self._written()
        self._starts = array(OFFSET)
        with open_regular(path, 1 << 20) as file:
            share, size = (lambda _: file.tell() / size), max(1, self._stamp[1])
            lines, amount = _lines_with_places(file), (lambda _: len(self._starts))
            columns = self._index(telling(lines, "Looking for the rows of", path, share, amount=amount))
        self._starts.append(self._stamp[1])  # where the last row ends
        super().__init__(columns)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def row(self, index: int) -> Row:
        """Raises UserError if the file has changed."""
        self._check_unchanged()
        start = self._starts[index]
        return self._decoded(os.pread(self._file, self._starts[index + 1] - start, start), index)

    def __iter__(self) -> Iterator[Row]:
        with open_regular(self._path, 1 << 20) as file:
            file.seek(self._starts[0])
            for index in range(len(self)):
                if index % LOOKED == 0:
                    self._check_unchanged()
                yield self._decoded(file.read(self._starts[index + 1] - self._starts[index]), index)

    def _written(self) -> tuple[int, int]:
        about = os.fstat(self._file)
        return about.st_mtime_ns, about.st_size

    def _check_unchanged(self) -> None:
        if self._written() != self._stamp:
            changed = "has been changed since its rows were counted; start again"
            raise UserError("data", f"{quote(self._path, PATH)} {changed}.")

    def _decoded(self, text: bytes, index: int) -> Row:
        try:
            return self._parsed(text.decode(), index)
        except UnicodeDecodeError as error:
            _refuse(self._path, error)

    def _index(self, lines: Iterable[tuple[int, bytes]]) -> list[str] | None:
        """Append each row's offset to `_starts`; returns the columns, or None."""
        raise NotImplementedError

    def _parsed(self, text: str, index: int) -> Row:
        """Parse the row at the beginning of `text`."""
        raise NotImplementedError


class JsonlRows(_TextRows):
    """Rows of a JSONL file; invalid lines raise when read."""

    def _index(self, lines: Iterable[tuple[int, bytes]]) -> None:
        for start, line in lines:
            # Only white space that is not ASCII needs decoding.
            if line.lstrip()[:1] == b"{" or line.decode().strip():
                self._starts.append(start)

    def _parsed(self, text: str, index: int) -> Row:
        line = text.replace("\r", "\n").partition("\n")[0]  # blank lines may follow
        try:
            return json_object(line, "")
        except UserError:
            with open_regular(self._path) as file:
                places = enumerate(_lines_with_places(file), 1)
                number = next((number for number, (start, _) in places if start == self._starts[index]), 0)
            return json_object(line, f"line {number} of {quote(self._path, PATH)}")


class CsvRows(_TextRows):
    """Rows of a CSV file; a record may span lines."""

    def _index(self, lines: Iterable[tuple[int, bytes]]) -> list[str]:
        csv.field_size_limit(sys.maxsize)
        end = 0

        def texts() -> Iterator[str]:
            nonlocal end
            for start, line in lines:
                end = start + len(line)
                yield line.decode()

        reader = csv.reader(texts(), strict=True)
        try:
            self._columns = next(reader, [])
            _refuse_equal_columns([name for name in self._columns if name], self._path)
            start = end
            for record in reader:
                if record:
                    self._starts.append(start)
                    if len(record) > len(self._columns):
                        raise csv.Error(_TOO_MANY_FIELDS)
                start = end
        except csv.Error as error:
            raise _broken_csv(self._path, reader.line_num, error) from None
        return list(dict.fromkeys(self._columns))

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
    """Rows of a parquet file, one batch in memory at a time.

    Reading a row starts at its row group's beginning; the Hub's groups are small.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._file = _parquet_file(path)
        groups = self._file.metadata
        self._starts = array(OFFSET, [0])
        for group in range(groups.num_row_groups):
            self._starts.append(self._starts[-1] + groups.row_group(group).num_rows)
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None
        # The group being read; the numbers of the first row of the batch in memory and of the first after it.
        self._group, self._first, self._after = -1, 0, 0
        super().__init__(self._file.schema_arrow.names)

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> Row:
        with self._lock:
            try:
                group = bisect_right(self._starts, index) - 1
                if group != self._group or index < self._first:
                    self._batches = self._file.iter_batches(BATCH_ROWS, row_groups=[group], use_threads=False)
                    self._group, self._first = group, self._starts[group]
                    self._after = self._first
                while index >= self._after:
                    self._batch = next(self._batches)
                    self._first, self._after = self._after, self._after + self._batch.num_rows
                return self._batch.slice(index - self._first, 1).to_pylist()[0]
            except Exception as error:
                self._group = -1
                _refuse(self._path, error)

    def __iter__(self) -> Iterator[Row]:
        batches = self._file.iter_batches(BATCH_ROWS, use_threads=False)
        while True:
            with self._lock:
                try:
                    batch = next(batches, None)
                except Exception as error:
                    _refuse(self._path, error)
            if batch is None:
                return
            try:
                yield from _unpacked(batch)
            except Exception as error:
                _refuse(self._path, error)
