"""Byte offsets of each step's rows in completions.jsonl, so that a step can be read without the rest of the file.

It records offsets as the file grows, and parses a row only when it is read. The newest step of a long file is known at once, from its
end; the steps between follow as the file is read from its start. It knows no Qt.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from pathlib import Path

from app.model.completions.line_reader import LineReader, last_lines
from backend.spec.completion_rows import GroupRow, parse_group_row, without_token_data
from backend.spec.regular_file import open_regular

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
