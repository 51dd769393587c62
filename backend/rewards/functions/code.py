"""The shipped reward function that runs the code in a completion against the tests of its row. All that comes from a
program's process is a claim, and checked against what its tests expect, which the program never sees.

`assert f(3) == 4` becomes `__observe__(0, f(3))`: the program reports `f(3)`, which is compared with 4 here. Other
operands and conditions are reported by value or truth, which a program can forge.

Supported column forms (all but the first also as JSON text):

    "assert add(1, 2) == 3\\n…", or a list of such texts            assertions (MBPP, HumanEval, KodCode)
    {"inputs": [text, …], "outputs": [text, …]}                    standard input and output (APPS, TACO)
    {"fn_name": "add", "inputs": [[1, 2], …], "outputs": [3, …]}   calls of a function, or of a method of `Solution`
    [{"input": text, "output": text}, …], or the same under "test_cases"   standard input and output (open-r1)
"""

from __future__ import annotations

import ast
import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from backend.rewards.catalogue import tests_column
from backend.rewards.functions.math_equality import answer_part
from backend.rewards.programs import OBSERVE, OBSERVE_PAIR, OPERATORS, Task, TaskResult, decoded, runner
from backend.rewards.registry import Scores, Texts, Types, register_reward_function, require
from backend.utils.text import quote

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
    The code is the last fenced block of the answer, else all of it; the tests are in `column`, by default the first
    known one. A program has `seconds` of processor time, twice that on the clock, and `memory_mb`. None where the row
    has no tests, and where the time of the whole call ran out."""
    require(seconds > 0, f"seconds must be above 0, not {seconds:g}")
    require(memory_mb >= 32, f"memory_mb must be at least 32, not {memory_mb}")
    require(most_tests >= 1, f"most_tests must be at least 1, not {most_tests}")
    if not completions:
        return []
    until = time.monotonic() + SHARE * (getattr(trainer_state, "reward_timeout", None) or WITHOUT_RUN_S)
    tests = _tests_of_rows({**columns, "answer": answer}, column, len(completions), most_tests)
    sources = [_program(text) for text in completions]
    keyed = [((source, id(of_row)), of_row) for source, of_row in zip(sources, tests, strict=True)]
    # Equal completions of one prompt are common, and one of them is run.
    wanted = {key: of_row for key, of_row in keyed if of_row and key[0]}
    programs = [of_row.tasks(source) for (source, _), of_row in wanted.items()]
    limits = {"seconds": seconds, "memory_mb": memory_mb, "deadline_s": max(until - time.monotonic(), 1.0)}
    results = runner.run(programs, **limits) if programs else []
    counts: dict[tuple[str, int], int | None] = {}
    for (key, of_row), tasks, each in zip(wanted.items(), programs, results, strict=True):
        last = each[-1]["ended"] if each else ""
        was_run = last != "limit" and (len(each) == len(tasks) or last in ("time", "output"))
        counts[key] = of_row.passed(each) if was_run else None
    passed = [None if of_row is None else counts.get(key, 0) for key, of_row in keyed]
    pairs = [(count, len(of_row.tests) if of_row else 0) for count, of_row in zip(passed, tests, strict=True)]
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
    """Compare lines without white space at their ends, else words; numbers where the expected has a decimal point."""
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


Expected = Callable[[Mapping[str, Any]], bool]  # an assertion holds by the program's claim; may raise


@dataclass(slots=True)
class AssertTests:
    """Tests of a row, each with the observations that it always makes. `setup` runs first; `expected` by number."""

    setup: str = ""
    tests: list[tuple[str, frozenset[int]]] = field(default_factory=list)
    expected: dict[int, Expected] = field(default_factory=dict)

    def tasks(self, source: str) -> list[Task]:
        return [{"source": source, "setup": self.setup, "tests": [test for test, _ in self.tests]}]

    def passed(self, results: Sequence[TaskResult]) -> int:
        observed: dict[int, dict[int, bool]] = defaultdict(dict)  # test → number → True if all were as expected
        done: set[int] = set()
        for line in results[0]["output"].split("\n"):
            try:
                report = json.loads(line)
            except (ValueError, RecursionError):  # a program may write anything between the reports
                continue
            match report:
                case [int() as index] if type(index) is int:
                    done.add(index)
                case [int() as index, int() as number, {**claim}] if type(index) is int:
                    holds = False
                    with suppress(Exception):  # no such observation, or values that cannot be compared
                        holds = self.expected[number](claim)
                    observed[index][number] = observed[index].get(number, True) and holds
        passed = 0
        for index, (_, required) in enumerate(self.tests):
            found = observed[index]
            passed += bool(found) and index in done and required <= found.keys() and all(found.values())
        return passed


@dataclass(frozen=True, slots=True)
class StreamTests:
    """Standard input and expected output of each test."""

    tests: list[tuple[str, str]]

    def tasks(self, source: str) -> list[Task]:
        return [{"source": source, "input": given} for given, _ in self.tests]

    def passed(self, results: Sequence[TaskResult]) -> int:
        return sum(
            result["ended"] == "exit" and result["code"] == 0 and same_output(result["output"], expected)
            for (_, expected), result in zip(self.tests, results, strict=False)
        )


RowTests = AssertTests | StreamTests


def assert_tests(sources: list[str], setup: str = "", entry_point: str = "") -> AssertTests:
    """Tests in some pieces of Python. A test is a top-level assertion with what precedes it, a `test_…` function, a
    call of an asserting function, or HumanEval's `check(entry_point)`. The rest is setup. Raises SyntaxError, and
    ValueError if nothing can fail."""
    observations = _Observations()
    tests: list[tuple[str, frozenset[int]]] = []
    asserting: dict[str, frozenset[int]] = {}  # asserting functions → observations that a call always makes
    prepared: list[ast.stmt] = []
    before: list[ast.stmt] = []  # statements since the last test

    def end_test(statements: list[ast.stmt], required: frozenset[int]) -> None:
        tests.append((_unparsed([*before, *statements]), required))
        before.clear()

    for statement in (statement for source in (setup, *sources) for statement in [*ast.parse(source).body, None]):
        if statement is None:  # the end of a source, of which the next may need what was not in a test
            if not tests:
                prepared += before
                before.clear()
            continue
        call = statement.value if isinstance(statement, ast.Expr) else None
        called = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
        asserts = any(isinstance(node, ast.Assert) for node in ast.walk(statement))
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            statement.body, required = observations.replaced(statement.body)
            prepared.append(statement)
            if asserts:
                asserting[statement.name] = required
                takes_nothing = isinstance(statement, ast.FunctionDef) and not ast.unparse(statement.args)
                if statement.name.startswith("test_") and takes_nothing:
                    end_test([_call(statement.name)], required)
        elif isinstance(statement, ast.Import | ast.ImportFrom | ast.ClassDef):
            prepared += observations.replaced([statement])[0]
        elif isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
            pass  # if __name__ == "__main__"
        elif asserts or called in asserting:
            made, required = observations.replaced([statement])
            end_test(made, required | asserting.get(called, frozenset()))
        else:
            before.append(statement)
    if entry_point.isidentifier() and "check" in asserting and not tests:
        end_test([_call("check", ast.Name(entry_point, ast.Load()))], asserting["check"])
    if not tests:
        raise ValueError("they assert nothing")
    return AssertTests(_unparsed(prepared), tests, observations.expected)


def _call(function: str, *arguments: ast.expr) -> ast.Expr:
    return ast.Expr(ast.Call(ast.Name(function, ast.Load()), list(arguments), []))


class _Observations(ast.NodeTransformer):
    """Replaces assertions by numbered observations."""

    def __init__(self) -> None:
        self.expected: dict[int, Expected] = {}

    def replaced(self, statements: list[ast.stmt]) -> tuple[list[ast.stmt], frozenset[int]]:
        """Statements with observations, and the numbers that are always made."""
        body: list[ast.stmt] = []
        required: set[int] = set()
        for statement in statements:
            first = len(self.expected)
            made = self.visit(statement)
            body += made if isinstance(made, list) else [made]
            if isinstance(statement, ast.Assert):
                required |= set(range(first, len(self.expected)))
        return body, frozenset(required)

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        condition, number = node.test, len(self.expected)
        if isinstance(condition, ast.BoolOp) and isinstance(condition.op, ast.And):
            return [made for part in condition.values for made in self.visit_Assert(ast.Assert(part))]
        if not isinstance(condition, ast.Compare) or len(condition.ops) != 1:
            self.expected[number] = lambda claim: decoded(claim["value"]) is True
            truth = ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), condition))
            return [_call(OBSERVE, ast.Constant(number), truth)]
        name, left, right = type(condition.ops[0]).__name__, condition.left, condition.comparators[0]
        for literal, observed in ((right, left), (left, right)):
            try:
                value = ast.literal_eval(literal)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                continue
            if not any(value is singleton for singleton in (None, True, False)):
                # `is` between a value from another process and a literal means nothing but for the singletons.
                name = {"Is": "Eq", "IsNot": "NotEq"}.get(name, name)
            self.expected[number] = partial(_holds, name, value, literal is right)
            return [_call(OBSERVE, ast.Constant(number), observed)]

        def pair_holds(claim: Mapping[str, Any]) -> bool:
            if "truth" in claim:  # of two objects that are no plain values
                return claim["truth"] is True
            left, right = decoded(claim["value"])
            return bool(OPERATORS[name](left, right))

        self.expected[number] = pair_holds
        return [_call(OBSERVE_PAIR, ast.Constant(number), ast.Constant(name), left, right)]


def _holds(name: str, literal: Any, is_right: bool, claim: Mapping[str, Any]) -> bool:
    """Compare the other operand, as the program claims it, with the literal one."""
    seen = decoded(claim["value"])
    return bool(OPERATORS[name](seen, literal) if is_right else OPERATORS[name](literal, seen))


def _unparsed(statements: list[ast.stmt]) -> str:
    return ast.unparse(ast.fix_missing_locations(ast.Module(statements, [])))


PREPARATIONS = ("test_setup_code", "test_imports")  # MBPP columns with code to run before tests


class UnusableTestsError(ValueError):
    """The column holds no tests; the text completes a message."""


def row_tests(value: Any, row: Mapping[str, Any], most: int) -> RowTests | None:
    """First `most` tests of a row, None without any. Raises UnusableTestsError."""
    value = _parsed(value)
    if isinstance(value, Mapping) and "test_cases" in value:
        value = _parsed(value["test_cases"])
    if value is None or value == "" or value == [] or value == {}:
        return None
    value = [value] if isinstance(value, str) else value
    if isinstance(value, Mapping):
        inputs, outputs, name = value.get("inputs"), value.get("outputs"), value.get("fn_name")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise UnusableTestsError("a mapping without as many inputs as outputs")
        pairs = list(zip(inputs, outputs, strict=True))[:most]
    elif not isinstance(value, Sequence):
        raise UnusableTestsError(f"{type(value).__name__}, which is no text, list or mapping")
    elif all(isinstance(item, str) for item in value):
        return _asserts(list(value), row, most)
    elif not all(isinstance(item, Mapping) for item in value):
        raise UnusableTestsError("a list that holds neither texts nor mappings")
    elif not all("input" in case and "output" in case for case in value):
        raise UnusableTestsError("cases of which one has no input or no output")
    else:
        name = value[0].get("fn_name")
        pairs = [(_parsed(case["input"]) if name else case["input"], case["output"]) for case in value[:most]]
    if not pairs:
        return None
    if name:
        if not (name := str(name)).isidentifier():
            raise UnusableTestsError(f"the function name {quote(name, 30)}")
        tests = AssertTests()
        for number, (arguments, output) in enumerate(pairs):
            if not isinstance(arguments, list):
                raise UnusableTestsError("inputs of a function that are no lists of arguments")
            call = f"{OBSERVE}({number}, __entry__({name!r})(*{arguments!r}))"
            tests.tests.append((call, frozenset({number})))
            either = [output, output[0]] if isinstance(output, list) and len(output) == 1 else [output]
            tests.expected[number] = partial(_holds, "In", list(_EitherSequence(either)), True)
        return tests

    def text(lines: Any) -> str:
        return "\n".join(map(str, lines)) if isinstance(lines, list) else str(lines)

    return StreamTests([(text(given), text(expected)) for given, expected in pairs])


def _parsed(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value  # Python may begin so too
    return value


class _EitherSequence(list[Any]):
    """A JSON list that also equals a tuple, with all that it holds."""

    def __init__(self, values: Iterable[Any]) -> None:
        super().__init__(_EitherSequence(value) if isinstance(value, list) else value for value in values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list | tuple) and list(self) == list(other)

    __hash__ = None  # pyright: ignore[reportAttributeAccessIssue]


def _asserts(sources: list[str], row: Mapping[str, Any], most: int) -> AssertTests:
    prepared: list[str] = []
    for name in PREPARATIONS:
        lines = row.get(name)
        prepared += [line for line in (lines if isinstance(lines, list) else [lines]) if isinstance(line, str)]
    entry_point = row.get("entry_point")
    try:
        tests = assert_tests(sources, "\n".join(prepared), entry_point if isinstance(entry_point, str) else "")
    except SyntaxError as error:
        what = f"Python with a syntax error on line {error.lineno}: {quote(error.msg, 60)}"
        raise UnusableTestsError(what) from None
    except (ValueError, RecursionError, MemoryError):
        raise UnusableTestsError("Python that asserts nothing") from None
    del tests.tests[most:]
    return tests
