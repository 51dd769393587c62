"""A value that somebody supplied, as text inside a sentence for people."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import Any, cast

SHOWN = 80
"""Characters of a value in a sentence: two values and their sentence stay below 200."""
PATH_SHOWN = 120
"""Characters of a path, which people look for and copy."""
SENTENCE = 200
"""Characters of a sentence about what a user supplied."""
LONGEST = 2 * SENTENCE
"""Characters of a sentence of several parts, such as one with advice."""
WORD = 40
"""Characters that a long word keeps in a sentence that has to be shortened."""
_NESTED = 3
"""Levels of lists and mappings that are written out."""
_DIGITS = 40
"""Longest whole number that is written out."""

_TERMINAL = re.compile(r"\x1b(?:\[[0-9:;<=>?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)?")
"""A control sequence of a terminal: a colour, a movement, a title."""

_UNSEEN = re.compile("[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\r(?!\n)")
"""Control characters, but for tabs and line breaks, and those that turn the order of the letters beside them."""


def visible(text: str) -> str:
    """The whole of a text over any number of lines, with control characters and bidirectional controls escaped as in
    Python.

    What belongs to writing stays: letters of every script, spaces of every width, the joiners of emoji and of Persian.
    """
    return _UNSEEN.sub(lambda found: _escape(found[0]), text)


def quote(value: object, limit: int | None = None) -> str:
    """At most `limit` characters of any value (SHOWN; PATH_SHOWN of a path), on one printable line, with an ellipsis
    where something was left out.

    White space becomes single spaces; control characters, lone surrogates, bidirectional controls and whatever else
    does not print are escaped as in Python. A path is cut in its middle, since its last part says most. Work and memory
    are bounded by `limit`, not by the value. Never raises, not even where `str` or `repr` of the value does.
    """
    limit = limit or (PATH_SHOWN if isinstance(value, PurePath) else SHOWN)
    try:
        if isinstance(value, PurePath):
            return shown_path(str(value), limit)
        text = _text(value, 4 * limit + 1)
        return one_line(text, limit, is_cut=len(text) > 4 * limit)
    except BaseException:  # an object's own code may raise anything at all
        return f"a value of type {type(value).__name__.encode('ascii', 'replace').decode()}"[:limit]


def shown_path(written: str, limit: int = PATH_SHOWN) -> str:
    """As `shown` of a path, for text that may name one: as somebody wrote it, where a Path would drop the ./ that it
    may begin with."""
    return cut_in_the_middle(one_line(cut_in_the_middle(written, 4 * LONGEST)), limit)


def one_line(text: str, limit: int | None = None, is_cut: bool = False) -> str:
    """`text` on one printable line, at most `limit` characters with the ellipsis. `is_cut`: something of it is missing
    already."""
    if text.isprintable() and "  " not in text and text.strip() == text:
        line = text
    else:
        line = "".join(char if char.isprintable() else _escape(char) for char in " ".join(text.split()))
    if limit is None or (len(line) <= limit and not is_cut):
        return line
    return f"{line[: limit - 1].rstrip()}…"


def as_in_a_terminal(line: str) -> str:
    """What a terminal shows of a line of a log: of one that a progress bar rewrites, its last state; no colours and
    other control sequences."""
    return _TERMINAL.sub("", line.rstrip("\r").rpartition("\r")[2])


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def cut_in_the_middle(line: str, limit: int) -> str:
    """At most `limit` characters of a line, more of them from its end than from its beginning."""
    if len(line) <= limit:
        return line
    head = limit // 3
    return f"{line[:head]}…{line[head + 1 - limit :]}"


def shorten(sentence: str) -> str:
    """A sentence of one line whose longest words are cut in their middle until it has SENTENCE characters: such words
    are paths, names and other values of somebody else's, that whoever wrote the sentence took to be short. One of
    nothing but short words is ours; it ends at LONGEST."""
    words = sentence.split(" ") if len(sentence) > SENTENCE else []
    while words and (excess := sum(map(len, words)) + len(words) - 1 - SENTENCE) > 0:
        at = max(range(len(words)), key=lambda index: len(words[index]))
        if len(words[at]) <= WORD:
            break
        words[at] = cut_in_the_middle(words[at], max(WORD, len(words[at]) - excess))
    line = " ".join(words) if words else sentence
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1].rstrip()}…"


def about_path(path: object, rest: str) -> str:
    """A sentence that begins with a path, which is cut in its middle where the sentence would be longer than
    SENTENCE."""
    return shown_path(str(path), min(PATH_SHOWN, SENTENCE - len(rest))) + rest


def about_value(before: str, value: object, after: str, most: int = SHOWN) -> str:
    """A sentence with at most `most` characters of a value in its middle, and fewer where the sentence would be longer
    than SENTENCE."""
    return f"{before}{quote(value, max(1, min(most, SENTENCE - len(before) - len(after))))}{after}"


def _text(value: object, room: int) -> str:
    """The first `room` characters of `str(value)`, without writing out more of a large or deep value than that."""
    if isinstance(value, str):
        return str.__getitem__(value, slice(room))
    if isinstance(value, (list, tuple, set, frozenset, Mapping)) or type(value) is int:
        return _literal(cast("object", value), room, _NESTED)
    return str.__getitem__(str(value), slice(room))


def _literal(value: object, room: int, levels: int) -> str:
    """As `repr`, with an ellipsis for what is beyond `room` characters, `levels` levels or _DIGITS digits."""
    if isinstance(value, str):
        return repr(str.__getitem__(value, slice(room)))
    if type(value) is int:
        return _whole(value)
    for kinds, left, right in (((list,), "[", "]"), ((tuple,), "(", ")"), ((set, frozenset), "{", "}")):
        if isinstance(value, kinds):
            items = cast("Iterable[object]", value)
            return f"{left}{_items(items, room, levels, lambda item, size: _literal(item, size, levels - 1))}{right}"
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        return f"{{{_items(pairs, room, levels, lambda pair, size: _pair(pair, size, levels - 1))}}}"
    return str.__getitem__(repr(value), slice(room))


def _pair(pair: Any, room: int, levels: int) -> str:
    return f"{_literal(pair[0], room, levels)}: {_literal(pair[1], room, levels)}"


def _items(items: Iterable[Any], room: int, levels: int, write: Callable[[Any, int], str]) -> str:
    if levels <= 0:
        return "…"
    parts: list[str] = []
    for item in itertools.islice(items, room):
        if room <= 0:
            parts.append("…")
            break
        parts.append(write(item, room))
        room -= len(parts[-1]) + 2
    return ", ".join(parts)


def _whole(value: int) -> str:
    """A whole number; one of many digits by its size, since Python refuses to write out more than 4,300."""
    if value.bit_length() <= _DIGITS * 3:
        return str(value)
    return f"a number of about {value.bit_length() * 30103 // 100000 + 1:,} digits"


# ── patterns ─────────────────────────────────────────────────────────────────────────────────────────────────────────

# Regular expressions that a user supplied, measured before anything compiles them.

LARGEST = 1_000_000
"""Characters of a pattern with its repetitions written out, as in a{3} → aaa: the module `regex` makes as many nodes,
of some 60 bytes each."""
_COUNT = re.compile(r"\{([0-9]+)(?:,[0-9]*)?\}")
_READS_OTHERWISE = re.compile(r"\(\?[a-zA-Z0-9]*[xV]")
"""Flags with which brackets and # mean something else: comments, sets within sets."""


def excess(pattern: str) -> str:
    """Why a pattern is not compiled, as a sentence; "" for one that may be. Whether it is a regular expression at all
    is not looked at."""
    if written_out(pattern) <= LARGEST:
        return ""
    return (
        f"{quote(pattern, 60)} is more than {LARGEST:,} characters long with its repetitions written out; "
        "+ and * repeat as often as needed."
    )


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
    """The place behind the bracket that closes the set which begins at `start`; the first character may be a bracket
    itself."""
    at = start + 1 + (pattern[start + 1 : start + 2] == "^")
    at += pattern[at : at + 1] == "]"
    while at < len(pattern) and pattern[at] != "]":
        at += 1 + (pattern[at] == "\\")
    return min(at + 1, len(pattern))
