"""Reads a growing file line by line, in slices that a caller bounds by time, and says where each line begins."""

from __future__ import annotations

import os
from pathlib import Path

from backend.spec.regular_file import open_regular

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
