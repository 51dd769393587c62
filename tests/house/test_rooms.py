"""Which room may import which, as data, and a walk over every import statement, lazy ones included.

A room is a module or folder named in RULES. Every module of `app/` and `backend/` lies in exactly one (the longest name that fits);
a module that no rule names is an offence, and so is an import that its room's rule does not allow.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ANY = {"*"}
SPEC, TYPES = "backend.spec", "backend.types"
ADVANTAGES = "backend.training.advantages"
MODEL = {"app.model"}
PLAIN_DATA = {
    "app.model.memory_parts",
    "app.model.presets",
    "app.model.runs.marks",
    "app.model.runs.ranks",
    "app.model.completions.facts",
}
"""What widgets draw: data classes without Qt and without the session."""
SHELL = MODEL | {"app.theme", "app.stylesheet", "app.widgets"}
FRAME = SHELL | {
    "app.pages",
    "app.page_stack",
    "app.menus",
    "app.file_menu",
    "app.help_menu",
    "app.run_window",
    "app.message_boxes",
    "app.desktop",
}
PLOTS = {"PySide6", "pyqtgraph", "numpy"}
NUMBERS = {"mlx", "numpy"}

# room → (our rooms that it may import besides itself, packages that it may import besides the standard library)
RULES: dict[str, tuple[set[str], set[str]]] = {
    # ── backend, from the bottom up ──
    "backend": (set(), set()),
    SPEC: (set(), {"yaml", "pydantic", "pydantic_core"}),
    TYPES: ({SPEC}, set()),
    ADVANTAGES: (set(), {"mlx"}),
    "backend.child_process": ({SPEC}, set()),
    "backend.confinement": (set(), set()),
    "backend.rewards": (
        {SPEC, TYPES, ADVANTAGES, "backend.child_process", "backend.confinement"},
        {"math_verify", "regex"},
    ),
    "backend.engine": ({SPEC}, {*NUMBERS, "mlx_lm"}),
    "backend.models": (
        {SPEC, "backend.engine", "backend.child_process"},
        {*NUMBERS, "mlx_lm", "huggingface_hub", "gguf", "jinja2", "regex"},
    ),
    "backend.models.publish": ({SPEC, "backend.models"}, {"huggingface_hub", "keyring", "PIL", "yaml"}),
    "backend.data": (
        {SPEC, TYPES, "backend.models"},
        {"datasets", "fsspec", "huggingface_hub", "jinja2", "mlx_lm", "numpy", "pyarrow", "regex", "tokenizers"},
    ),
    "backend.generation": ({SPEC, TYPES, "backend.engine"}, {*NUMBERS, "mlx_lm", "llguidance"}),
    "backend.training.additive_metrics": (set(), {"mlx"}),
    "backend.training.losses": ({"backend.training.additive_metrics"}, {"mlx"}),
    "backend.training.microbatch": (set(), set()),
    "backend.training.batch": ({TYPES, "backend.training.microbatch"}, {"mlx"}),
    "backend.training": ({SPEC, "backend.engine", "backend.models", TYPES}, NUMBERS),
    "backend.run": (
        {SPEC, TYPES, "backend.rewards", "backend.child_process"}
        | {f"backend.{room}" for room in ("data", "models", "generation", "training", "engine")},
        {*NUMBERS, "mlx_lm", "psutil", "xxhash"},
    ),
    "backend.run.trackers": (
        {SPEC, "backend.child_process", "backend.models.publish.privacy"},
        {"tensorboardX", "trackio", "wandb"},
    ),
    "backend.chat": (
        {SPEC, TYPES, *(f"backend.{room}" for room in ("data", "models", "generation", "engine"))},
        NUMBERS,
    ),
    "backend.serve": (
        {SPEC, *(f"backend.{room}" for room in ("chat", "data", "models", "child_process", "rewards", "run"))}
        | {"backend.generation"},
        set(),
    ),
    "backend.demo": (
        {SPEC, TYPES, *(f"backend.{room}" for room in ("data", "generation", "models", "rewards", "run", "training"))},
        {*NUMBERS, "mlx_lm", "tokenizers", "transformers"},
    ),
    "backend.selftest": (
        {SPEC, TYPES, "backend.child_process", "backend.bench.about"}
        | {f"backend.{room}" for room in ("engine", "rewards", "run", "training")},
        {"mlx", "yaml"},
    ),
    "backend.bench": ({"backend"}, ANY),
    "backend.cli": ({"backend"}, {"rich", "typer", "yaml", "tokenizers"}),
    "backend.__main__": ({"backend"}, {"mlx", "typer"}),
    # ── app, from the bottom up ──
    "app": (set(), set()),
    "app.stylesheet": (set(), set()),
    "app.theme": ({SPEC, "app.stylesheet"}, {"PySide6"}),
    "app.model.undo": ({SPEC, "app.model"}, {"PySide6"}),
    "app.model.guide": ({SPEC}, {"markdown_it"}),
    "app.model": ({SPEC}, {"PySide6.QtCore", "numpy"}),
    "app.widgets": ({SPEC, "app.theme", "app.stylesheet", *PLAIN_DATA}, PLOTS),
    "app.pages.parts": (SHELL | {SPEC}, PLOTS),
    "app.pages": (SHELL | {SPEC, "app.pages.parts"}, PLOTS),
    "app.message_boxes": (set(), {"PySide6"}),
    "app.crash_catcher": (set(), {"PySide6"}),
    "app.file_menu": (SHELL | {SPEC, "app.message_boxes"}, {"PySide6"}),
    "app.help_menu": (SHELL | {SPEC, "app.file_menu"}, {"PySide6"}),
    "app.desktop": ({SPEC}, {"PySide6", "jeepney"}),
    "app.run_window": (SHELL | {SPEC, "app.help_menu", "app.menus", "app.message_boxes"}, {"PySide6"}),
    "app.page_stack": (SHELL | {"app.pages"}, {"PySide6", "shiboken6"}),
    "app.page_drawing": (FRAME | {SPEC, "app.window"}, {"PySide6"}),
    "app.menus": (SHELL | {"app.pages", "app.file_menu"}, {"PySide6"}),
    "app.window": (FRAME | {SPEC}, {"PySide6"}),
    "app.__main__": (
        FRAME | {SPEC, "app.window", "app.page_drawing", "app.crash_catcher"},
        {"PySide6"},
    ),
}

LIGHT = {SPEC, TYPES, "backend.rewards"}
HEAVY = {"mlx", "mlx_lm", "transformers", "datasets", "torch"}


# What is imported


@cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    return list(imports(path.read_text("utf-8")))


def imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import that can run, at any depth; `import_module("…")` with a plain name too."""
    tree = ast.parse(source)
    typing_blocks = _typing_blocks(tree) if "TYPE_CHECKING" in source else []
    for_typing = {id(node) for block in typing_blocks for node in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in for_typing:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _last_name(node.func) in ("import_module", "__import__"):
            yield from (
                (node.lineno, argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant)
            )


def _typing_blocks(tree: ast.Module) -> list[ast.stmt]:
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING"]
    return [statement for block in blocks for statement in block.body]


def _last_name(node: ast.expr) -> str:
    """`c` of `a.b.c`. Not by `ast.unparse`, which took most of this file's time."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@cache
def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name."""
    paths = [path for house in ("app", "backend") for path in (ROOT / house).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def module_of(imported: str) -> str | None:
    """The module that `from a.b import c` runs: a.b.c where that is one, else a.b."""
    known = (name for name in (imported, imported.rpartition(".")[0]) if name in modules())
    return next(known, None)


# Whether it is allowed


def lies_in(module: str, rooms: set[str]) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def room_of(module: str) -> str | None:
    """The longest name in RULES that `module` lies in; the roots `app` and `backend` mean only their `__init__`."""
    if module in ("app", "backend"):
        return module
    rooms = (room for room in RULES if room not in ("app", "backend") and lies_in(module, {room}))
    return max(rooms, key=len, default=None)


def offence(importer: str, imported: str) -> str:
    """Why this import is against the rules; "" where it is not."""
    top = imported.split(".")[0]
    room = room_of(importer)
    if room is None:
        return f"no rule names {importer}"
    if top in sys.stdlib_module_names:
        return ""
    if importer.startswith("backend") and top in ("app", "PySide6", "pyqtgraph"):
        return "the backend knows no window"
    if importer.startswith("app") and top == "backend" and not lies_in(imported, {SPEC}):
        return "of the backend the app may import backend.spec alone"
    if top in ("app", "backend"):
        return _offence_at_home(room, importer, imported)
    if room in LIGHT and top in HEAVY:
        return "it must import without the engine"
    allowed = RULES[room][1]
    return "" if allowed == ANY or lies_in(imported, allowed) else f"{room} may not import {top}"


def _offence_at_home(room: str, importer: str, imported: str) -> str:
    module = module_of(imported) or imported
    other_room = room_of(module)
    if room == other_room == "app.pages" and importer != "app.pages" and module not in ("app.pages", importer):
        return "a page may not import a page"
    if other_room == room or lies_in(module, {room}) or lies_in(module, RULES[room][0]):
        return ""
    return f"{room} may not import {other_room or module}"


def offences(name: str, path: Path) -> list[str]:
    file = str(path.relative_to(ROOT))
    imports_with_reasons = ((line, imported, offence(name, imported)) for line, imported in imports_of(path))
    return [f"{file}:{line} imports {imported}: {why}" for line, imported, why in imports_with_reasons if why]


def test_every_import_keeps_to_the_rooms():
    broken_rules = [line for name, path in sorted(modules().items()) for line in offences(name, path)]
    assert not broken_rules, "\n" + "\n".join(broken_rules)


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("app.window", "backend.run.trainer"),
        ("app.window", "mlx.core"),
        ("app.window", "pyqtgraph"),
        ("app.widgets.form.form", "app.model.draft.Draft"),
        ("app.pages.train_page", "app.pages.monitor_page"),
        ("app.pages.train_page", "backend.rewards.functions.r1"),
        ("app.model.draft", "PySide6.QtWidgets"),
        ("app.model.runs.run", "app.widgets.charts.plot"),
        ("app.model.session", "transformers"),
        ("app.model.session", "app.pages"),
        ("app.model.runs.run_summary", "backend.types"),
        ("backend.spec.config", "numpy"),
        ("backend.spec.rewards.catalog", "backend.rewards.functions.r1"),
        ("backend.rewards.runner.score", "mlx.core"),
        ("backend.training.losses", "mlx_lm"),
        ("backend.training.losses", "backend.models.policy"),
        ("backend.generation.rollout", "backend.models.policy"),
        ("backend.training.optimizers.schedules", "backend.run.trainer"),
        ("backend.run.trainer", "app.model.runs.run"),
        ("backend.__main__", "PySide6.QtCore"),
    ],
)
def test_a_forbidden_import_is_an_offence(importer: str, imported: str):
    assert offence(importer, imported)


def test_lazy_imports_and_import_module_are_seen():
    source = 'def f():\n    import mlx.core\n    importlib.import_module("backend.run.trainer")\n'
    assert list(imports(source)) == [(2, "mlx.core"), (3, "backend.run.trainer")]


def test_a_module_that_no_rule_names_is_an_offence() -> None:
    assert offence("backend.corridor", "json") == "no rule names backend.corridor"
    assert offence("backend.training.losses", "backend.corridor") == "backend.training.losses may not import backend"


def test_every_rule_names_a_room_that_exists() -> None:
    assert not [room for room in RULES if room not in modules()]


def test_colours_live_in_the_theme_alone():
    colour = re.compile(r"#[0-9a-fA-F]{6}\b")
    sources = [path for name, path in modules().items() if name.startswith("app") and name != "app.theme"]
    pictures = list((ROOT / "resources" / "icons").glob("*.svg"))
    assert pictures
    assert not [path.name for path in sources + pictures if colour.search(path.read_text("utf-8"))]
