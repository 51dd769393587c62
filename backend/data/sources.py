"""From the name of a dataset (a file, a folder, an id of the Hub) to its rows by split.

What is made of the rows, and which of them a run uses for what, is `backend.data.rows`'s.
"""

from __future__ import annotations

import csv
import io
import os
import re
import sys
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from backend.config.model_and_data_names import DATA_SUFFIXES as SUFFIXES
from backend.config.model_and_data_names import check_data
from backend.data.files import (
    BATCH_ROWS,
    HEAD_ROWS,
    LINE_LIMIT,
    PATH,
    Row,
    first_line,
    json_object,
    kind_of_path,
    ragged,
    read_file,
    read_head,
    refuse_equal_columns,
    unpacked_parts,
)
from backend.data.row_views import LazyRows, Rows
from backend.runs.start_progress import LOOKED, telling
from backend.utils.errors import UserError
from backend.utils.files import open_regular, reason, user_path
from backend.utils.text import quote

# Rows of files that stay on the disk: read when they are asked for, by an index that is made in one pass.

OFFSET = "Q"
"""Type code of a place in a file: eight bytes."""
FINDING = "Looking for the rows of"
READ_AT_ONCE = 1 << 20
"""Bytes of a file that one pass reads at once."""
BOM = b"\xef\xbb\xbf"
_AFTER_A_RETURN = re.compile(rb"(?<=\r)(?!\n)")


class LineRows(LazyRows):
    """Rows that each begin at some place of a text file. Threads may read at once."""

    def __init__(self, path: Path) -> None:
        """Raises UserError, OSError and UnicodeDecodeError, as reading all of it does."""
        self._path = path
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        weakref.finalize(self, os.close, self._file)
        self._stamp = self._written()
        self._starts = array(OFFSET)
        with open_regular(path, READ_AT_ONCE) as file:
            columns = self._index(file)
        self._starts.append(self._stamp[1])  # where the last row ends
        super().__init__(columns)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def sizes(self) -> _Sizes:
        return _Sizes(self._starts)

    def row(self, index: int) -> Row:
        """Raises UserError where the file has been written since."""
        self._check_unchanged()
        start = self._starts[index]
        return self._decoded(os.pread(self._file, self._starts[index + 1] - start, start), index)

    def __iter__(self) -> Iterator[Row]:
        """All rows in one pass over the file, which takes half the time of asking for each. Raises UserError, as `row` does."""
        with open_regular(self._path, READ_AT_ONCE) as file:
            file.seek(self._starts[0])
            for index in range(len(self)):
                if index % LOOKED == 0:
                    self._check_unchanged()
                yield self._decoded(file.read(self._starts[index + 1] - self._starts[index]), index)
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        if self._written() != self._stamp:
            raise UserError(
                "data", f"{quote(self._path, PATH)} has been changed since its rows were counted; start again."
            )

    def _decoded(self, text: bytes, index: int) -> Row:
        try:
            return self._parsed(text.decode(), index)
        except UnicodeDecodeError:
            raise _no_text(self._path) from None

    def _written(self) -> tuple[int, int]:
        about = os.fstat(self._file)
        return about.st_mtime_ns, about.st_size

    def _index(self, file: BinaryIO) -> dict[str, None] | None:
        """Note where each row begins. → names of the columns, None where rows would have to be parsed for them."""
        raise NotImplementedError

    def _parsed(self, text: str, index: int) -> Row:
        """The row at the beginning of `text`, which goes on to where the next one begins."""
        raise NotImplementedError


class _Sizes:
    """Bytes of each row."""

    def __init__(self, starts: array[int]) -> None:
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> int:
        return self._starts[index + 1] - self._starts[index]


class JsonlRows(LineRows):
    """A line that is no row is found when it is read, as all are before a run begins (`backend.data.problems.chat_sizes`)."""

    def _index(self, file: BinaryIO) -> None:
        size = max(1, self._stamp[1])
        lines = lines_of(file, self._path)
        read = telling(lines, FINDING, self._path, lambda _: file.tell() / size, amount=lambda _: len(self._starts))
        for start, line in read:
            # White space that is not ASCII is told after decoding, which hardly any line needs.
            if line.lstrip()[:1] == b"{" or line.decode().strip():
                self._starts.append(start)

    def _parsed(self, text: str, index: int) -> Row:
        line = text.replace("\r", "\n").partition("\n")[0]  # blank lines may follow
        try:
            return json_object(line, "")
        except UserError:
            return json_object(line, f"line {self._line_number(index)} of {quote(self._path, PATH)}")

    def _line_number(self, index: int) -> int:
        with open_regular(self._path) as file:
            starts = (start for start, _ in lines_of(file, self._path))
            return next((number for number, start in enumerate(starts, 1) if start == self._starts[index]), 0)


class CsvRows(LineRows):
    """Of a record that goes over several lines, the place of the first."""

    def _index(self, file: BinaryIO) -> dict[str, None]:
        csv.field_size_limit(sys.maxsize)
        size = max(1, self._stamp[1])
        read = telling(
            lines_of(file, self._path), FINDING, self._path, lambda _: file.tell() / size,
            amount=lambda _: len(self._starts),
        )  # fmt: skip
        lines = _CountedLines(read)
        reader = csv.reader(lines, strict=True)
        try:
            self._columns = next(reader, [])
            refuse_equal_columns([name for name in self._columns if name], self._path)
            start = lines.end
            for record in reader:
                if record:
                    self._starts.append(start)
                    if len(record) > len(self._columns):
                        raise ragged()
                start = lines.end
        except csv.Error as error:
            raise UserError(
                "data", f"The CSV in line {reader.line_num} of {quote(self._path, PATH)} is broken: {quote(error)}."
            ) from None
        return dict.fromkeys(self._columns)

    def _parsed(self, text: str, index: int) -> Row:
        record = next(csv.reader(io.StringIO(text, newline=""), strict=True))
        return dict(zip(self._columns, [*record, *[None] * (len(self._columns) - len(record))], strict=True))


class _CountedLines:
    """Lines as text, for the reader of a format that takes several of them for a row. `end`: where the last one ends in the file."""

    def __init__(self, lines: Iterator[tuple[int, bytes]]) -> None:
        self._lines = lines
        self.end = 0

    def __iter__(self) -> _CountedLines:
        return self

    def __next__(self) -> str:
        start, line = next(self._lines)
        self.end = start + len(line)
        return line.decode()


def lines_of(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    r"""(place, line with its end) of every line; lines end in \n, \r\n or \r, as Python reads text. Raises UserError for a line that is too
    long."""
    start = len(BOM) if file.read(len(BOM)) == BOM else 0
    file.seek(start)
    number = 0
    while line := file.readline(LINE_LIMIT):
        number += 1
        if len(line) == LINE_LIMIT:
            raise UserError("data", f"Line {number:,} of {quote(path, PATH)} is longer than {LINE_LIMIT:,} bytes.")
        for part in _AFTER_A_RETURN.split(line) if b"\r" in line else (line,):
            if part:
                yield start, part
                start += len(part)


class ParquetRows(LazyRows):
    """Rows of a parquet file, a batch of a row group in memory at a time.

    A row group is read from its beginning to the row that is asked for: files with groups of a thousand rows, as those of the Hub have, answer at
    once, and the larger the groups are the longer it takes.
    """

    def __init__(self, path: Path) -> None:
        """Raises UserError."""
        import pyarrow.parquet

        self._path, self._lock = path, threading.Lock()
        if not path.stat().st_size:
            raise UserError("data", f"{quote(path, PATH)} cannot be read as parquet: it is empty.")
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
            groups = self._file.metadata
            self._starts = array(OFFSET, [0])
            for group in range(groups.num_row_groups):
                self._starts.append(self._starts[-1] + groups.row_group(group).num_rows)
            names = list(self._file.schema_arrow.names)
        except Exception as error:  # of any kind, for a file of somebody else
            raise _unreadable(path, error) from None
        refuse_equal_columns(names, path)
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None
        self._group, self._first, self._after = -1, 0, 0
        """The group whose batches are being read; the numbers of the first row of the batch in memory and of the first after it."""
        super().__init__(names)

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> Row:
        with self._lock:
            try:
                self._seek(index)
                return self._batch.slice(index - self._first, 1).to_pylist()[0]
            except Exception as error:  # of any kind: dates out of Python's range, broken pages
                self._group = -1
                raise _unreadable(self._path, error) from None

    def __iter__(self) -> Iterator[Row]:
        """All rows in one pass, which takes a fraction of the time of asking for each. Raises UserError, as `row` does."""
        batches = self._file.iter_batches(BATCH_ROWS, use_threads=False)
        while (batch := self._next_of(batches)) is not None:
            parts = unpacked_parts(batch)
            while part := self._next_of(parts):
                yield from part

    def _next_of(self, pieces: Iterator[Any]) -> Any:
        """The next batch of the file or part of a batch; None after the last."""
        with self._lock:
            try:
                return next(pieces, None)
            except Exception as error:  # as in `row`
                raise _unreadable(self._path, error) from None

    def _seek(self, index: int) -> None:
        """Have the batch with this row in memory."""
        from bisect import bisect_right

        group = bisect_right(self._starts, index) - 1
        if group != self._group or index < self._first:
            self._batches = self._file.iter_batches(BATCH_ROWS, row_groups=[group], use_threads=False)
            self._group, self._first = group, self._starts[group]
            self._after = self._first
        while index >= self._after:
            self._batch = next(self._batches)
            self._first, self._after = self._after, self._after + self._batch.num_rows


def _no_text(path: Path) -> UserError:
    return UserError("data", f"{quote(path, PATH)} is not UTF-8 text.")


def _unreadable(path: Path, error: BaseException) -> UserError:
    return UserError("data", f"{quote(path, PATH)} cannot be read as parquet: {first_line(error)}")


KINDS = {".jsonl": JsonlRows, ".csv": CsvRows, ".parquet": ParquetRows}


def stream_file(path: Path) -> LazyRows:
    """The rows of one file, left on the disk. Raises UserError naming file and line."""
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        raise UserError(
            "streaming",
            f"{quote(path, PATH)} cannot be streamed: only {', '.join(KINDS)} files can; make it one of them.",
        )
    try:
        return kind(path)
    except UnicodeDecodeError:
        raise _no_text(path) from None
    except OSError as error:
        raise UserError("data", f"{quote(path, PATH)} cannot be read: {reason(error)}.") from None


# ── sources ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Found:
    """Rows of one split, the file or split that they come from, and about how many there are where only the first were read."""

    rows: Rows
    source: str
    about: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """How rows are read: into memory, or left on the disk (`streamed`); of large files, the first rows alone (`head`), as a preview does."""

    streamed: bool = False
    head: bool = False

    def file(self, path: Path) -> Found:
        """The rows of a file. Raises UserError."""
        if self.head and (part := read_head(path, self.streamed)) is not None:
            return Found(part.rows, str(path), part.about)
        return Found(stream_file(path) if self.streamed else read_file(path), str(path))

    def split(self, dataset: Any, source: str) -> Found:
        """The rows of a split as `datasets` has it, mapped into memory from its files. Raises what `datasets` raises."""
        if self.head and (self.streamed or len(dataset) > HEAD_OF_HUB):
            return Found([dict(row) for row in islice(dataset, HEAD_ROWS)], source, len(dataset))
        return Found(HubRows(dataset) if self.streamed else [dict(row) for row in dataset], source)


HEAD_OF_HUB = 200_000
"""Rows of a split of the Hub that a preview reads in full."""


class HubRows(LazyRows):
    """Rows of a split of the Hub. `datasets` keeps them in a file that is mapped into memory, so that any row is at hand and none is held."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset.column_names)
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> Row:
        """Raises UserError for a row that `datasets` cannot read."""
        try:
            return dict(self._dataset[index])
        except Exception as error:  # `datasets` raises anything at all
            raise UserError("data", f"Row {index + 1:,} of the dataset cannot be read: {first_line(error)}") from error


Names = Mapping[str, Sequence[str]]
"""Split → the names that it may have in the dataset, the likeliest first."""
Check = Callable[[Mapping[str, Any], str], None]
"""Called with what there is by split (None where there is none), and the splits that a dataset of the Hub has, "" for a folder. Raises UserError
for what must be there."""


def find_splits(
    name: str, config_name: str, setting: str, names: Names, reading: Reading, check: Check
) -> dict[str, Found]:
    """The splits of a dataset. A file has one, the first of `names`. Raises UserError, on `setting` where the dataset cannot be read."""
    path = user_path(name, setting)
    kind = kind_of_path(path, setting)
    if kind == "file":
        return {next(iter(names)): reading.file(path)}
    if kind == "folder":
        return _of_folder(path, names, reading, check)
    return _of_hub(name, config_name, setting, names, reading, check)


def _of_folder(folder: Path, names: Names, reading: Reading, check: Check) -> dict[str, Found]:
    files = {split: split_file(folder, each) for split, each in names.items()}
    check(files, "")
    return {split: reading.file(file) for split, file in files.items() if file}


def split_file(folder: Path, names: Sequence[str]) -> Path | None:
    """The file of a split in a folder, by the first of these names that is there."""
    for name in names:
        for suffix in SUFFIXES:
            path = user_path(name + suffix, "data", folder)
            if kind_of_path(path) == "file":
                return path
    return None


def _of_hub(
    repo: str, config_name: str, setting: str, names: Names, reading: Reading, check: Check
) -> dict[str, Found]:
    """A dataset on Hugging Face through `datasets`. Raises UserError where it cannot be reached or does not exist."""
    check_data(repo, setting)
    from backend.data import hub_rows

    try:
        dataset = hub_rows.load(repo, config_name or None, setting)
        available = {str(split): split for split in dataset}
        chosen = {split: next((name for name in each if name in available), None) for split, each in names.items()}
        check(chosen, quote(", ".join(available), 60))
        return {
            split: reading.split(dataset[available[name]], f"{repo}, {name}") for split, name in chosen.items() if name
        }
    except UserError:
        raise
    except Exception as error:  # `datasets` raises anything at all for rows it cannot read
        raise UserError(setting, f"There is no file or folder {quote(repo, 50)}, and Hugging Face's dataset of that name "
                      f"cannot be loaded: {quote(first_line(error).rstrip('.'), 60)}.") from error  # fmt: skip
