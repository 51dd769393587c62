"""The shipped reward function that runs the code in a completion against the tests of its row. All that comes from a
program's process is a claim, and checked against what its tests expect."""

from __future__ import annotations

import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from backend.rewards.catalogue import tests_column
from backend.rewards.functions.math_equality import answer_part
from backend.rewards.program_tests import PREPARATIONS, AssertTests, RowTests, UnusableTestsError, row_tests
from backend.rewards.programs import NotPlainError, Task, TaskResult, decoded, runner
from backend.rewards.registry import Scores, Texts, Types, register_reward_function, require

TOLERANCE = 1e-6  # the relative difference of two numbers in an output, where the expected one has a decimal point
LONGEST_PROGRAM = 64 << 10  # characters of a program that is run
SHARE = 0.8  # of the time that a call may take: with the rest the scores are returned
WITHOUT_RUN_S = 60.0
_FENCE = re.compile(r"^[ \t]*```([^\n`]*)$", re.MULTILINE)


@register_reward_function("code_tests", label="Code Tests")
def code_tests(
    prompts: Texts,
    completions: Texts,
    answer: Texts,
    types: Types = None,
    *,
    trainer_state: Any = None,
    log_extra: Callable[..., None] | None = None,
    log_metric: Callable[..., None] | None = None,
    column: str = "",
    strict: bool = False,
    seconds: float = 4.0,
    memory_mb: int = 512,
    most_tests: int = 50,
    **columns: list[Any],
) -> Scores:
    """The share of the row's tests that the code in the completion passes; with `strict` 1.0 for all of them, else 0.0.
    The code is the last fenced block of the answer, else all of it. Tests are assertions or pairs of input and output
    in `column`, by default the first known one. A program has `seconds` of processor time, twice that on the clock, and
    `memory_mb`; it reaches no network and no files but Python's, and starts no process. 0 for a program that fails,
    hangs or is stopped; None where the row has no tests, and where the time of the whole call ran out before its
    turn."""
    require(seconds > 0, f"seconds must be above 0, not {seconds:g}")
    require(memory_mb >= 32, f"memory_mb must be at least 32, not {memory_mb}")
    require(most_tests >= 1, f"most_tests must be at least 1, not {most_tests}")
    if not completions:
        return []
    until = time.monotonic() + SHARE * (getattr(trainer_state, "reward_timeout", None) or WITHOUT_RUN_S)
    tests = _tests_of_rows({**columns, "answer": answer}, column, len(completions), most_tests)
    sources = [_program(text) for text in completions]
    # Equal completions of one prompt are common, and one of them is run.
    wanted: dict[tuple[str, int], tuple[RowTests, list[Task]]] = {}
    for source, of_row in zip(sources, tests, strict=True):
        if not of_row or not source:
            continue
        if isinstance(of_row, AssertTests):
            task = {"source": source, "setup": of_row.setup, "tests": [test.source for test in of_row.tests]}
            wanted[source, id(of_row)] = of_row, [task]
        else:
            wanted[source, id(of_row)] = of_row, [{"source": source, "input": test.input} for test in of_row]
    results: Sequence[Sequence[TaskResult]] = []
    if wanted:
        deadline_s = max(until - time.monotonic(), 1.0)
        programs = [tasks for _, tasks in wanted.values()]
        found = runner.run(programs, seconds=seconds, memory_mb=memory_mb, deadline_s=deadline_s)
        results = found or [[] for _ in programs]
    counts: dict[tuple[str, int], int | None] = {}
    for (key, (of_row, tasks)), each in zip(wanted.items(), results, strict=True):
        last = each[-1]["ended"] if each else ""
        if last == "limit" or (len(each) < len(tasks) and last not in ("time", "output")):
            counts[key] = None  # it was not run to its end
        else:
            counts[key] = (
                _asserts_passed(of_row, each[0])
                if isinstance(of_row, AssertTests)
                else sum(
                    result["ended"] == "exit" and result["code"] == 0 and same_output(result["output"], test.output)
                    for test, result in zip(of_row, each, strict=False)
                )
            )
    passed = [
        None if of_row is None else counts.get((source, id(of_row)), 0)
        for source, of_row in zip(sources, tests, strict=True)
    ]
    totals = [len(of_row.tests) if isinstance(of_row, AssertTests) else len(of_row or ()) for of_row in tests]
    pairs = list(zip(passed, totals, strict=True))
    if log_extra is not None:
        with suppress(ValueError):  # of two entries of this function, the first has the column
            log_extra("tests passed", [None if count is None else f"{count} of {total}" for count, total in pairs])
    if log_metric is not None:
        not_run = sum(count is None and of_row is not None for count, of_row in zip(passed, tests, strict=True))
        log_metric("code_tests/not_run", float(not_run))
    return [None if count is None else float(count == total) if strict else count / total for count, total in pairs]


def _tests_of_rows(columns: Mapping[str, list[Any]], named: str, count: int, most: int) -> list[RowTests | None]:
    present = [name for name, values in columns.items() if isinstance(values, list) and len(values) == count]
    name = tests_column(named, present)
    if not name:  # for a dataset that a run trains on, `backend.data.rows.check_columns` says so
        return [None] * count
    known: dict[str, RowTests | None] = {}
    tests: list[RowTests | None] = []
    for index in range(count):
        row = {other: columns[other][index] for other in present}
        key = json.dumps([row[name], *(row.get(other) for other in ("entry_point", *PREPARATIONS))], default=str)
        if key not in known:
            try:
                known[key] = row_tests(row[name], row, most)
            except UnusableTestsError as error:
                raise ValueError(f"the column {name} holds {error}") from None
        tests.append(known[key])
    return tests


def _program(text: str) -> str:
    text = answer_part(text)[-4 * LONGEST_PROGRAM :]
    fences = list(_FENCE.finditer(text))
    if len(fences) % 2 == 1:
        text = text[fences[-1].end() :]
    elif fences:
        text = text[fences[-2].end() : fences[-1].start()]
    return text.strip("\n")[:LONGEST_PROGRAM]


def same_output(actual: str, expected: str) -> bool:
    """Compare lines without white space at the ends of lines and of the whole, else word by word. Numbers are compared
    as numbers where the expected one has a decimal point."""
    lines = [[line.rstrip() for line in text.rstrip().splitlines()] for text in (actual, expected)]
    words, wanted = actual.split(), expected.split()
    if lines[0] == lines[1] or len(words) != len(wanted):
        return lines[0] == lines[1]
    for word, right in zip(words, wanted, strict=True):
        try:
            is_number = "." in right and len(word) <= 40
            is_close = is_number and math.isclose(float(word), float(right), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        except ValueError:
            is_close = False
        if word != right and not is_close:
            return False
    return True


def _asserts_passed(tests: AssertTests, result: TaskResult) -> int:
    observed: dict[int, dict[int, bool]] = defaultdict(dict)
    """Test → number → True if every observation under it was as expected."""
    done: set[int] = set()
    for line in result["output"].split("\n"):
        try:
            report = json.loads(line)
        except (ValueError, RecursionError):  # a program may write anything between the reports
            continue
        match report:
            case [int() as index] if type(index) is int:
                done.add(index)
            case [int() as index, int() as number, {**claim}] if type(index) is int:
                expected, holds = tests.expected.get(number), False
                with suppress(NotPlainError, RecursionError):
                    if "truth" in claim:  # of two objects that are no plain values
                        holds = expected is not None and expected.form == "pair" and claim["truth"] is True
                    elif expected is not None and "value" in claim:
                        holds = expected.holds(decoded(claim["value"]))
                observed[index][number] = observed[index].get(number, True) and holds
    return sum(
        index in done
        and test.required <= observed[index].keys()
        and bool(observed[index])
        and all(observed[index].values())
        for index, test in enumerate(tests.tests)
    )
