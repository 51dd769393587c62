"""Who may import whom (DESIGN, section 3), as data, and a walk over every import statement, lazy ones included.

A room is a module or a folder named in RULES; rooms may be named before they are written. A module that no rule names
is a helper: what it imports counts as imported by every room that uses it, so nothing is smuggled in through one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ANY = {"*"}
SPEC = "backend.spec"
ENGINE = {"backend.rollout", "backend.policy", "backend.data", "backend.checkpoint"}
MATHS = {"backend.losses", "backend.batch", "backend.ranks"}
CORE = {"app.draft", "app.task", "app.run", "app.charts", "app.prefs"}
SHELL = CORE | {"app.studio", "app.theme", "app.widgets"}
PLOTS = {"PySide6", "pyqtgraph", "numpy"}

# room → (our rooms it may enter besides itself, packages it may import besides the standard library)
RULES: dict[str, tuple[set[str], set[str]]] = {
    SPEC: (set(), {"yaml", "pydantic"}),
    "backend.nouns": ({SPEC}, set()),
    "backend.rewards": ({SPEC, "backend.nouns"}, ANY),  # the scoring libraries it needs, none of HEAVY
    **{room: ({SPEC, "backend.nouns"}, {"mlx", "numpy"}) for room in MATHS},
    **{room: ({SPEC, "backend.nouns", "backend.ranks"}, ANY) for room in ENGINE},
    **{
        f"backend.{room}": ({SPEC, "backend.nouns", *MATHS, *ENGINE}, ANY)
        for room in ("export", "optimize", "evaluate")
    },
    "backend.trainer": ({"backend"}, ANY),
    "app.theme": ({SPEC}, {"PySide6"}),
    "app.widgets": ({"app.theme", SPEC}, PLOTS),
    **{room: (CORE | {SPEC}, {"PySide6.QtCore", "numpy"}) for room in CORE},
    "app.studio": (CORE | {SPEC}, {"PySide6.QtCore"}),
    "app.pages": (SHELL | {SPEC}, PLOTS),
    "app.window": (SHELL | {"app.pages", "app.actions", SPEC}, {"PySide6"}),
    "app.__main__": (SHELL | {"app.pages", "app.window", SPEC}, {"PySide6"}),
}
"""Beside DESIGN's table: the window may use widgets, which know nothing of pages, and the studio that holds the session."""

LIGHT = {SPEC, "backend.nouns", "backend.rewards"}
HEAVY = {"mlx", "mlx_lm", "transformers", "datasets", "torch"}
EXCEPTIONS = {("app/__main__.py", "backend.__main__")}
"""A bundled app has one executable: called with --backend it is the trainer, and that process opens no window."""


# What is imported


@cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    return list(imports(path.read_text("utf-8")))


def imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import that can run, wherever it stands; `import_module("…")` with a plain name too."""
    tree = ast.parse(source)
    for_typing = {id(node) for block in _typing_blocks(tree) for node in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in for_typing:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield from ((node.lineno, each.value) for each in node.args[:1] if isinstance(each, ast.Constant))


def _typing_blocks(tree: ast.Module) -> list[ast.stmt]:
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    return [statement for block in blocks for statement in block.body]


@cache
def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name."""
    paths = [path for house in ("app", "backend") for path in (ROOT / house).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def module_of(imported: str) -> str | None:
    """The module that `from a.b import c` runs: a.b.c where that is one, else a.b."""
    known = (name for name in (imported, imported.rpartition(".")[0]) if name in modules())
    return next(known, None)


# Whether it may be


def lies_in(module: str, rooms: set[str]) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def room_of(module: str) -> str | None:
    return max((room for room in RULES if lies_in(module, {room})), key=len, default=None)


def offence(importer: str, imported: str, seen: frozenset[str] = frozenset()) -> str:
    """Why this import is against the rules; "" where it is not."""
    top = imported.split(".")[0]
    if top in sys.stdlib_module_names:
        return ""
    if importer.startswith("backend") and top in ("app", "PySide6", "pyqtgraph"):
        return "the backend knows no window"
    if importer.startswith("app") and top == "backend" and not lies_in(imported, {SPEC}):
        return "of the backend the app may enter backend.spec alone"
    room = room_of(importer)
    if room is None:
        return ""
    if top in ("app", "backend"):
        return _offence_at_home(room, importer, imported, seen)
    return _offence_abroad(room, imported, top)


def _offence_at_home(room: str, importer: str, imported: str, seen: frozenset[str]) -> str:
    theirs = room_of(imported)
    if room == theirs == "app.pages" and importer != "app.pages" and not lies_in(imported, {importer}):
        return "a page may not import a page"
    if theirs is not None:
        return "" if theirs == room or lies_in(imported, RULES[room][0]) else f"{room} may not enter {theirs}"
    helper = module_of(imported)
    if helper is None or helper in seen:
        return ""
    through = (offence(importer, each, seen | {helper}) for _, each in imports_of(modules()[helper]))
    return next((f"through {helper}: {why}" for why in through if why), "")


def _offence_abroad(room: str, imported: str, top: str) -> str:
    if room in LIGHT and top in HEAVY:
        return "it must import without the engine"
    allowed = RULES[room][1]
    return "" if allowed == ANY or lies_in(imported, allowed) else f"{room} may not import {top}"


def offences(name: str, path: Path) -> list[str]:
    file = str(path.relative_to(ROOT))
    found = ((line, each, offence(name, each)) for line, each in imports_of(path))
    return [
        f"{file}:{line} imports {each}: {why}" for line, each, why in found if why and (file, each) not in EXCEPTIONS
    ]


def test_every_import_keeps_to_the_rooms():
    found = [line for name, path in sorted(modules().items()) for line in offences(name, path)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("app.window", "backend.trainer"),
        ("app.window", "mlx.core"),
        ("app.window", "pyqtgraph"),
        ("app.widgets.form", "app.draft.Draft"),
        ("app.pages.train", "app.pages.monitor"),
        ("app.pages.train", "backend.rewards.builtin"),
        ("app.draft", "PySide6.QtWidgets"),
        ("app.run", "app.widgets.plot"),
        ("app.studio", "transformers"),
        ("app.studio", "app.pages"),
        ("app.wording", "backend.nouns"),
        ("backend.spec.config", "numpy"),
        ("backend.spec.catalog", "backend.rewards.builtin"),
        ("backend.rewards.score", "mlx.core"),
        ("backend.losses", "mlx_lm"),
        ("backend.losses", "backend.policy"),
        ("backend.rollout", "backend.policy"),
        ("backend.optimize", "backend.trainer"),
        ("backend.trainer", "app.run"),
        ("backend.__main__", "PySide6.QtCore"),
    ],
)
def test_the_walk_would_notice(importer: str, imported: str):
    assert offence(importer, imported)


def test_lazy_imports_and_import_module_are_seen():
    source = 'def f():\n    import mlx.core\n    importlib.import_module("backend.trainer")\n'
    assert list(imports(source)) == [(2, "mlx.core"), (3, "backend.trainer")]


def test_a_helper_hides_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    helper = tmp_path / "helper.py"
    helper.write_text("import mlx_lm\n")
    monkeypatch.setitem(modules(), "backend.helper", helper)
    assert offence("backend.losses", "backend.helper.something") == (
        "through backend.helper: backend.losses may not import mlx_lm"
    )


def test_exceptions_are_still_needed():
    for file, imported in EXCEPTIONS:
        assert imported in [module for _, module in imports_of(ROOT / file)]


def test_colours_live_in_the_theme_alone():
    colour = re.compile(r"#[0-9a-fA-F]{6}\b")
    sources = [path for name, path in modules().items() if name.startswith("app") and name != "app.theme"]
    pictures = list((ROOT / "resources" / "icons").glob("*.svg"))
    assert pictures
    assert not [path.name for path in sources + pictures if colour.search(path.read_text("utf-8"))]
