"""The process that compares two answers as mathematics, with math-verify (and sympy under it).

A process of its own, because an answer such as 9^{9^9} keeps sympy busy for ever inside one call into C, where no
thread can be interrupted. Each comparison runs on a fuse: when its processor time is up, the system ends the process,
and `backend.rewards.functions.math_equality` starts another.

It speaks lines of JSON: first "ready" (or the reason why not), then for each line [right, given] true or false. It ends
when its input does.
"""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
from collections.abc import Callable

FUSE_S = 1.0
"""Processor time of one comparison. Time on the clock would make a verdict depend on what else the machine does."""

Read = Callable[[str], "list[object]"]

_WORDS = re.compile(r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|[A-Za-z]{2}\s+[A-Za-z]{2})")
_FUNCTIONS = re.compile(r"(?<![\\A-Za-z])(sin|cos|tan|ln|log|exp|pi)(?![A-Za-z])")
_DELIMITERS = re.compile(r"\\?\$|\\[()\[\]]")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?: \d{3})+(?![\d])")
_MIXED_NUMBER = re.compile(r"(?<![\d.,])(\d+) +(\d+) */ *(\d+)")
_SCIENTIFIC = re.compile(r"(?<=\d)[eE]([+-]?\d+)\b")


def main() -> None:
    """Answer until the input ends."""
    try:
        equal = comparison()
    except ImportError as error:
        print(json.dumps(f"math-verify cannot be loaded: {error}"), flush=True)  # noqa: T201
        return
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # whose default is to end the process
    print(json.dumps("ready"), flush=True)  # noqa: T201
    for line in sys.stdin:
        right, given = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, FUSE_S)
        verdict = equal(right, given)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), flush=True)  # noqa: T201


def comparison() -> Callable[[str, str], bool]:
    """Whether `given` says the same as `right`, as math-verify sees it; False for what cannot be read."""
    logging.disable()  # it would log each completion that it cannot read
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    def read(text: str) -> list[object]:
        configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
        # Its own time limits are alarms, whose handlers Python runs only between calls into C. The fuse needs none.
        return parse(text, configs, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    def equal(right: str, given: str) -> bool:
        try:
            return verify(_read(right, read), _read(given, read), timeout_seconds=None)  # pyright: ignore
        except (Exception, RecursionError):  # whatever sympy makes of hostile text, it is no right answer
            return False

    equal(r"\frac{1}{2} + x^2", r"x^2 + 0.5")  # the first reading builds the grammar's tables; not on the fuse
    return equal


def _read(text: str, read: Read) -> list[object]:
    """What math-verify makes of an answer, first as one formula, or first as prose where it has words."""
    tidy = _tidy(text)
    first, second = (text, f"${tidy}$") if _WORDS.search(tidy) else (f"${tidy}$", text)
    return read(first) or read(second)


def _tidy(text: str) -> str:
    """One formula without delimiters, in a notation whose meaning does not depend on the reader."""
    text = _DELIMITERS.sub(" ", text).strip().rstrip(".")
    text = _SPACED_THOUSANDS.sub(lambda found: found[0].replace(" ", ""), text)
    text = _MIXED_NUMBER.sub(r"(\1+\2/\3)", text)
    text = _SCIENTIFIC.sub(r" \\cdot 10^{\1}", text)
    return _FUNCTIONS.sub(r"\\\1", text)


if __name__ == "__main__":
    main()
