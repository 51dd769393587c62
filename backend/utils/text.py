"""Values that somebody supplied, as text inside a sentence for people."""

import re
import reprlib
from pathlib import PurePath

SHOWN = 80  # characters of a value in a sentence: two values and their sentence stay below 200
PATH_SHOWN = 120  # characters of a path, which people look for and copy
SENTENCE = 200  # characters of a sentence about what a user supplied
LONGEST = 2 * SENTENCE  # characters of a sentence of several parts, such as one with advice
WORD = 40  # characters that a long word keeps in a sentence that has to be shortened

_TERMINAL = re.compile(r"\x1b(?:\[[0-9:;<=>?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)?")
"""A control sequence of a terminal: a colour, a movement, a title."""
_UNSEEN = re.compile("[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\r(?!\n)")
"""Control characters but tabs and line breaks, and those that change the direction of text."""


def visible(text: str) -> str:
    """A text of any number of lines, with control characters and bidirectional controls escaped as in Python."""
    return _UNSEEN.sub(lambda found: _escape(found[0]), text)


_repr = reprlib.Repr()  # with an ellipsis for what is too long, too deep, or a number of many digits
_repr.maxlevel, _repr.fillvalue = 3, "…"
_repr.maxlist = _repr.maxtuple = _repr.maxset = _repr.maxfrozenset = _repr.maxdict = 30
_repr.maxstring = _repr.maxother = LONGEST


def quote(value: object, limit: int | None = None) -> str:
    """Any value on one printable line of at most `limit` characters (SHOWN; PATH_SHOWN of a path), with an ellipsis,
    for a path in its middle."""
    limit = limit or (PATH_SHOWN if isinstance(value, PurePath) else SHOWN)
    if isinstance(value, PurePath):
        return shown_path(str(value), limit)
    try:
        is_own = isinstance(value, list | tuple | set | frozenset | dict) or type(value) is int
        text = _repr.repr(value) if is_own else str(value)
    except Exception:
        text = f"a value of type {type(value).__name__}"
    return one_line(text[: 4 * limit + 1], limit, is_cut=len(text) > 4 * limit)


def shown_path(written: str, limit: int = PATH_SHOWN) -> str:
    """`quote` of a text that may be a path, as somebody wrote it: a Path would drop its ./."""
    return cut_in_the_middle(one_line(cut_in_the_middle(written, 4 * LONGEST)), limit)


def one_line(text: str, limit: int | None = None, is_cut: bool = False) -> str:
    """`text` on one printable line, at most `limit` characters with the ellipsis, which `is_cut` adds always."""
    if text.isprintable() and "  " not in text and text.strip() == text:
        line = text
    else:
        line = "".join(char if char.isprintable() else _escape(char) for char in " ".join(text.split()))
    if limit is None or (len(line) <= limit and not is_cut):
        return line
    return f"{line[: limit - 1].rstrip()}…"


def fenced(text: str, language: str = "") -> str:
    """Markdown's code block; its fence is longer than any within."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"


def as_in_a_terminal(line: str) -> str:
    """What a terminal shows of a line of a log: the last state of a progress bar, no control sequences."""
    return _TERMINAL.sub("", line.rstrip("\r").rpartition("\r")[2])


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def cut_in_the_middle(line: str, limit: int) -> str:
    """At most `limit` characters of a line, more of them from its end."""
    if len(line) <= limit:
        return line
    head = limit // 3
    return f"{line[:head]}…{line[head + 1 - limit :]}"


def shorten(sentence: str) -> str:
    """Cut the longest words of a sentence in their middle until it has SENTENCE characters, or LONGEST."""
    words = sentence.split(" ") if len(sentence) > SENTENCE else []
    while words and (excess := sum(map(len, words)) + len(words) - 1 - SENTENCE) > 0:
        at = max(range(len(words)), key=lambda index: len(words[index]))
        if len(words[at]) <= WORD:
            break
        words[at] = cut_in_the_middle(words[at], max(WORD, len(words[at]) - excess))
    return one_line(" ".join(words) if words else sentence, LONGEST)


def reason_of(error: BaseException, text: str | None = None) -> str:
    """First line of an error message for the end of a sentence; with the second after a colon."""
    lines = (text or str(error)).strip().splitlines() or [type(error).__name__]
    first = " ".join(line.strip() for line in lines[: 2 if lines[0].rstrip().endswith(":") else 1])
    return quote(first.rstrip(".: "), 90)


def about_path(path: object, rest: str) -> str:
    """A sentence of at most SENTENCE characters that begins with a path."""
    return shown_path(str(path), min(PATH_SHOWN, SENTENCE - len(rest))) + rest


def about_value(before: str, value: object, after: str, most: int = SHOWN) -> str:
    """A sentence of at most SENTENCE characters with at most `most` characters of a value in its middle."""
    return f"{before}{quote(value, max(1, min(most, SENTENCE - len(before) - len(after))))}{after}"


LARGEST = 1_000_000  # characters of a pattern, repetitions written out: `regex` makes as many nodes, of some 60 bytes
_ONE_CHARACTER = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_TOKEN = re.compile(r"\{([0-9]+)(?:,[0-9]*)?\}|.", re.DOTALL)


def excess(pattern: str) -> str:
    """Why a user's regular expression is too large to compile, as a sentence; "" if it is not."""
    groups: list[list[int]] = [[]]  # characters of the parts of each open group; a set counts as one
    for token in _TOKEN.finditer(_ONE_CHARACTER.sub("x", pattern)):
        if token[1] and groups[-1]:
            groups[-1][-1] = min(groups[-1][-1] * max(int(token[1][:10]), 1), LARGEST + 1)
        elif token[0] == "(":
            groups.append([])
        elif token[0] == ")" and len(groups) > 1:
            inner = sum(groups.pop()) + 2
            groups[-1].append(inner)
        else:
            groups[-1].append(1)
    if sum(map(sum, groups)) <= LARGEST:
        return ""
    what = f"is more than {LARGEST:,} characters long with its repetitions written out"
    return f"{quote(pattern, 60)} {what}; + and * repeat as often as needed."
