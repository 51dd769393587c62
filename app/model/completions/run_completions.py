"""The completions of the run that is shown, beyond the step on screen: facts of all of them, and a full-text search.

Both read the file in short slices on the event loop, and only while a page wants them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
from PySide6.QtCore import QObject, QTimer, Signal

from app.model.completions.facts import CompletionFacts
from app.model.completions.filters import Query, select
from app.model.completions.line_reader import LineReader, read_line
from app.model.completions.text_search import TextSearch
from backend.spec.completion_rows import GroupRow, TokenData, parse_group_row, without_token_data

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
