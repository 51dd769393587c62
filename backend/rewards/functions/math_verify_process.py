"""The child process that compares two answers as mathematics, with math-verify and sympy.

It is a process because an answer such as 9^{9^9} keeps sympy inside one call into C that never returns, where no thread
and no Python signal handler can interrupt it. Each comparison has a processor-time limit (SIGPROF, whose default action
ends the process); `backend.rewards.functions.math_equality` then starts another child.

The protocol is that of `backend.utils.child_process`: first "ready", or the reason why not; then for each request [reference,
candidate] true or false. It decides nothing about where in a completion the answer is.
"""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Callable

from backend.utils import child_process

LIMIT_S = 1.0
"""Processor time of one comparison. Wall-clock time would make a verdict depend on the load of the machine."""

Parse = Callable[[str], "list[object]"]

_WORDS = re.compile(r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|[A-Za-z]{2}\s+[A-Za-z]{2})")
_FUNCTIONS = re.compile(r"(?<![\\A-Za-z])(sin|cos|tan|ln|log|exp|pi)(?![A-Za-z])")
_DELIMITERS = re.compile(r"\\?\$|\\[()\[\]]")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?: \d{3})+(?![\d])")
_MIXED_NUMBER = re.compile(r"(?<![\d.,])(\d+) +(\d+) */ *(\d+)")
_SCIENTIFIC = re.compile(r"(?<=\d)[eE]([+-]?\d+)\b")


def main() -> None:
    """Answer until stdin ends."""
    out = child_process.claim_stdout()
    try:
        equal = comparison()
    except ImportError as error:
        child_process.answer(out, f"math-verify cannot be loaded: {error}")
        return
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    child_process.answer(out, "ready")
    for reference, candidate in child_process.requests():
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        verdict = equal(reference, candidate)
        signal.setitimer(signal.ITIMER_PROF, 0)
        child_process.answer(out, verdict)


def comparison() -> Callable[[str, str], bool]:
    """A function that says whether two answers are equal according to math-verify; False for what it cannot parse."""
    logging.disable()  # it would log every completion that it cannot parse
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    def read(text: str) -> list[object]:
        configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
        # Its own time limits are alarms, whose handlers Python runs only between calls into C: off, for SIGPROF does it
        # better.
        return parse(text, configs, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    def equal(reference: str, candidate: str) -> bool:
        try:
            return verify(_parsed(reference, read), _parsed(candidate, read), timeout_seconds=None)  # pyright: ignore
        except (Exception, RecursionError):  # whatever sympy makes of hostile text, it is no right answer
            return False

    equal(r"\frac{1}{2} + x^2", r"x^2 + 0.5")  # the first parse builds the grammar's tables, outside the time limit
    return equal


def _parsed(text: str, parse: Parse) -> list[object]:
    """math-verify's parse of an answer, as one formula if it can be; an answer with words is tried as prose first."""
    formula = _formula(text)
    first, second = (text, f"${formula}$") if _WORDS.search(formula) else (f"${formula}$", text)
    return parse(first) or parse(second)


def _formula(text: str) -> str:
    """One formula without delimiters, in a notation that has one meaning only."""
    text = _DELIMITERS.sub(" ", text).strip().rstrip(".")
    text = _SPACED_THOUSANDS.sub(lambda match: match[0].replace(" ", ""), text)
    text = _MIXED_NUMBER.sub(r"(\1+\2/\3)", text)
    text = _SCIENTIFIC.sub(r" \\cdot 10^{\1}", text)
    return _FUNCTIONS.sub(r"\\\1", text)


if __name__ == "__main__":
    main()
