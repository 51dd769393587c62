"""One of our modules as text: its top-level statements, the names that each binds and uses, and the part of it that some names need."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from backend.utils.places import project_root

PACKAGE = "backend"
"""The top of the names that are followed; everything else is somebody's library."""


@dataclass(frozen=True, slots=True)
class Use:
    """A name of one of our modules that some code needs: `name` of `module`; "" for the module itself, all of it."""

    module: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Statement:
    """A top-level statement: the names that it binds, those of its own module that it uses, defined there or imported, and its lines
    (from, to), comments above it and a string below it included."""

    node: ast.stmt
    binds: frozenset[str]
    defined: frozenset[str]
    imported: frozenset[str]
    uses: frozenset[Use]
    lines: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """A module: its docstring's last line, its statements in order, its imports by the name that they bind."""

    name: str
    text: tuple[str, ...]
    header: int
    """Lines of the docstring and of what stands above it."""
    statements: tuple[Statement, ...]
    imports: dict[str, ast.Import | ast.ImportFrom]

    def binding(self, name: str) -> list[Statement]:
        return [statement for statement in self.statements if name in statement.binds]

    def part(self, names: Iterable[str]) -> str:
        """The source of the statements that bind these names, and of the imports among them; nothing else but the docstring."""
        wanted, lines = set(names), [*self.text[: self.header], ""]
        lines += ["from __future__ import annotations", "", *import_lines(self, wanted)]
        for statement in self.statements:
            if is_kept(statement, wanted):
                blank = [""] * (
                    2 if isinstance(statement.node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else 1
                )
                lines += [*blank, *self.text[statement.lines[0] : statement.lines[1]]]
        return "\n".join(lines).rstrip() + "\n"


def is_kept(statement: Statement, wanted: set[str]) -> bool:
    """Whether a statement belongs to these names: it binds one; or it binds nothing and speaks of them alone, as a call that registers."""
    if statement.binds:
        return bool(statement.binds & wanted)
    return bool(statement.defined) and statement.defined <= wanted


def import_lines(module: ModuleSource, wanted: set[str]) -> Iterator[str]:
    """The imports of these names, each statement with what is wanted of it."""
    for node in dict.fromkeys(module.imports.values()):
        aliases = [alias for alias in node.names if _bound(alias) in wanted]
        if aliases and isinstance(node, ast.ImportFrom):
            yield ast.unparse(ast.ImportFrom(node.module, aliases, node.level))
        elif aliases:
            yield ast.unparse(ast.Import(aliases))


def module_path(name: str) -> Path | None:
    """The file of one of our modules; None for a name that is none."""
    base = project_root().joinpath(*name.split("."))
    paths = (base.with_name(f"{base.name}.py"), base / "__init__.py")
    return next((path for path in paths if path.is_file()), None) if name.split(".")[0] == PACKAGE else None


@cache
def module_source(name: str) -> ModuleSource:
    """Raises FileNotFoundError for a module that is not there as text."""
    path = module_path(name)
    if path is None:
        raise FileNotFoundError(f"the source of {name} is not here")
    source = path.read_text(encoding="utf-8")
    tree, text = ast.parse(source), tuple(source.splitlines())
    header = tree.body[0].end_lineno or 0 if tree.body and _is_string(tree.body[0]) else 0
    imports: dict[str, ast.Import | ast.ImportFrom] = {}
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)) and getattr(node, "module", "") != "__future__":
            imports |= {_bound(alias): node for alias in node.names}
    return ModuleSource(name, text, header, tuple(_statements(tree, text, imports)), imports)


def _bound(alias: ast.alias) -> str:
    return alias.asname or alias.name.split(".")[0]


def _is_string(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _statements(
    tree: ast.Module, text: tuple[str, ...], imports: dict[str, ast.Import | ast.ImportFrom]
) -> Iterator[Statement]:
    body = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
    own = {name for node in body for name in _binds(node)}
    for place, node in enumerate(body):
        if _is_string(node):
            continue
        last = node.end_lineno or 0
        if place + 1 < len(body) and _is_string(body[place + 1]) and isinstance(node, (ast.Assign, ast.AnnAssign)):
            last = body[place + 1].end_lineno or last
        names = frozenset(name.id for name in ast.walk(node) if isinstance(name, ast.Name))
        lines = (_first(node, text), last)
        yield Statement(
            node, frozenset(_binds(node)), names & own, names & imports.keys(), frozenset(_uses(node, imports)), lines
        )


def _first(node: ast.stmt, text: tuple[str, ...]) -> int:
    """The index of a statement's first line, with decorators and the comments directly above."""
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))]) - 1
    while first and text[first - 1].startswith("#"):
        first -= 1
    return first


def _binds(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from (
                part.id for part in ast.walk(target) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
            )
    elif isinstance(node, ast.Try):
        for inner in node.body:
            yield from _binds(inner)


def _uses(node: ast.stmt, imports: dict[str, ast.Import | ast.ImportFrom]) -> Iterator[Use]:
    """What a statement needs of our other modules: names that it imports inside, attributes of modules, modules that it names in a string."""
    inner = [part for part in ast.walk(node) if isinstance(part, (ast.Import, ast.ImportFrom))]
    imports = imports | {_bound(alias): part for part in inner for alias in part.names}
    for part in ast.walk(node):
        if isinstance(part, (ast.Import, ast.ImportFrom)):
            yield from imported(part)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.startswith(f"{PACKAGE}."):
            if module_path(part.value):
                yield Use(part.value)
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id in imports:
            module = _module_behind(part.value.id, imports[part.value.id])
            if module:
                yield Use(module, part.attr)


def _module_behind(name: str, node: ast.Import | ast.ImportFrom) -> str:
    """The module of ours that an imported name stands for; "" where it stands for anything else."""
    for alias in node.names:
        if _bound(alias) == name and isinstance(node, ast.ImportFrom):
            whole = f"{node.module}.{alias.name}"
            return whole if module_path(whole) else ""
    return ""


def imported(node: ast.Import | ast.ImportFrom, only: str = "") -> Iterator[Use]:
    """What an import statement needs of our modules; `only` the part that binds that name. A module is needed by what is used of it."""
    for alias in node.names:
        if only and _bound(alias) != only:
            continue
        if isinstance(node, ast.ImportFrom) and module_path(node.module or ""):
            whole = f"{node.module}.{alias.name}"
            yield Use(whole, NOTHING) if module_path(whole) else Use(node.module or "", alias.name)
        elif isinstance(node, ast.Import) and module_path(alias.name):
            yield Use(alias.name)


NOTHING = "(nothing)"
"""In place of a name: the module has to be there, whatever is in it."""
