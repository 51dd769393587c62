"""The one-expression changes of a module: a comparison, an operator, a constant, a condition or a call that becomes its neighbour."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*"}
NAMES = {
    "min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "sum": "max", "any": "all", "all": "any",
    "argmax": "argmin", "floor": "ceil", "logsumexp": "max", "isnan": "isinf",
}  # fmt: skip
NO_BEHAVIOUR = {"slots", "frozen", "kw_only", "repr", "strict", "init", "compare"}
"""Keyword arguments of `dataclass`, `field` and `zip` that do not change what a correct program computes."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """Characters `start`–`end` of `module` replaced by `new`."""

    module: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def applied_to(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]

    @property
    def change(self) -> str:
        """Its line, the part that changes marked: `0 → 1` alone names none of the zeros of a line."""
        source = (ROOT / self.module).read_bytes()
        before = source[source.rfind(b"\n", 0, self.start) + 1 : self.start].decode().lstrip()
        after = source[self.end :].split(b"\n", 1)[0].decode()
        return f"{' '.join(f'{before}⟦{self.old}⟧{after}'.split())}  →  {' '.join(self.new.split())}"

    def __str__(self) -> str:
        return f"{self.module}:{self.line}  {self.change}"


@cache
def mutations(module: str) -> tuple[Mutation, ...]:
    """Every mutation of one file, in the order of its lines."""
    source = (ROOT / module).read_text("utf-8")
    tree = ast.parse(source)
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line.encode()))
    data = source.encode()

    def byte_range(node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return offsets[node.lineno - 1] + node.col_offset, offsets[node.end_lineno - 1] + node.end_col_offset

    changes = []
    for node in _expressions(tree):
        start, end = byte_range(node)
        for new in _changes(node, lambda part: data[slice(*byte_range(part))].decode()):
            mutation = Mutation(module, node.lineno, start, end, data[start:end].decode(), new)
            if _compiles(mutation.applied_to(data)):
                changes.append(mutation)
    return tuple(sorted(changes, key=lambda mutation: mutation.start))


def _expressions(tree: ast.Module) -> Iterator[ast.expr]:
    """Expressions that run: annotations, docstrings, f-strings and `NO_BEHAVIOUR` are left out."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and (node.arg in NO_BEHAVIOUR or _is_last_axis(node)):
            skipped.update(id(part) for part in ast.walk(node.value))
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if annotation is not None:
                skipped.update(id(part) for part in ast.walk(annotation))
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(part) for part in ast.walk(node))
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.expr) and id(node) not in skipped)


def _is_last_axis(node: ast.keyword) -> bool:
    """`axis=-1`: 1 in its place is the same axis of a matrix and an error elsewhere."""
    return node.arg == "axis" and isinstance(node.value, ast.UnaryOp)


def _compiles(source: bytes) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def _changes(node: ast.expr, text) -> Iterator[str]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield f"({text(node.left)}) {COMPARISONS[type(node.ops[0])]} ({text(node.comparators[0])})"
    elif (
        isinstance(node, ast.BinOp)
        and type(node.op) in ARITHMETIC
        and not isinstance(node.left, ast.Constant | ast.JoinedStr)
        and not isinstance(node.right, ast.JoinedStr)
        and not (isinstance(node.right, ast.Constant) and isinstance(node.right.value, str))
    ):
        yield f"({text(node.left)}) {ARITHMETIC[type(node.op)]} ({text(node.right)})"
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield "(" + word.join(f"({text(value)})" for value in node.values) + ")"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield f"({text(node.operand)})"
    elif isinstance(node, ast.IfExp):
        yield f"({text(node.orelse)} if {text(node.test)} else {text(node.body)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield str(node.value + 1)
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in NAMES:
            called = text(node.func)
            yield called[: len(called) - len(name)] + NAMES[name] + text(node)[len(called) :]
        elif name in ("stop_gradient", "sorted", "reversed", "abs", "exp", "expm1") and len(node.args) == 1:
            yield f"({text(node.args[0])})"


def by_hand(module: str, old: str, new: str) -> Mutation:
    """The mutation that replaces `old`, which the file has once."""
    source = (ROOT / module).read_text("utf-8")
    if source.count(old) != 1:
        raise SystemExit(f"{module} has {old!r} {source.count(old)} times, not once.")
    before = source[: source.index(old)]
    start = len(before.encode())
    return Mutation(module, before.count("\n") + 1, start, start + len(old.encode()), old, new)
