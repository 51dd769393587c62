"""A row's tests, in whichever of the usual forms its column has them.

    "assert add(1, 2) == 3\\n…", or a list of such texts            assertions (MBPP, HumanEval, KodCode)
    {"inputs": [text, …], "outputs": [text, …]}                    standard input and output (APPS, TACO)
    {"fn_name": "add", "inputs": [[1, 2], …], "outputs": [3, …]}   calls of a function, or of a method of `Solution`
    [{"input": text, "output": text}, …], or the same under "test_cases"   standard input and output (open-r1's collections)
Each but the first may be JSON in a text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backend.rewards.programs.assertions import OBSERVE, AssertTest, AssertTests, ExpectedValue, assert_tests
from backend.utils.text import quote

PREPARATIONS = ("test_setup_code", "test_imports")
"""Columns of MBPP whose Python goes before the tests."""


class UnusableTests(ValueError):
    """The column holds no tests; the text says what it holds, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class StreamTest:
    """Standard input, and the standard output that it should give."""

    input: str
    output: str


RowTests = AssertTests | list[StreamTest]


def row_tests(value: Any, row: Mapping[str, Any], most: int) -> RowTests | None:
    """The first `most` tests of a row; None for a row without any. `row`: its other columns. Raises UnusableTests."""
    value = _parsed(value)
    if value is None or value == "" or value == [] or value == {}:
        return None
    if isinstance(value, Mapping):
        return _of_mapping(value, row, most)
    if isinstance(value, Sequence) and not isinstance(value, str):
        if all(isinstance(item, Mapping) for item in value):
            return _of_cases(value, most)
        if not all(isinstance(item, str) for item in value):
            raise UnusableTests("a list that holds neither texts nor mappings")
        return _asserts(list(value), row, most)
    if isinstance(value, str):
        return _asserts([value], row, most)
    raise UnusableTests(f"{type(value).__name__}, which is no text, list or mapping")


def _parsed(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value  # Python may begin so too
    return value


def _of_mapping(value: Mapping[str, Any], row: Mapping[str, Any], most: int) -> RowTests | None:
    if "test_cases" in value:
        return row_tests(value["test_cases"], row, most)
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise UnusableTests("a mapping without as many inputs as outputs")
    name = value.get("fn_name")
    if name:
        return _calls(str(name), list(zip(inputs, outputs, strict=True))[:most])
    return [StreamTest(_text(a), _text(b)) for a, b in list(zip(inputs, outputs, strict=True))[:most]] or None


def _of_cases(cases: Sequence[Mapping[str, Any]], most: int) -> RowTests:
    name = cases[0].get("fn_name")
    if not all("input" in case and "output" in case for case in cases):
        raise UnusableTests("cases of which one has no input or no output")
    if name:
        return _calls(str(name), [(_parsed_input(case["input"]), case["output"]) for case in cases[:most]])
    return [StreamTest(_text(case["input"]), _text(case["output"])) for case in cases[:most]]


def _parsed_input(value: Any) -> Any:
    return value if isinstance(value, list) else _parsed(value)


def _calls(name: str, cases: list[tuple[Any, Any]]) -> AssertTests:
    """Calls of one function. Some datasets put the one value of an output into a list, so `[3]` expects 3 or [3]."""
    if not name.isidentifier():
        raise UnusableTests(f"the function name {quote(name, 30)}")
    tests = AssertTests()
    for number, (arguments, output) in enumerate(cases):
        if not isinstance(arguments, list):
            raise UnusableTests("inputs of a function that are no lists of arguments")
        call = f"{OBSERVE}({number}, __entry__({name!r})(*{arguments!r}))"
        tests.tests.append(AssertTest(call, frozenset({number})))
        either = [output, output[0]] if isinstance(output, list) and len(output) == 1 else [output]
        tests.expected[number] = ExpectedValue("right", "In", [_with_tuples(each) for each in either])
    return tests


class _EitherSequence(list[Any]):
    """A list from JSON, which has no tuples: equal to a tuple of the same elements too."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list | tuple) and list(self) == list(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _with_tuples(value: Any) -> Any:
    return _EitherSequence(map(_with_tuples, value)) if isinstance(value, list) else value


def _asserts(sources: list[str], row: Mapping[str, Any], most: int) -> AssertTests:
    setup = "\n".join(_preparation(row.get(name)) for name in PREPARATIONS)
    entry_point = row.get("entry_point")
    try:
        tests = assert_tests(sources, setup, entry_point if isinstance(entry_point, str) else "")
    except SyntaxError as error:
        raise UnusableTests(f"Python with a syntax error on line {error.lineno}: {quote(error.msg, 60)}") from None
    except (ValueError, RecursionError, MemoryError):
        raise UnusableTests("Python that asserts nothing") from None
    del tests.tests[most:]
    return tests


def _preparation(value: Any) -> str:
    lines = value if isinstance(value, list) else [value]
    return "\n".join(line for line in lines if isinstance(line, str))


def _text(value: Any) -> str:
    """Standard input or output: a list of lines in some datasets."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
