"""Byte offsets of each step's rows in completions.jsonl, so that a step can be read without the rest of the file.

It records offsets as the file grows, and parses a row only when it is read. It knows no Qt.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from pathlib import Path

from backend.spec.completion_rows import GroupRow, parse_group_row

_STEP = re.compile(rb'^\s*\{\s*"step":\s*(\d+)\b')
"""The step comes first in a row as the trainer writes it; any other row is parsed in full."""

SLICE = 1 << 20
"""Bytes read in one call of `advance`."""


class CompletionIndex:
    """Step → byte range in the file, in the order written.

    Attributes:
        path – the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clear()

    def clear(self) -> None:
        self._offset = 0  # end of the last complete line that was indexed
        self._partial: list[bytes] = []  # read, but its newline was not written yet
        self._steps: list[int] = []
        self._starts: list[int] = []
        self._ends: list[int] = []

    def steps(self) -> list[int]:
        """Steps that have rows, ascending."""
        return self._steps

    def advance(self) -> bool:
        """Index the rows in the next slice of the file; returns whether there is more to read."""
        waiting = sum(map(len, self._partial))
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._offset + waiting:  # truncated by a resume: start over
                    self.clear()
                    waiting = 0
                file.seek(self._offset + waiting)
                chunk = file.read(SLICE)
        except OSError:
            self.clear()
            return False
        lines, newline, rest = chunk.rpartition(b"\n")
        if newline:
            self._index_lines(b"".join(self._partial) + lines)
            self._partial = [rest] if rest else []
        elif chunk:
            self._partial.append(chunk)
        return bool(chunk) and size > self._offset + sum(map(len, self._partial))

    def rows(self, step: int | None = None) -> list[GroupRow]:
        """The rows of a step as written, the newest step by default; [] for a step without rows."""
        if not self._steps:
            return []
        at = len(self._steps) - 1 if step is None else bisect_right(self._steps, step) - 1
        if at < 0 or (step is not None and self._steps[at] != step):
            return []
        try:
            with self.path.open("rb") as file:
                file.seek(self._starts[at])
                text = file.read(self._ends[at] - self._starts[at])
        except OSError:
            return []
        rows = map(parse_group_row, text.split(b"\n"))
        return [row for row in rows if row is not None and row["step"] == self._steps[at]]

    def _index_lines(self, lines: bytes) -> None:
        for line in lines.split(b"\n"):
            end = self._offset + len(line) + 1
            step = _step_of(line)
            if step is not None:
                self._index_row(step, self._offset, end)
            self._offset = end

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
