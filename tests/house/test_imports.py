"""Rules for imports, checked by reading every import statement of `app/` and `backend/`, lazy ones included."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOLD_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
QT = ("PySide6", "pyqtgraph", "shiboken6")
ENGINE = ("mlx", "mlx_lm", "transformers", "datasets", "torch", "numpy", "huggingface_hub", "pyarrow")

FORBIDDEN: list[tuple[str, tuple[str, ...]]] = [
    ("backend", ("app", *QT)),
    ("app", ("mlx", "mlx_lm", "transformers", "datasets", "torch", "huggingface_hub")),
    ("app.widgets", ("app.state.session", "app.state.draft", "app.pages", "app.window")),
    ("app.state", ("app.widgets", "app.pages", "app.window", "PySide6.QtWidgets", "PySide6.QtGui", "pyqtgraph")),
    ("app.pages", ("app.window", "app.menus")),
    ("backend.training", ("backend.trainer", "backend.runs", "backend.sampling", "backend.rewards", "backend.cli")),
    ("backend.training.losses", ("backend.models", "backend.config", "backend.engine", "mlx_lm")),
    ("backend.training.batch", ("backend.models", "backend.config", "backend.engine", "mlx_lm")),
    ("backend.sampling", ("backend.trainer", "backend.training", "backend.rewards", "backend.cli")),
    ("backend.engine", ("backend.trainer", "backend.training", "backend.sampling", "backend.models", "backend.cli")),
    ("backend.rewards", ("mlx", "mlx_lm", "transformers", "backend.trainer", "backend.models", "backend.cli")),
    ("backend.utils", ("backend.trainer", "backend.training", "backend.models", "backend.cli", "backend.runs")),
]
"""(part, what it must not import). A name stands for everything below it."""

ALLOWED = {
    ("app.state.draft", "PySide6.QtGui"),  # QUndoStack is in QtGui
    ("backend.rewards", "backend.training.advantages"),
    ("backend.rewards.bench", "backend.trainer.health.rules"),
    ("backend.sampling.chat", "backend.trainer.memory.estimate"),
}


@cache
def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name."""
    paths = [path for program in ("app", "backend") for path in (ROOT / program).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


@cache
def imports_of(module: str) -> list[tuple[int, str]]:
    return list(imports(modules()[module].read_text("utf-8")))


def imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, imported name) of every import at any depth but those under TYPE_CHECKING; `import_module("…")` counts."""
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            pending += node.orelse
        else:
            pending += [part for part in ast.iter_child_nodes(node) if isinstance(part, HOLD_STATEMENTS)]
    for call in re.finditer(r'import_module\("([\w.]+)"', source):
        yield source.count("\n", 0, call.start()) + 1, call[1]


def module_of(imported: str) -> str | None:
    """The module of ours that `from a.b import c` runs: a.b.c if that is one, else a.b."""
    return next((name for name in (imported, imported.rpartition(".")[0]) if name in modules()), None)


def is_below(name: str, parts: tuple[str, ...]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def offence(importer: str, imported: str) -> str:
    """Why this import breaks a rule; "" if it does not."""
    if any(is_below(importer, (who,)) and is_below(imported, (what,)) for who, what in ALLOWED):
        return ""
    for part, forbidden in FORBIDDEN:
        if is_below(importer, (part,)) and is_below(imported, forbidden):
            return f"{part} must not import {imported}"
    own = (".".join(importer.split(".")[:3]), "app.pages.shared")
    if is_below(importer, ("app.pages",)) and imported.startswith("app.pages.") and not is_below(imported, own):
        return "a page must not import a page"
    return ""


def test_every_import_follows_the_rules() -> None:
    offences = [
        f"{modules()[name].relative_to(ROOT)}:{line}: {why}"
        for name in sorted(modules())
        for line, imported in imports_of(name)
        if (why := offence(name, imported))
    ]
    assert not offences, "\n" + "\n".join(offences)


def test_what_the_window_imports_of_the_backend_loads_no_engine() -> None:
    """Follows the imports from `app/` through the backend, lazy ones too."""
    graph = {name: imported | {name.rpartition(".")[0] or name} for name, imported in our_imports().items()}
    reached = reachable([name for name in modules() if name.startswith("app")], graph)
    offences = [
        f"{modules()[name].relative_to(ROOT)}:{line} imports {imported}"
        for name in sorted(reached)
        for line, imported in imports_of(name)
        if name.startswith("backend") and module_of(imported) is None and is_below(imported, ENGINE)
    ]
    assert not offences, "\n" + "\n".join(offences)
    assert len(reached) > 100


def test_mlx_vlm_is_imported_only_inside_functions() -> None:
    """Runs on text load nothing of it."""
    importing = [
        name for name in modules() if any(is_below(imported, ("mlx_vlm",)) for _, imported in imports_of(name))
    ]
    tops = [node for name in importing for node in ast.parse(modules()[name].read_text("utf-8")).body]
    assert importing
    assert not [ast.unparse(node) for node in tops if re.match(r"(import|from) mlx_vlm", ast.unparse(node))]


def test_no_two_modules_import_each_other() -> None:
    reached = {name: reachable([name], our_imports()) for name in modules()}
    assert not [(name, other) for name in reached for other in reached[name] - {name} if name in reached[other]]


@cache
def our_imports() -> dict[str, set[str]]:
    """The modules of ours that each module imports; importing a.b runs a, too, which is left out here."""
    return {
        name: {ours for _, imported in imports_of(name) if (ours := module_of(imported)) not in (None, name)}
        for name in modules()
    }


def reachable(starts: list[str], graph: dict[str, set[str]]) -> set[str]:
    """What is imported on the way from these modules, themselves included."""
    reached, waiting = set(starts), list(starts)
    while waiting:
        new = graph[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def test_colours_live_in_the_theme_alone() -> None:
    sources = [path for name, path in modules().items() if name.startswith("app") and name != "app.theme"]
    icons = list((ROOT / "resources" / "icons").glob("*.svg"))
    assert icons
    assert not [path.name for path in sources + icons if re.search(r"#[0-9a-fA-F]{6}\b", path.read_text("utf-8"))]


def test_no_standard_module_is_shadowed() -> None:
    assert not {name.split(".")[0] for name in modules()} & sys.stdlib_module_names


SOURCES = sorted(path for program in ("app", "backend") for path in (ROOT / program).rglob("*.py"))

DOCSTRING = re.compile(r'(?:#.*\n|\s)*r?"""\s*\S')


def test_every_module_says_what_it_is() -> None:
    silent = [path for path in SOURCES if not DOCSTRING.match(path.read_text("utf-8"))]
    assert not silent


def test_every_source_file_that_a_document_names_exists() -> None:
    paths = re.compile(r"`((?:app|backend|packaging|resources|tests)/[\w/]+(?:\.py|/))")
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = {(document.name, path) for document in documents for path in paths.findall(document.read_text("utf-8"))}
    assert len(named) > 50
    assert not [place for place in sorted(named) if not (ROOT / place[1]).exists()]
