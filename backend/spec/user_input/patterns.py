"""Regular expressions that a user supplied, measured before anything compiles them."""

from __future__ import annotations

import re

from backend.spec.user_input.text import shown

LARGEST = 1_000_000
"""Characters of a pattern with its repetitions written out, as in a{3} → aaa: the module `regex` makes as many nodes, of some 60 bytes each."""
_COUNT = re.compile(r"\{([0-9]+)(?:,[0-9]*)?\}")
_READS_OTHERWISE = re.compile(r"\(\?[a-zA-Z0-9]*[xV]")
"""Flags with which brackets and # mean something else: comments, sets within sets."""


def excess(pattern: str) -> str:
    """Why a pattern is not compiled, as a sentence; "" for one that may be. Whether it is a regular expression at all is not looked at."""
    if written_out(pattern) <= LARGEST:
        return ""
    return f"{shown(pattern, 60)} is more than {LARGEST:,} characters long with its repetitions written out; + and * repeat as often as needed."


def written_out(pattern: str) -> int:
    """Characters of a pattern with every repetition written out as often as it must be there, at least."""
    most = len(pattern)  # an upper bound, as if each repetition held all others
    for count in _COUNT.findall(pattern):
        if (most := most * _times(count)) > LARGEST:
            return most if _READS_OTHERWISE.search(pattern) else _size(pattern)
    return most


def _times(digits: str) -> int:
    """As many digits as are enough to be too many; {0} is written out once all the same."""
    return max(int(digits[:10]), 1)


def _size(pattern: str) -> int:
    """The sum over the pattern's parts, groups times their repetitions."""
    open_groups: list[int] = []
    total, last, at = 0, 0, 0  # of the innermost group: of all before its last part, and of that part
    while at < len(pattern):
        char = pattern[at]
        if char == "{" and (count := _COUNT.match(pattern, at)) is not None:
            last = min(last * _times(count[1]), LARGEST + 1)
            at = count.end()
            continue
        if char == "(":
            open_groups.append(total + last)
            total, last = 0, 0
        elif char == ")" and open_groups:
            total, last = open_groups.pop(), total + last + 2
        else:
            end = _end_of_set(pattern, at) if char == "[" else at + 1 + (char == "\\")
            total, last = total + last, end - at
            at = end - 1
        at += 1
    return total + last + sum(open_groups)


def _end_of_set(pattern: str, start: int) -> int:
    """The place behind the bracket that closes the set which begins at `start`; the first character may be a bracket itself."""
    at = start + 1 + (pattern[start + 1 : start + 2] == "^")
    at += pattern[at : at + 1] == "]"
    while at < len(pattern) and pattern[at] != "]":
        at += 1 + (pattern[at] == "\\")
    return min(at + 1, len(pattern))
