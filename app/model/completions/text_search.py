"""Full-text search through completions.jsonl, in slices: bytes are searched, and only lines that may match are parsed.

Texts in the file are JSON: a quote is \\" there, a line break \\n, and é is itself or, from other programs, \\u00e9. So the bytes of the
text as JSON are looked for, without regard to case, and a line where they occur is parsed to see whether, and in which of its
completions, the text itself occurs.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from app.model.completions.facts import CompletionFacts, listed_completions, logged_of
from backend.spec.completion_rows import parse_group_row, without_token_data
from backend.spec.regular_file import open_regular

SLICE = 2 << 20
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
        lines = file.read(SLICE)
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
