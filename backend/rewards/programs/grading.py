"""What a program did, against what its tests expect. Everything that came from the program's process is somebody else's claim."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from backend.rewards.programs.assertions import AssertTests
from backend.rewards.programs.client import TaskResult
from backend.rewards.programs.row_tests import StreamTest
from backend.rewards.programs.values import NotPlain, decoded

TOLERANCE = 1e-6
"""The relative difference of two numbers in an output, where the expected one has a decimal point."""
_CUT = ("time", "output")
"""Endings of a task after which the rest of its program is not run: its tests have failed."""


def is_finished(results: Sequence[TaskResult], tasks: int) -> bool:
    """Whether everything that was to be run has been, as far as the program's own doing allows."""
    if results and results[-1]["ended"] == "limit":
        return False
    return len(results) == tasks or bool(results and results[-1]["ended"] in _CUT)


def streams_passed(tests: Sequence[StreamTest], results: Sequence[TaskResult]) -> int:
    """How many of the tests, of which the results are the first, have passed."""
    pairs = zip(tests, results, strict=False)
    return sum(_ended_well(result) and same_output(result["output"], test.output) for test, result in pairs)


def _ended_well(result: TaskResult) -> bool:
    return result["ended"] == "exit" and result["code"] == 0


def same_output(actual: str, expected: str) -> bool:
    """Whether two outputs are equal: line by line without white space at the ends of lines and of the whole, else word by word, with numbers
    compared as numbers where the expected one has a decimal point."""
    lines = [[line.rstrip() for line in text.rstrip().splitlines()] for text in (actual, expected)]
    if lines[0] == lines[1]:
        return True
    words, wanted = actual.split(), expected.split()
    return len(words) == len(wanted) and all(map(_same_word, words, wanted))


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    if "." not in wanted or len(word) > 40:
        return False
    try:
        return math.isclose(float(word), float(wanted), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except ValueError:
        return False


def asserts_passed(tests: AssertTests, result: TaskResult) -> int:
    """How many tests came to their end with all that they had to observe, and nothing but what is expected."""
    observed: dict[int, dict[int, bool]] = defaultdict(dict)
    """Test → number → whether every observation under it was as expected."""
    done: set[int] = set()
    for report in _reports(result["output"]):
        index, *observation = report
        if not observation:
            done.add(index)
        elif len(observation) == 2 and isinstance(observation[0], int) and isinstance(observation[1], Mapping):
            number, claim = observation
            observed[index][number] = observed[index].get(number, True) and _holds(tests, number, claim)
    return sum(
        index in done
        and test.required <= observed[index].keys()
        and bool(observed[index])
        and all(observed[index].values())
        for index, test in enumerate(tests.tests)
    )


def _reports(output: str) -> list[list[Any]]:
    """The lines that have the form of a report. Anything may stand between them."""
    found: list[list[Any]] = []
    for line in output.split("\n"):
        try:
            report = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(report, list) and report and type(report[0]) is int:
            found.append(report)
    return found


def _holds(tests: AssertTests, number: int, claim: Mapping[str, Any]) -> bool:
    expected = tests.expected.get(number)
    if expected is None:
        return False
    if "truth" in claim:  # of two objects that are no plain values
        return expected.form == "pair" and claim["truth"] is True
    try:
        return "value" in claim and expected.holds(decoded(claim["value"]))
    except (NotPlain, RecursionError):
        return False
