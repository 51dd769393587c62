"""Byte offsets of each step's rows in completions.jsonl, so that a step can be read without the rest of the file.

It records offsets as the file grows, and parses a row only when it is read. The newest step of a long file is known at once, from its
end; the steps between follow as the file is read from its start. It knows no Qt.
"""

from __future__ import annotations

import json
import os
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import numpy as np
from PySide6.QtCore import QObject, QTimer, Signal

from app.state.completion_facts import CompletionFacts, Query, listed_completions, logged_of, select
from backend.runs.completion_rows import GroupRow, TokenData, parse_group_row, without_token_data
from backend.utils.files import open_regular

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


# Full-text search through completions.jsonl, in slices: bytes are searched, and only lines that may match are parsed.

SEARCH_SLICE = 2 << 20
"""Bytes searched at a time: 2 or 3 ms."""
MOST_HITS = 20_000
"""Matching completions after which the search ends: nobody reads more, and a word of every completion would parse the whole file."""
_CASE_BIT = 0x20


class TextSearch:
    """Searches for a text, case-insensitively, in prompts, completions and texts that reward functions logged. A prompt that matches counts for
    all its completions.

    Attributes:
        text – what is looked for, not empty.
        facts – the rows with a match, whole.
        matches – numbers of the matching completions among `facts`, ascending.
        is_done – whether the end of the file, or MOST_HITS, was reached.
        is_void – whether the file was cut back, so that the search has to start over.
    """

    def __init__(self, path: Path, text: str) -> None:
        self.text = text
        self.facts = CompletionFacts()
        self.matches: list[int] = []
        self.is_done = False
        self.is_void = False
        self._path = path
        self._offset = 0
        self._size = 0
        self._anchors = _anchors(text)
        self._verify = re.compile(re.escape(text), re.IGNORECASE)

    @property
    def share(self) -> float:
        """How much of the file was searched, 0 to 1."""
        return min(1.0, self._offset / self._size) if self._size else 1.0

    @property
    def is_cut_short(self) -> bool:
        return len(self.matches) >= MOST_HITS

    def advance(self, seconds: float) -> bool:
        """Search on for about so long; returns whether there is more to search. After the end of the file a later call searches what
        was written since."""
        deadline = time.perf_counter() + seconds
        try:
            with open_regular(self._path) as file:
                self._size = file.seek(0, 2)
                self.is_void = self.is_void or self._size < self._offset
                self.is_done = self.is_void
                while not self.is_done and time.perf_counter() < deadline:
                    self._search_slice(file, deadline)
        except OSError:
            self.is_done = True
        return not self.is_done

    def _search_slice(self, file: Any, deadline: float) -> None:
        file.seek(self._offset)
        lines = file.read(SEARCH_SLICE)
        if b"\n" not in lines:
            lines += file.readline()
        lines = lines[: lines.rfind(b"\n") + 1]  # half a line is searched once it is complete
        if not lines:
            self.is_done = True
            return
        searched = self._search_lines(lines, deadline)
        self._offset += searched
        self.is_done = self.is_cut_short or self._offset >= self._size

    def _search_lines(self, lines: bytes, deadline: float) -> int:
        """Search complete lines; returns how many bytes of them were, where time ran out or there are hits enough."""
        folded, start = _fold(lines), 0
        ahead = [folded.find(anchor) for anchor in self._anchors]
        while (known := [at for at in ahead if at >= 0]) and start < len(lines):
            begin, end = lines.rfind(b"\n", 0, min(known)) + 1, lines.find(b"\n", min(known)) + 1
            self._look_at(lines[begin : end - 1], self._offset + begin)
            start = end
            if self.is_cut_short or time.perf_counter() > deadline:
                return start
            ahead = [
                folded.find(anchor, end) if 0 <= at < end else at
                for anchor, at in zip(self._anchors, ahead, strict=True)
            ]
        return len(lines)

    def _look_at(self, line: bytes, offset: int) -> None:
        row = parse_group_row(without_token_data(line))
        if row is None:
            return
        matching = self._matching(row)
        if matching:
            before = len(self.facts)
            self.facts.append(row, offset)
            self.matches += [before + place for place in matching]

    def _matching(self, row: Mapping[str, Any]) -> list[int]:
        """Places in the row of the completions that match."""
        completions = listed_completions(row)
        if self._verify.search(str(row.get("prompt"))):
            return list(range(len(completions)))
        return [place for place, completion in enumerate(completions) if any(map(self._is_in, _texts_of(completion)))]

    def _is_in(self, text: Any) -> bool:
        return isinstance(text, str) and self._verify.search(text) is not None


def _texts_of(completion: Mapping[str, Any]) -> list[Any]:
    return [completion.get("text"), *logged_of(completion).values()]


def _anchors(text: str) -> list[bytes]:
    """What a line with the text in it must hold, folded: one for a file with its own letters, one for a file in ASCII alone."""
    spellings = (lambda letter: _json(letter, is_ascii=False), lambda letter: _json(letter, is_ascii=True))
    return list(dict.fromkeys(_anchor(text, spelling) for spelling in spellings))


def _anchor(text: str, spelling: Callable[[str], bytes]) -> bytes:
    """The longest piece of the text whose bytes, folded, are the same for capitals and small letters. Where a letter's differ, as
    Cyrillic ones' may, a piece ends with what both have in common; in Latin text the piece is all of it."""
    pieces = [b""]
    for letter in text:
        both = [bytes(_fold(spelling(case))) for case in (letter.lower(), letter.upper()) if len(case) == 1]
        pieces[-1] += _common_beginning(both) if both else bytes(_fold(spelling(letter)))
        if len(set(both)) > 1:
            pieces.append(b"")
    return max(pieces, key=len)


def _common_beginning(spellings: list[bytes]) -> bytes:
    return bytes(column[0] for column in takewhile(lambda column: len(set(column)) == 1, zip(*spellings, strict=False)))


def _json(letter: str, *, is_ascii: bool) -> bytes:
    return json.dumps(letter, ensure_ascii=is_ascii)[1:-1].encode()


def _fold(text: bytes) -> bytearray:
    """One bit is set in every byte, which makes small letters of capitals, in ASCII and in the UTF-8 of Latin-1. It makes a few other
    characters equal too, such as @ and `, so what is found is looked at again. Four times as fast as bytes.lower."""
    folded = bytearray(len(text))
    np.bitwise_or(np.frombuffer(text, np.uint8), _CASE_BIT, out=np.frombuffer(folded, np.uint8))
    return folded


# ── run completions ──────────────────────────────────────────────────────────────────────────────────────────────────

SLICE_S = 0.006
"""Time that one turn of the event loop may spend reading."""
READ_BYTES = 128 << 10
"""Bytes read, and then parsed, between two looks at the clock: about a millisecond."""
BEHIND_MS, PAINT_MS, CAUGHT_UP_MS = 2, 20, 500
"""Pauses before reading on: while there is more, while a page paints what it was told, and at the end of the file."""
GROWN_EVERY_S = 0.4
KEPT_ROWS = 64


class RunCompletions(QObject):
    """Attributes:
        path – the file.
        facts – of every completion read so far.
        search – the search under way or done, or None.

    Signals:
        grew – `facts` or `search` has more; every GROWN_EVERY_S seconds, less often once there are many, and at the end.
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
        self._unparsed: Iterator[tuple[int, bytes]] = iter(())
        self._rows: dict[int, GroupRow | None] = {}
        self._is_wanted = False
        self._is_caught_up = False
        self._has_news = False
        self._last_grew = 0.0
        self._timer = QTimer(self)
        self._timer.timeout.connect(self.advance)

    def follow(self, wanted: bool) -> None:
        """Read on while `wanted`: a page that nobody sees needs no facts."""
        self._is_wanted = wanted
        if wanted and not self._timer.isActive():
            self._timer.start(BEHIND_MS)
        elif not wanted:
            self._timer.stop()

    def clear(self) -> None:
        """Forget everything, and begin again."""
        self.facts.clear()
        self._lines.clear()
        self._unparsed = iter(())
        self._is_caught_up = False
        self._rows.clear()
        if self.search is not None:
            self.search = TextSearch(self.path, self.search.text)
        self.voided.emit()

    @property
    def share(self) -> float:
        """How much of what is asked for was read, 0 to 1."""
        return self.search.share if self.search is not None else self._lines.share

    @property
    def is_complete(self) -> bool:
        return self.search.is_done if self.search is not None else self._is_caught_up

    def find(self, text: str) -> None:
        """Search for a text, or for nothing where it is empty; a search that is under way is dropped."""
        self.search = TextSearch(self.path, text) if text else None
        self._has_news, self._last_grew = True, 0.0
        if self._is_wanted:
            self._timer.start(0)

    def advance(self) -> None:
        """Read for about SLICE_S, a search first, because someone waits for it; or tell what was read. Not both in one turn of the event
        loop: a page then paints."""
        if self._has_news and self._is_news_due():
            self._tell()
            self._timer.setInterval(PAINT_MS)
            return
        was_complete = self.is_complete
        if self.search is not None and not self.search.is_cut_short:
            before = len(self.search.matches)
            behind = self.search.advance(SLICE_S)
            if self.search.is_void:
                self.clear()
                return
            self._has_news = self._has_news or len(self.search.matches) > before or not behind
        else:
            behind = False
        if not behind:
            behind = self._read_facts(time.perf_counter() + SLICE_S)
            self._has_news = self._has_news or self._is_caught_up == behind
            self._is_caught_up = not behind
        if self._has_news and (not behind or self.is_complete != was_complete):
            self._tell()
        self._timer.setInterval(BEHIND_MS if behind else CAUGHT_UP_MS)

    def _read_facts(self, deadline: float) -> bool:
        while time.perf_counter() < deadline:
            placed = next(self._unparsed, None)
            if placed is None:
                lines = self._lines.read()
                if lines is None:
                    self.clear()
                    return True
                if not lines:
                    return self._lines.is_behind
                self._unparsed = iter(lines)
                continue
            row = parse_group_row(without_token_data(placed[1]))
            if row is not None:
                self.facts.append(row, placed[0])
                self._has_news = True
        return True

    def _is_news_due(self) -> bool:
        every = GROWN_EVERY_S * (
            1 + len(self.found) / 100_000
        )  # what a page does with it takes the longer the more there is
        return time.monotonic() - self._last_grew > every

    def _tell(self) -> None:
        self._has_news, self._last_grew = False, time.monotonic()
        self.grew.emit()

    def number_of(self, offset: int, place: int) -> int | None:
        """The number among `facts` of the completion at a place of the row at an offset; None while the file is not read up to it."""
        row = int(np.searchsorted(self.facts.column("offset"), offset))
        if row >= self.facts.rows or self.facts.column("offset")[row] != offset:
            return None
        return int(np.searchsorted(self.facts.column("row"), row)) + place

    # ── answers ─────────────────────────────────────────────────────────────────────────────────

    @property
    def found(self) -> CompletionFacts:
        """The facts that `select` numbers refer to: those of the search's rows, or of all."""
        return self.search.facts if self.search is not None else self.facts

    def select(self, query: Query) -> np.ndarray:
        """Numbers in `found` of what the query and the search leave, ascending."""
        chosen = select(self.found, query, self.facts.largest or None)
        if self.search is None:
            return chosen
        return np.intersect1d(chosen, np.array(self.search.matches, np.int64), assume_unique=True)

    def row_at(self, offset: int) -> GroupRow | None:
        """The row at this offset, less its token data; the last rows that were asked for are kept."""
        if offset not in self._rows:
            if len(self._rows) >= KEPT_ROWS:
                self._rows.pop(next(iter(self._rows)))
            self._rows[offset] = parse_group_row(without_token_data(read_line(self.path, offset)))
        return self._rows[offset]

    def token_data(self, offset: int, place: int) -> TokenData | None:
        """The tokens of a completion of the row at this offset; None where they were not recorded."""
        row = parse_group_row(read_line(self.path, offset))
        completions = (row or {}).get("completions") or []
        data = completions[place].get("token_data") if place < len(completions) else None
        has_texts = isinstance(data, dict) and isinstance(data.get("text"), list)
        return cast("TokenData", data) if has_texts else None
