"""Where each step's rows stand in completions.jsonl, so that any step can be read from a file of any size.

It notes byte offsets as the file grows and parses a row only when somebody looks at it. It knows no Qt.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from pathlib import Path
from typing import Any

from backend.spec.events import parse_line

_STEP = re.compile(rb'^\s*\{\s*"step":\s*(\d+)\b')
"""The step stands first in a row; a row written otherwise is parse_line whole."""

SLICE = 1 << 20
"""Bytes looked at in one call of `advance`."""

Row = dict[str, Any]


class CompletionIndex:
    """Steps → places in the file, in the order written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clear()

    def clear(self) -> None:
        self._offset = 0  # end of the last whole line that was noted
        self._partial: list[bytes] = []  # read, but its newline has not come yet
        self._steps: list[int] = []
        self._starts: list[int] = []
        self._ends: list[int] = []

    def steps(self) -> list[int]:
        """Steps that have rows, rising."""
        return self._steps

    def advance(self) -> bool:
        """Note the rows in the next slice of the file; returns whether there is more to look at."""
        waiting = sum(map(len, self._partial))
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._offset + waiting:  # cut back under our feet: start over
                    self.clear()
                    waiting = 0
                file.seek(self._offset + waiting)
                chunk = file.read(SLICE)
        except OSError:
            self.clear()
            return False
        whole, newline, rest = chunk.rpartition(b"\n")
        if newline:
            self._note(b"".join(self._partial) + whole)
            self._partial = [rest] if rest else []
        elif chunk:
            self._partial.append(chunk)
        return bool(chunk) and size > self._offset + sum(map(len, self._partial))

    def rows(self, step: int | None = None) -> list[Row]:
        """The rows of a step as written (of the newest one by default); none for a step that has none."""
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
        rows = [row for row in map(parse_line, text.split(b"\n")) if row is not None]
        return [row for row in rows if row.get("step") == self._steps[at]]

    def _note(self, whole: bytes) -> None:
        for line in whole.split(b"\n"):
            end = self._offset + len(line) + 1
            step = _step_of(line)
            if step is not None:
                self._note_row(step, self._offset, end)
            self._offset = end

    def _note_row(self, step: int, start: int, end: int) -> None:
        while self._steps and self._steps[-1] > step:  # steps only rise: what came after is void
            for column in (self._steps, self._starts, self._ends):
                column.pop()
        if self._steps and self._steps[-1] == step:
            self._ends[-1] = end
        else:
            self._steps.append(step)
            self._starts.append(start)
            self._ends.append(end)


def _step_of(line: bytes) -> int | None:
    found = _STEP.match(line)
    if found:
        return int(found[1])
    row = parse_line(line)
    step = row.get("step") if row else None
    return step if isinstance(step, int) else None
