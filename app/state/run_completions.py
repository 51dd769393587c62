"""completions.jsonl of a run: index by step, facts, full-text search."""

from __future__ import annotations

import json
import re
import time
from functools import lru_cache
from pathlib import Path
from typing import cast

import numpy as np
from PySide6.QtCore import QObject, QTimer, Signal

from app.state.completion_facts import CompletionFacts, Query, select
from backend.runs.completion_rows import (
    GroupRow,
    TokenData,
    conversation_text,
    listed_completions,
    logged_of,
    parse_group_row,
    read_line,
    without_token_data,
)
from backend.runs.events import Follower

READ_BYTES = 128 << 10
"""Bytes that facts and search read at a time."""
MOST_HITS = 20_000
"""Matching completions after which a search ends."""
SLICE_S = 0.006
BEHIND_MS, PAINT_MS, CAUGHT_UP_MS = 2, 20, 500
"""Pauses before reading on: while there is more, while a page paints what is new, at the end of the file."""
GROWN_EVERY_S = 0.4
KEPT_ROWS = 64


class FactsReader:
    """Reads the facts of all rows, or of those with a text in a prompt, completion or logged text, in either case."""

    def __init__(self, path: Path, text: str = "") -> None:
        self.text = text
        self.facts = CompletionFacts()
        self.matches: list[int] = []  # numbers among `facts`, at most MOST_HITS
        self.is_done = False  # the end of the file, or MOST_HITS, was reached
        self.is_void = False  # the file was cut back
        self._lines = Follower(path, limit=READ_BYTES)
        is_call = not set(text).isdisjoint("→←✕(=")  # shown so, and written as JSON
        self._in_line = re.compile(b"" if is_call else b"".join(map(_spelled, text)), re.IGNORECASE)
        self._in_text = re.compile(re.escape(text), re.IGNORECASE)

    @property
    def share(self) -> float:
        return self._lines.share

    @property
    def is_cut_short(self) -> bool:
        return len(self.matches) >= MOST_HITS

    def advance(self, seconds: float) -> bool:
        """Read for about so long; True if there is more."""
        deadline = time.perf_counter() + seconds
        self.is_done = self.is_void or self.is_cut_short
        while not self.is_done and time.perf_counter() < deadline:
            placed = self._lines.lines()
            self.is_void = self._lines.restarted
            for offset, line in placed:
                if self._in_line.search(line) and not self.is_cut_short:
                    self._take(offset, line)
            self.is_done = not placed or self.is_void or self.is_cut_short
        return not self.is_done

    def _take(self, offset: int, line: bytes) -> None:
        row = parse_group_row(without_token_data(line))
        if row is None:
            return
        before = len(self.facts)
        if not self.text:
            self.facts.append(row, offset)
            return
        completions = listed_completions(row)
        if self._in_text.search(str(row.get("prompt"))):
            places = list(range(len(completions)))
        else:
            texts = [[conversation_text(each), *logged_of(each).values()] for each in completions]
            found = [any(isinstance(text, str) and self._in_text.search(text) for text in each) for each in texts]
            places = [place for place, is_found in enumerate(found) if is_found]
        if places:
            self.facts.append(row, offset)
            self.matches += [before + place for place in places]


def _spelled(letter: str) -> bytes:
    cases = {letter} if letter.isascii() else {case for case in (letter.lower(), letter.upper()) if len(case) == 1}
    forms = {json.dumps(case, ensure_ascii=ascii)[1:-1] for case in cases or {letter} for ascii in (True, False)}
    return b"(?:" + b"|".join(re.escape(form.encode(errors="replace")) for form in sorted(forms)) + b")"


class RunCompletions(QObject):
    """The completions of the run on show: `facts` of all read so far, and the `search`, or None."""

    grew = Signal()  # `facts` or `search` has more, now and then, and at the end
    voided = Signal()  # the file was cut back: everything shown of it is void

    def __init__(self, path: Path, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.path = path
        self.search: FactsReader | None = None
        self.row_at = lru_cache(KEPT_ROWS)(self._read_row)
        self._all = FactsReader(path)
        self._is_wanted = self._has_news = False
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
        self._all = FactsReader(self.path)
        self.row_at.cache_clear()
        if self.search is not None:
            self.search = FactsReader(self.path, self.search.text)
        self.voided.emit()

    @property
    def facts(self) -> CompletionFacts:
        return self._all.facts

    @property
    def shown(self) -> FactsReader:
        """The reader of what is asked for; `select` numbers refer to its facts."""
        return self.search if self.search is not None else self._all

    def find(self, text: str) -> None:
        """Search for a text; "" ends the search."""
        self.search = FactsReader(self.path, text) if text else None
        self._has_news, self._last_grew = True, 0.0
        if self._is_wanted:
            self._timer.start(0)

    def advance(self) -> None:
        """Read for about SLICE_S, a search first."""
        every_s = GROWN_EVERY_S * (1 + len(self.shown.facts) / 100_000)  # a page needs longer for more
        if self._has_news and time.monotonic() - self._last_grew > every_s:
            self._emit_grew()
            self._timer.setInterval(PAINT_MS)
            return
        was_complete, is_behind = self.shown.is_done, False
        for reader in dict.fromkeys((self.shown, self._all)):
            before = len(reader.facts), reader.is_done
            is_behind = reader.advance(SLICE_S)
            if reader.is_void:
                self.clear()
                return
            self._has_news = self._has_news or (len(reader.facts), reader.is_done) != before
            if is_behind:
                break
        if self._has_news and (not is_behind or self.shown.is_done != was_complete):
            self._emit_grew()
        self._timer.setInterval(BEHIND_MS if is_behind else CAUGHT_UP_MS)

    def _emit_grew(self) -> None:
        self._has_news, self._last_grew = False, time.monotonic()
        self.grew.emit()

    def number_of(self, offset: int, place: int) -> int | None:
        """The number among `facts` of a row's completion, or None."""
        row = int(np.searchsorted(self.facts.column("offset"), offset))
        if row >= self.facts.rows or self.facts.column("offset")[row] != offset:
            return None
        return int(np.searchsorted(self.facts.column("row"), row)) + place

    def select(self, query: Query) -> np.ndarray:
        """Numbers in `found` of what the query and the search leave."""
        chosen = select(self.shown.facts, query, self.facts.largest or None)
        if self.search is None:
            return chosen
        return np.intersect1d(chosen, np.array(self.search.matches, np.int64), assume_unique=True)

    def _read_row(self, offset: int) -> GroupRow | None:
        return parse_group_row(without_token_data(read_line(self.path, offset)))

    def token_data(self, offset: int, place: int) -> TokenData | None:
        """The tokens of a completion, None if not recorded."""
        row = parse_group_row(read_line(self.path, offset))
        completions = (row or {}).get("completions") or []
        data = completions[place].get("token_data") if place < len(completions) else None
        has_texts = isinstance(data, dict) and isinstance(data.get("text"), list)
        return cast("TokenData", data) if has_texts else None
