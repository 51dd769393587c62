"""Byte offsets of each step's rows in completions.jsonl, so that a step can be read without the rest of the file.

It records offsets as the file grows, and parses a row only when it is read. The newest step of a long file is known at once, from its
end; the steps between follow as the file is read from its start. It knows no Qt.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from pathlib import Path

from backend.runs.completion_rows import GroupRow, parse_group_row, without_token_data
from backend.utils.regular_file import open_regular

# Reads a growing file line by line, in slices that a caller bounds by time, and says where each line begins.

SLICE = 1 << 20
"""Bytes read at a time."""


class LineReader:
    """Complete lines of a file in order. A file that became shorter is read from its start again.

    Attributes:
        offset – where the next line begins: the end of what was returned.
        size – bytes of the file at the last call.
    """

    def __init__(self, path: Path, slice_size: int = SLICE) -> None:
        self.path = path
        self._slice_size = slice_size
        self.clear()

    def clear(self) -> None:
        self.offset = 0
        self.size = 0
        self._partial: list[bytes] = []  # read, but its newline was not written yet
        self._waiting = 0

    @property
    def is_behind(self) -> bool:
        """Whether the file held more than was read, at the last call."""
        return self.offset + self._waiting < self.size

    @property
    def share(self) -> float:
        """How much of the file was read, 0 to 1."""
        return (self.offset + self._waiting) / self.size if self.size else 1.0

    def read(self) -> list[tuple[int, bytes]] | None:
        """(offset, line without its newline) of the next slice; None where the file was cut back or is gone, so that everything
        read before is void."""
        try:
            with open_regular(self.path) as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size < self.offset + self._waiting:
                    self.clear()
                    return None
                file.seek(self.offset + self._waiting)
                chunk = file.read(self._slice_size)
        except OSError:
            was_read = self.offset > 0
            self.clear()
            return None if was_read else []
        lines, newline, rest = chunk.rpartition(b"\n")
        if not newline:
            self._keep(chunk)
            return []
        text = b"".join([*self._partial, lines])
        self._partial, self._waiting = [], 0
        self._keep(rest)
        return self._placed(text)

    def _keep(self, rest: bytes) -> None:
        if rest:
            self._partial.append(rest)
            self._waiting += len(rest)

    def _placed(self, text: bytes) -> list[tuple[int, bytes]]:
        placed = []
        for line in text.split(b"\n"):
            placed.append((self.offset, line))
            self.offset += len(line) + 1
        return placed


def read_line(path: Path, offset: int) -> bytes:
    """The line that begins at `offset`; empty where the file cannot be read."""
    try:
        with open_regular(path) as file:
            file.seek(offset)
            return file.readline()
    except OSError:
        return b""


def last_lines(path: Path, most_bytes: int) -> list[tuple[int, bytes]]:
    """(offset, line) of the last complete lines of a file, in at most `most_bytes`."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = max(0, size - most_bytes)
            file.seek(start)
            text = file.read(most_bytes)
    except OSError:
        return []
    if start:  # the first line is cut
        head, newline, text = text.partition(b"\n")
        start += len(head) + len(newline)
    placed = []
    for line in text.split(b"\n")[:-1]:
        placed.append((start, line))
        start += len(line) + 1
    return placed


# ── step index ───────────────────────────────────────────────────────────────────────────────────────────────────────

_STEP = re.compile(rb'^\s*\{\s*"step":\s*(\d+)\b')
"""The step comes first in a row as the trainer writes it; any other row is parsed in full."""
TAIL = 4 << 20
"""Bytes at the end of the file that are looked at for the newest step."""


class CompletionIndex:
    """Step → byte range in the file, in the order written.

    Attributes:
        path – the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = LineReader(path)
        self.clear()

    def clear(self) -> None:
        self._lines.clear()
        self._steps: list[int] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._tail: tuple[int, int, int] | None = None
        """Step, start and end of the newest step, while the file is not read up to it."""

    @property
    def share(self) -> float:
        """How much of the file was read, 0 to 1."""
        return self._lines.share

    def steps(self) -> list[int]:
        """Steps that have rows and were read so far, ascending; the newest one from the first."""
        return [*self._steps, self._tail[0]] if self._tail else self._steps

    def advance(self) -> bool:
        """Index the rows in the next slice of the file; returns whether there is more to read."""
        is_first = self._lines.offset == 0
        placed = self._lines.read()
        if placed is None:
            self.clear()
            placed = self._lines.read() or []
        for offset, line in placed:
            step = _step_of(line)
            if step is not None:
                self._index_row(step, offset, offset + len(line) + 1)
        if is_first and self._lines.is_behind:
            self._tail = self._newest_step()
        if self._tail and self._lines.offset > self._tail[1]:
            self._tail = None
        return self._lines.is_behind

    def _newest_step(self) -> tuple[int, int, int] | None:
        """The last step whose rows are all in the tail of the file; None where that tail is read in order anyway, or holds none."""
        rows = [
            (step, offset, len(line) + 1)
            for offset, line in last_lines(self.path, TAIL)
            if (step := _step_of(line)) is not None
        ]
        if not rows or rows[0][1] <= self._lines.offset:
            return None
        newest = rows[-1][0]
        of_newest = [row for row in rows if row[0] == newest]
        if len(of_newest) == len(rows):  # it may have begun before the tail
            return None
        return newest, of_newest[0][1], of_newest[-1][1] + of_newest[-1][2]

    def rows(self, step: int | None = None) -> list[GroupRow]:
        """The rows of a step as written, less their token data, the newest step by default; [] for a step without rows."""
        return [row for _, row in self.placed_rows(step)]

    def placed_rows(self, step: int | None = None) -> list[tuple[int, GroupRow]]:
        """(offset in the file, row) of the rows of a step, as `rows`."""
        found = self._range(step)
        if found is None:
            return []
        wanted, start, end = found
        try:
            with open_regular(self.path) as file:
                file.seek(start)
                text = file.read(end - start)
        except OSError:
            return []
        placed = []
        for line in text.split(b"\n"):
            row = parse_group_row(without_token_data(line))
            if row is not None and row["step"] == wanted:
                placed.append((start, row))
            start += len(line) + 1
        return placed

    def _range(self, step: int | None) -> tuple[int, int, int] | None:
        if self._tail and step in (None, self._tail[0]):
            return self._tail
        at = len(self._steps) - 1 if step is None else bisect_right(self._steps, step) - 1
        if at < 0 or (step is not None and self._steps[at] != step):
            return None
        return self._steps[at], self._starts[at], self._ends[at]

    def _index_row(self, step: int, start: int, end: int) -> None:
        while self._steps and self._steps[-1] > step:  # after a resume, a repeated step replaces all later ones
            for column in (self._steps, self._starts, self._ends):
                column.pop()
        if self._steps and self._steps[-1] == step:
            self._ends[-1] = end
        else:
            self._steps.append(step)
            self._starts.append(start)
            self._ends.append(end)


def _step_of(line: bytes) -> int | None:
    match = _STEP.match(line)
    if match:
        return int(match[1])
    row = parse_group_row(line)
    return row["step"] if row else None
