"""The tests of a row for `code_tests`, without the expected values, which the program never sees.

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
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from backend.utils.text import quote

OBSERVE, OBSERVE_PAIR = "__observe__", "__observe_pair__"
"""Names called with (number, value) and (number, operator, left, right)."""

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "Eq": operator.eq,
    "NotEq": operator.ne,
    "Lt": operator.lt,
    "LtE": operator.le,
    "Gt": operator.gt,
    "GtE": operator.ge,
    "Is": operator.is_,
    "IsNot": operator.is_not,
    "In": lambda a, b: a in b,
    "NotIn": lambda a, b: a not in b,
}


@dataclass(frozen=True, slots=True)
class ExpectedValue:
    """Expected observation. `form`: "left" or "right", the side with the literal `value`; "pair"; or "truth"."""

    form: str
    operator: str = ""
    value: Any = None

    def holds(self, observed: Any) -> bool:
        """Compare a decoded observation. Never raises."""
        try:
            if self.form == "truth":
                return observed is True
            sides = {"left": lambda: (self.value, observed), "right": lambda: (observed, self.value)}
            left, right = sides.get(self.form, lambda: observed)()
            return bool(OPERATORS[self.operator](left, right))
        except Exception:  # values that cannot be compared, or no pair
            return False


@dataclass(frozen=True, slots=True)
class AssertTest:
    """A test with observations for assertions, and those it always makes."""

    source: str
    required: frozenset[int]


@dataclass(slots=True)
class AssertTests:
    """Tests of a row. `setup` runs first; `expected` by observation number."""

    setup: str = ""
    tests: list[AssertTest] = field(default_factory=list)
    expected: dict[int, ExpectedValue] = field(default_factory=dict)


def assert_tests(sources: list[str], setup: str = "", entry_point: str = "") -> AssertTests:
    """Tests in some pieces of Python. A test is a top-level assertion with what precedes it, a `test_…` function, a
    call of an asserting function, or HumanEval's `check(entry_point)`. The rest is setup. Raises SyntaxError, and
    ValueError if nothing can fail."""
    observations = _Observations()
    tests: list[AssertTest] = []
    asserting: dict[str, frozenset[int]] = {}  # asserting functions → observations that a call always makes
    prepared: list[ast.stmt] = []
    before: list[ast.stmt] = []  # statements since the last test

    def end_test(statements: list[ast.stmt], required: frozenset[int]) -> None:
        tests.append(AssertTest(_unparsed([*before, *statements]), required))
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
                    end_test([ast.Expr(_call(statement.name))], required)
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
        end_test([ast.Expr(_call("check", ast.Name(entry_point, ast.Load())))], asserting["check"])
    if not tests:
        raise ValueError("they assert nothing")
    return AssertTests(_unparsed(prepared), tests, observations.expected)


def _call(function: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(function, ast.Load()), list(arguments), [])


class _Observations(ast.NodeTransformer):
    """Replaces assertions by numbered observations."""

    def __init__(self) -> None:
        self.expected: dict[int, ExpectedValue] = {}

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
        conjuncts, waiting = list[ast.expr](), [node.test]
        while waiting:
            condition = waiting.pop(0)
            if isinstance(condition, ast.BoolOp) and isinstance(condition.op, ast.And):
                waiting = [*condition.values, *waiting]
            else:
                conjuncts.append(condition)
        return [ast.Expr(self._observation(condition)) for condition in conjuncts]

    def _observation(self, condition: ast.expr) -> ast.Call:
        number = len(self.expected)
        if not isinstance(condition, ast.Compare) or len(condition.ops) != 1:
            self.expected[number] = ExpectedValue("truth")
            truth = ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), condition))
            return _call(OBSERVE, ast.Constant(number), truth)
        name, left, right = type(condition.ops[0]).__name__, condition.left, condition.comparators[0]
        for form, literal, observed in (("right", right, left), ("left", left, right)):
            try:
                value = ast.literal_eval(literal)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                continue
            if not any(value is singleton for singleton in (None, True, False)):
                # `is` between a value from another process and a literal means nothing but for the singletons.
                name = {"Is": "Eq", "IsNot": "NotEq"}.get(name, name)
            self.expected[number] = ExpectedValue(form, name, value)
            return _call(OBSERVE, ast.Constant(number), observed)
        self.expected[number] = ExpectedValue("pair", name)
        return _call(OBSERVE_PAIR, ast.Constant(number), ast.Constant(name), left, right)


def _unparsed(statements: list[ast.stmt]) -> str:
    return ast.unparse(ast.fix_missing_locations(ast.Module(statements, [])))


PREPARATIONS = ("test_setup_code", "test_imports")  # MBPP columns with code to run before tests


class UnusableTestsError(ValueError):
    """The column holds no tests; the text completes a message."""


@dataclass(frozen=True, slots=True)
class StreamTest:
    """Standard input and expected output."""

    input: str
    output: str


RowTests = AssertTests | list[StreamTest]


def row_tests(value: Any, row: Mapping[str, Any], most: int) -> RowTests | None:
    """First `most` tests of a row, None without any. Raises UnusableTestsError."""
    value = _parsed(value)
    if isinstance(value, Mapping) and "test_cases" in value:
        value = _parsed(value["test_cases"])
    if value is None or value == "" or value == [] or value == {}:
        return None
    if isinstance(value, Mapping):
        inputs, outputs = value.get("inputs"), value.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise UnusableTestsError("a mapping without as many inputs as outputs")
        pairs = list(zip(inputs, outputs, strict=True))[:most]
        if name := value.get("fn_name"):
            return _calls(str(name), pairs)
        return _stream_tests(pairs) or None
    if isinstance(value, str):
        return _asserts([value], row, most)
    if not isinstance(value, Sequence):
        raise UnusableTestsError(f"{type(value).__name__}, which is no text, list or mapping")
    if all(isinstance(item, str) for item in value):
        return _asserts(list(value), row, most)
    if not all(isinstance(item, Mapping) for item in value):
        raise UnusableTestsError("a list that holds neither texts nor mappings")
    if not all("input" in case and "output" in case for case in value):
        raise UnusableTestsError("cases of which one has no input or no output")
    pairs = [(case["input"], case["output"]) for case in value[:most]]
    if name := value[0].get("fn_name"):
        return _calls(str(name), [(_parsed(given), output) for given, output in pairs])
    return _stream_tests(pairs)


def _parsed(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value  # Python may begin so too
    return value


def _calls(name: str, cases: list[tuple[Any, Any]]) -> AssertTests:
    if not name.isidentifier():
        raise UnusableTestsError(f"the function name {quote(name, 30)}")
    tests = AssertTests()
    for number, (arguments, output) in enumerate(cases):
        if not isinstance(arguments, list):
            raise UnusableTestsError("inputs of a function that are no lists of arguments")
        call = f"{OBSERVE}({number}, __entry__({name!r})(*{arguments!r}))"
        tests.tests.append(AssertTest(call, frozenset({number})))
        either = [output, output[0]] if isinstance(output, list) and len(output) == 1 else [output]
        tests.expected[number] = ExpectedValue("right", "In", list(_EitherSequence(either)))
    return tests


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


def _stream_tests(pairs: Iterable[tuple[Any, Any]]) -> list[StreamTest]:
    texts = [["\n".join(map(str, each)) if isinstance(each, list) else str(each) for each in pair] for pair in pairs]
    return [StreamTest(*pair) for pair in texts]
