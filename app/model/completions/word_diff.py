"""The difference between two texts, word by word."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Literal

Part = tuple[Literal["same", "removed", "added"], str]

_WORDS = re.compile(r"\s+|\w+|[^\w\s]")
"""Runs of white space, words, and single signs: in sums and tags a sign is what differs."""
MOST_WORDS = 6000
"""Words of the two texts together above which whole lines are compared: the time grows with the square."""


def diff(old: str, new: str) -> list[Part]:
    """What becomes of `old` in `new`, in order; the parts that are not added make up `old`, those not removed `new`."""
    first, second = _WORDS.findall(old), _WORDS.findall(new)
    if len(first) + len(second) > MOST_WORDS:
        first, second = old.splitlines(keepends=True), new.splitlines(keepends=True)
    # Equal beginnings and ends are most of two completions of one prompt, and cost the matcher the most.
    head = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    rest = zip(reversed(first[head:]), reversed(second[head:]), strict=False)
    tail = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], rest))
    middle = first[head : len(first) - tail], second[head : len(second) - tail]
    parts: list[Part] = [("same", "".join(first[:head]))]
    for kind, a, b, c, d in SequenceMatcher(None, *middle, autojunk=False).get_opcodes():
        if kind == "equal":
            parts.append(("same", "".join(middle[0][a:b])))
        else:
            parts.append(("removed", "".join(middle[0][a:b])))
            parts.append(("added", "".join(middle[1][c:d])))
    parts.append(("same", "".join(first[len(first) - tail :])))
    return [part for part in parts if part[1]]
