"""Turn the `assert` statements of a test into observations, so that what is expected never enters the program's process.

`assert f(3) == 4` becomes `__observe__(0, f(3))`: the program's process reports the value of `f(3)`, and the 4 stays here, where the two
are compared. An operand that is no literal is reported too (`assert f(3) == expected`), and so is the truth of any other condition
(`assert is_close(f(3), 4.0)`): there a program that redefines what it is judged by can deceive the test.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backend.utils.text import quote

OBSERVE, OBSERVE_PAIR = "__observe__", "__observe_pair__"
"""What a program's process calls with (number, value), and with (number, operator, left, right)."""

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "Eq": operator.eq, "NotEq": operator.ne, "Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt, "GtE": operator.ge,
    "Is": operator.is_, "IsNot": operator.is_not, "In": lambda a, b: a in b, "NotIn": lambda a, b: a not in b,
}  # fmt: skip
_SINGLETONS = (None, True, False)


@dataclass(frozen=True, slots=True)
class ExpectedValue:
    """What an observation has to be. `form`: "left" or "right", the side of `operator` on which the literal `value` stands; "pair", where
    both sides are observed; "truth"."""

    form: str
    operator: str = ""
    value: Any = None

    def holds(self, observed: Any) -> bool:
        """Whether a decoded observation is as expected. Never raises."""
        try:
            if self.form == "truth":
                return observed is True
            left, right = observed if self.form == "pair" else self._sides(observed)
            return bool(OPERATORS[self.operator](left, right))
        except Exception:  # of comparing what cannot be compared, or unpacking what is no pair
            return False

    def _sides(self, observed: Any) -> tuple[Any, Any]:
        return (self.value, observed) if self.form == "left" else (observed, self.value)


@dataclass(frozen=True, slots=True)
class AssertTest:
    """One test: `source`, with observations in place of assertions, and the numbers of those that it must make in any case."""

    source: str
    required: frozenset[int]


@dataclass(slots=True)
class AssertTests:
    """The tests of a row. `setup` is run before them; `expected` has an entry for each observation, by its number."""

    setup: str = ""
    tests: list[AssertTest] = field(default_factory=list)
    expected: dict[int, ExpectedValue] = field(default_factory=dict)


def assert_tests(sources: list[str], setup: str = "", entry_point: str = "") -> AssertTests:
    """The tests in some pieces of Python. A test is an assertion at the top level, with what stands before it; a function `test_…` that
    asserts something; a call at the top level of a function that does; `check(entry_point)`, as in HumanEval. All else is setup.

    Raises SyntaxError, and ValueError where nothing could ever fail.
    """
    builder = _Builder()
    for source in (setup, *sources):
        builder.add(ast.parse(source))
    if entry_point.isidentifier() and "check" in builder.functions and not builder.tests:
        builder.add_call("check", [entry_point])
    if not builder.tests:
        raise ValueError("they assert nothing")
    return AssertTests(_text(builder.setup), builder.tests, builder.observations.expected)


class _Builder:
    """Sorts the statements of several sources into setup and tests, in their order."""

    def __init__(self) -> None:
        self.observations = _Observations()
        self.setup: list[ast.stmt] = []
        self.tests: list[AssertTest] = []
        self.functions: dict[str, frozenset[int]] = {}
        """Functions of the tests that assert something → the observations that a call of each makes in any case."""
        self._before: list[ast.stmt] = []
        """Statements since the last test, for the next one."""

    def add(self, module: ast.Module) -> None:
        for statement in module.body:
            self._add(statement)
        # What is left behind the last test of one source may be needed by the next source.
        self.setup += [] if self.tests else self._before
        self._before = self._before if self.tests else []

    def _add(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            asserts = _has_assert(statement)
            made, required = self.observations.of(statement, inside=statement.body)
            self.setup += made
            if asserts:
                self.functions[statement.name] = required
                if statement.name.startswith("test_") and _takes_nothing(statement):
                    self.add_call(statement.name, [])
        elif isinstance(statement, ast.Import | ast.ImportFrom | ast.ClassDef):
            self.setup += self.observations.of(statement)[0]
        elif _is_main_guard(statement):
            pass
        elif isinstance(statement, ast.Assert) or _has_assert(statement) or self._calls_a_test(statement):
            made, required = self.observations.of(statement)
            self._end_test([*self._before, *made], required | self._required_by(statement))
        else:
            self._before.append(statement)

    def add_call(self, function: str, arguments: list[str]) -> None:
        call = ast.Call(ast.Name(function, ast.Load()), [ast.Name(name, ast.Load()) for name in arguments], [])
        self._end_test([*self._before, ast.Expr(call)], self.functions[function])

    def _end_test(self, statements: list[ast.stmt], required: frozenset[int]) -> None:
        self.tests.append(AssertTest(_text(statements), required))
        self._before = []

    def _calls_a_test(self, statement: ast.stmt) -> bool:
        return _called(statement) in self.functions

    def _required_by(self, statement: ast.stmt) -> frozenset[int]:
        return self.functions.get(_called(statement), frozenset())


class _Observations(ast.NodeTransformer):
    """Replaces assertions, and numbers what they expect."""

    def __init__(self) -> None:
        self.expected: dict[int, ExpectedValue] = {}

    def of(self, statement: ast.stmt, inside: list[ast.stmt] | None = None) -> tuple[list[ast.stmt], frozenset[int]]:
        """The statement with observations, and the numbers of those that are made in any case: of an assertion itself, or of those directly
        in the body `inside`."""
        if isinstance(statement, ast.Assert):
            first = len(self.expected)
            return self.visit_Assert(statement), frozenset(range(first, len(self.expected)))
        required: set[int] = set()
        if inside is not None:
            body: list[ast.stmt] = []
            for part in inside:
                first = len(self.expected)
                made = self.visit(part)
                body += made if isinstance(made, list) else [made]
                required |= set(range(first, len(self.expected))) if isinstance(part, ast.Assert) else set()
            inside[:] = body
            return [statement], frozenset(required)
        return [self.visit(statement)], frozenset()

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        return [ast.Expr(self._observation(condition)) for condition in _conjuncts(node.test)]

    def _observation(self, condition: ast.expr) -> ast.Call:
        number = ast.Constant(len(self.expected))
        if isinstance(condition, ast.Compare) and len(condition.ops) == 1:
            name, left, right = type(condition.ops[0]).__name__, condition.left, condition.comparators[0]
            for form, literal, observed in (("right", right, left), ("left", left, right)):
                if (found := _literal(literal)) is not None:
                    self._expect(ExpectedValue(form, _operator_on(name, found[0]), found[0]))
                    return ast.Call(ast.Name(OBSERVE, ast.Load()), [number, observed], [])
            self._expect(ExpectedValue("pair", name))
            return ast.Call(ast.Name(OBSERVE_PAIR, ast.Load()), [number, ast.Constant(name), left, right], [])
        self._expect(ExpectedValue("truth"))
        truth = ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), condition))
        return ast.Call(ast.Name(OBSERVE, ast.Load()), [number, truth], [])

    def _expect(self, expected: ExpectedValue) -> None:
        self.expected[len(self.expected)] = expected


def _operator_on(name: str, literal: Any) -> str:
    """`is` between a value from another process and a literal means nothing but for the three singletons."""
    is_singleton = any(literal is value for value in _SINGLETONS)
    return name if is_singleton else {"Is": "Eq", "IsNot": "NotEq"}.get(name, name)


def _conjuncts(condition: ast.expr) -> Iterator[ast.expr]:
    """`a and b` asserts both."""
    if isinstance(condition, ast.BoolOp) and isinstance(condition.op, ast.And):
        for part in condition.values:
            yield from _conjuncts(part)
    else:
        yield condition


def _literal(node: ast.expr) -> tuple[Any] | None:
    """The value of a literal, in a tuple; None for any other expression."""
    try:
        return (ast.literal_eval(node),)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _called(statement: ast.stmt) -> str:
    """The name that a bare call at the top level calls; "" for any other statement."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""


def _has_assert(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def _is_main_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)


def _takes_nothing(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return isinstance(function, ast.FunctionDef) and not ast.unparse(function.args)


def _text(statements: list[ast.stmt]) -> str:
    return ast.unparse(ast.fix_missing_locations(ast.Module(statements, [])))


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
    return [
        StreamTest(_stream_text(a), _stream_text(b)) for a, b in list(zip(inputs, outputs, strict=True))[:most]
    ] or None


def _of_cases(cases: Sequence[Mapping[str, Any]], most: int) -> RowTests:
    name = cases[0].get("fn_name")
    if not all("input" in case and "output" in case for case in cases):
        raise UnusableTests("cases of which one has no input or no output")
    if name:
        return _calls(str(name), [(_parsed_input(case["input"]), case["output"]) for case in cases[:most]])
    return [StreamTest(_stream_text(case["input"]), _stream_text(case["output"])) for case in cases[:most]]


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


def _stream_text(value: Any) -> str:
    """Standard input or output: a list of lines in some datasets."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
