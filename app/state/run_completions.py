"""completions.jsonl of a run: index by step, facts, full-text search."""

from __future__ import annotations

import json
import os
import re
import time
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
from PySide6.QtCore import QObject, QTimer, Signal

from app.state.completion_facts import CompletionFacts, Query, listed_completions, logged_of, select
from backend.runs.completion_rows import GroupRow, TokenData, parse_group_row, without_token_data
from backend.utils.files import open_regular

SLICE, READ_BYTES, TAIL = 1 << 20, 128 << 10, 4 << 20
"""Bytes that the index, and that facts and search read at a time; searched at the end for the newest step."""
MOST_HITS = 20_000
"""Matching completions after which a search ends."""
SLICE_S = 0.006
BEHIND_MS, PAINT_MS, CAUGHT_UP_MS = 2, 20, 500
"""Pauses before reading on: while there is more, while a page paints what is new, at the end of the file."""
GROWN_EVERY_S = 0.4
KEPT_ROWS = 64
_STEP = re.compile(rb'^\s*\{\s*"step":\s*(\d+)\b')
"""The step comes first in a row as the trainer writes it."""


class LineReader:
    """Complete lines of a growing file in order. A file that became shorter is read again from its start.

    `offset`: where the next line begins; `size`: bytes of the file at the last call; `was_cut`: everything read before
    the last cut is void.
    """

    def __init__(self, path: Path, slice_size: int = SLICE) -> None:
        self.path = path
        self._slice_size = slice_size
        self.clear()

    def clear(self) -> None:
        self.offset = self.size = self._waiting = 0
        self.was_cut = False
        self._partial: list[bytes] = []  # read, but its newline was not written yet
        self._pending: Iterator[tuple[int, bytes]] = iter(())

    @property
    def is_behind(self) -> bool:
        return self.offset + self._waiting < self.size

    @property
    def share(self) -> float:
        return (self.offset + self._waiting) / self.size if self.size else 1.0

    def next(self) -> tuple[int, bytes] | None:
        """(offset, line) of the next line, or None."""
        placed = next(self._pending, None)
        if placed is None:
            self._pending = iter(self.read())
            placed = next(self._pending, None)
        return placed

    def read(self) -> list[tuple[int, bytes]]:
        """(offset, line without its newline) of the next slice."""
        try:
            with open_regular(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                is_cut = size < self.offset + self._waiting
                file.seek(self.offset + self._waiting)
                chunk = b"" if is_cut else file.read(self._slice_size)
        except OSError:
            size, is_cut, chunk = 0, self.offset > 0, b""
        if is_cut:
            self.clear()
            self.was_cut = True
        self.size = size
        lines, newline, rest = chunk.rpartition(b"\n")
        text = b"".join([*self._partial, lines])
        if newline:
            self._partial, self._waiting = [], 0
        if rest:
            self._partial.append(rest)
            self._waiting += len(rest)
        if not newline:
            return []
        placed = _placed(text, self.offset)
        self.offset += len(text) + 1
        return placed


def _placed(text: bytes, offset: int) -> list[tuple[int, bytes]]:
    placed = []
    for line in text.split(b"\n"):
        placed.append((offset, line))
        offset += len(line) + 1
    return placed


def read_line(path: Path, offset: int) -> bytes:
    try:
        with open_regular(path) as file:
            file.seek(offset)
            return file.readline()
    except OSError:
        return b""


class CompletionIndex:
    """Step → byte range in the file. A row is parsed when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = LineReader(path)
        self.clear()

    def clear(self) -> None:
        self._lines.clear()
        self._steps: list[int] = []
        self._ranges: list[tuple[int, int]] = []
        self._tail: tuple[int, int, int] | None = None

    def steps(self) -> list[int]:
        """Steps read so far, ascending."""
        return [*self._steps, self._tail[0]] if self._tail else self._steps

    def advance(self) -> bool:
        """Index the next slice of the file; True if there is more."""
        is_first = self._lines.offset == 0
        placed = self._lines.read()
        if self._lines.was_cut:
            self.clear()
            placed = self._lines.read()
        for start, line in placed:
            step = _step_of(line)
            if step is None:
                continue
            end = start + len(line) + 1
            while self._steps and self._steps[-1] > step:  # after a resume, a repeated step replaces all later ones
                self._steps.pop()
                self._ranges.pop()
            if self._steps and self._steps[-1] == step:
                self._ranges[-1] = (self._ranges[-1][0], end)
            else:
                self._steps.append(step)
                self._ranges.append((start, end))
        if is_first and self._lines.is_behind:
            self._tail = self._newest_step()
        if self._tail and self._lines.offset > self._tail[1]:
            self._tail = None
        return self._lines.is_behind

    def rows(self, step: int | None = None) -> list[GroupRow]:
        """The rows of a step, by default the newest, without token data."""
        return [row for _, row in self.placed_rows(step)]

    def placed_rows(self, step: int | None = None) -> list[tuple[int, GroupRow]]:
        """As `rows`, each with its offset in the file."""
        if self._tail and step in (None, self._tail[0]):
            wanted, start, end = self._tail
        else:
            at = len(self._steps) - 1 if step is None else bisect_right(self._steps, step) - 1
            if at < 0 or (step is not None and self._steps[at] != step):
                return []
            wanted, (start, end) = self._steps[at], self._ranges[at]
        try:
            with open_regular(self.path) as file:
                file.seek(start)
                text = file.read(end - start)
        except OSError:
            return []
        rows = ((offset, parse_group_row(without_token_data(line))) for offset, line in _placed(text, start))
        return [(offset, row) for offset, row in rows if row is not None and row["step"] == wanted]

    def _newest_step(self) -> tuple[int, int, int] | None:
        try:
            with open_regular(self.path) as file:
                start = max(0, os.fstat(file.fileno()).st_size - TAIL)
                file.seek(start)
                start += len(file.readline())  # the first line is cut
                text = file.read(TAIL)
        except OSError:
            return None
        complete = text[: text.rfind(b"\n") + 1]
        rows = [(_step_of(line), at, at + len(line) + 1) for at, line in _placed(complete, start)]
        rows = [(step, at, end) for step, at, end in rows if step is not None]
        if not rows or rows[0][1] <= self._lines.offset:
            return None
        newest = rows[-1][0]
        of_newest = [row for row in rows if row[0] == newest]
        if len(of_newest) == len(rows):  # it may have begun before the tail
            return None
        return newest, of_newest[0][1], of_newest[-1][2]


def _step_of(line: bytes) -> int | None:
    match = _STEP.match(line)
    if match:
        return int(match[1])
    row = parse_group_row(line)
    return row["step"] if row else None


class TextSearch:
    """Searches prompts, completions and logged texts for a text, case-insensitively.

    `facts`: the rows with a match; `matches`: numbers of the matching completions among them. `is_done`: the end of the
    file, or MOST_HITS, was reached; `is_void`: the file was cut back.
    """

    def __init__(self, path: Path, text: str) -> None:
        self.text = text
        self.facts = CompletionFacts()
        self.matches: list[int] = []
        self.is_done = self.is_void = False
        self._lines = LineReader(path, READ_BYTES)
        self._in_line = re.compile(b"".join(map(_spelled, text)), re.IGNORECASE)
        self._in_text = re.compile(re.escape(text), re.IGNORECASE)

    @property
    def share(self) -> float:
        return self._lines.share

    @property
    def is_cut_short(self) -> bool:
        return len(self.matches) >= MOST_HITS

    def advance(self, seconds: float) -> bool:
        """Search for about so long; True if there is more."""
        deadline = time.perf_counter() + seconds
        self.is_done = self.is_void or self.is_cut_short
        while not self.is_done and time.perf_counter() < deadline:
            placed = self._lines.next()
            if placed is None:
                self.is_void = self._lines.was_cut
                self.is_done = self.is_void or not self._lines.is_behind
            elif self._in_line.search(placed[1]):
                self._take(*placed)
                self.is_done = self.is_cut_short
        return not self.is_done

    def _take(self, offset: int, line: bytes) -> None:
        row = parse_group_row(without_token_data(line))
        if row is None:
            return
        completions = listed_completions(row)
        if self._in_text.search(str(row.get("prompt"))):
            places = list(range(len(completions)))
        else:
            texts = [[completion.get("text"), *logged_of(completion).values()] for completion in completions]
            found = [any(isinstance(text, str) and self._in_text.search(text) for text in each) for each in texts]
            places = [place for place, is_found in enumerate(found) if is_found]
        if places:
            before = len(self.facts)
            self.facts.append(row, offset)
            self.matches += [before + place for place in places]


def _spelled(letter: str) -> bytes:
    cases = {letter} if letter.isascii() else {case for case in (letter.lower(), letter.upper()) if len(case) == 1}
    forms = {json.dumps(case, ensure_ascii=ascii)[1:-1] for case in cases or {letter} for ascii in (True, False)}
    return b"(?:" + b"|".join(re.escape(form.encode(errors="replace")) for form in sorted(forms)) + b")"


class RunCompletions(QObject):
    """The completions of the run on show: `facts` of all read so far, and the `search`, or None.

    Signals:
        grew – `facts` or `search` has more, now and then, and at the end.
        voided – the file was cut back: everything shown of it is void.
    """

    grew = Signal()
    voided = Signal()

    def __init__(self, path: Path, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.path = path
        self.facts = CompletionFacts()
        self.search: TextSearch | None = None
        self._lines = LineReader(path, READ_BYTES)
        self._rows: dict[int, GroupRow | None] = {}
        self._is_wanted = False
        self._is_caught_up = False
        self._has_news = False
        self._last_grew = 0.0
        self._timer = QTimer(self)
        self._timer.timeout.connect(self.advance)

    def follow(self, wanted: bool) -> None:
        """Read on while `wanted`."""
        self._is_wanted = wanted
        if wanted and not self._timer.isActive():
            self._timer.start(BEHIND_MS)
        elif not wanted:
            self._timer.stop()

    def clear(self) -> None:
        self.facts.clear()
        self._lines.clear()
        self._is_caught_up = False
        self._rows.clear()
        if self.search is not None:
            self.search = TextSearch(self.path, self.search.text)
        self.voided.emit()

    @property
    def share(self) -> float:
        """Share of what is asked for that was read, 0 to 1."""
        return self.search.share if self.search is not None else self._lines.share

    @property
    def is_complete(self) -> bool:
        return self.search.is_done if self.search is not None else self._is_caught_up

    def find(self, text: str) -> None:
        """Search for a text; "" ends the search."""
        self.search = TextSearch(self.path, text) if text else None
        self._has_news, self._last_grew = True, 0.0
        if self._is_wanted:
            self._timer.start(0)

    def advance(self) -> None:
        """Read for about SLICE_S, a search first."""
        every_s = GROWN_EVERY_S * (1 + len(self.found) / 100_000)  # a page needs longer for more
        if self._has_news and time.monotonic() - self._last_grew > every_s:
            self._emit_grew()
            self._timer.setInterval(PAINT_MS)
            return
        was_complete = self.is_complete
        behind = False
        if self.search is not None and not self.search.is_cut_short:
            before = len(self.search.matches)
            behind = self.search.advance(SLICE_S)
            if self.search.is_void:
                self.clear()
                return
            self._has_news = self._has_news or len(self.search.matches) > before or not behind
        if not behind:
            behind = self._read_facts(time.perf_counter() + SLICE_S)
            self._has_news = self._has_news or self._is_caught_up == behind
            self._is_caught_up = not behind
        if self._has_news and (not behind or self.is_complete != was_complete):
            self._emit_grew()
        self._timer.setInterval(BEHIND_MS if behind else CAUGHT_UP_MS)

    def _read_facts(self, deadline: float) -> bool:
        while time.perf_counter() < deadline:
            placed = self._lines.next()
            if placed is None:
                if self._lines.was_cut:
                    self.clear()
                    return True
                if not self._lines.is_behind:
                    return False
                continue
            row = parse_group_row(without_token_data(placed[1]))
            if row is not None:
                self.facts.append(row, placed[0])
                self._has_news = True
        return True

    def _emit_grew(self) -> None:
        self._has_news, self._last_grew = False, time.monotonic()
        self.grew.emit()

    def number_of(self, offset: int, place: int) -> int | None:
        """The number among `facts` of a row's completion, or None."""
        row = int(np.searchsorted(self.facts.column("offset"), offset))
        if row >= self.facts.rows or self.facts.column("offset")[row] != offset:
            return None
        return int(np.searchsorted(self.facts.column("row"), row)) + place

    @property
    def found(self) -> CompletionFacts:
        """The facts that `select` numbers refer to."""
        return self.search.facts if self.search is not None else self.facts

    def select(self, query: Query) -> np.ndarray:
        """Numbers in `found` of what the query and the search leave."""
        chosen = select(self.found, query, self.facts.largest or None)
        if self.search is None:
            return chosen
        return np.intersect1d(chosen, np.array(self.search.matches, np.int64), assume_unique=True)

    def row_at(self, offset: int) -> GroupRow | None:
        if offset not in self._rows:
            if len(self._rows) >= KEPT_ROWS:
                self._rows.pop(next(iter(self._rows)))
            self._rows[offset] = parse_group_row(without_token_data(read_line(self.path, offset)))
        return self._rows[offset]

    def token_data(self, offset: int, place: int) -> TokenData | None:
        """The tokens of a completion, None if not recorded."""
        row = parse_group_row(read_line(self.path, offset))
        completions = (row or {}).get("completions") or []
        data = completions[place].get("token_data") if place < len(completions) else None
        has_texts = isinstance(data, dict) and isinstance(data.get("text"), list)
        return cast("TokenData", data) if has_texts else None
