"""No two modules and no two rooms import each other, not even for type annotations: a circle means that neither can be read alone."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from functools import cache

import pytest

from tests.house.test_rooms import ROOT, module_of, modules, room_of

Graph = dict[str, set[str]]


@cache
def module_graph() -> Graph:
    """Module → the modules of ours that it imports anywhere, under TYPE_CHECKING too."""
    graph: Graph = {}
    for name, path in modules().items():
        imported = {
            module_of(imported_module) for imported_module in imported_names(ast.parse(path.read_text("utf-8")))
        }
        graph[name] = {
            imported_module for imported_module in imported if imported_module is not None and imported_module != name
        }
    return graph


def imported_names(tree: ast.Module) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def grouped(graph: Graph, group_of: Callable[[str], str]) -> Graph:
    """The graph between groups of modules, without the imports inside a group."""
    groups: Graph = {}
    for module, imported in graph.items():
        home = group_of(module)
        groups.setdefault(home, set()).update(group for group in map(group_of, imported) if group != home)
    return groups


def circles(graph: Graph) -> list[list[str]]:
    """The sets of nodes that reach one another, each sorted; none in a graph without circles."""
    reachable = {node: _reachable_from(node, graph) for node in graph}
    rings = {
        frozenset(other for other in reachable[node] if node in reachable[other])
        for node in graph
        if node in reachable[node]
    }
    return sorted(sorted(ring) for ring in rings)


def _reachable_from(start: str, graph: Graph) -> set[str]:
    reached, waiting = set[str](), [start]
    while waiting:
        fresh = graph.get(waiting.pop(), set()) - reached
        reached |= fresh
        waiting += fresh
    return reached


def rule_of(module: str) -> str:
    """The room of RULES that the module lies in."""
    return room_of(module) or module


def top_of(module: str) -> str:
    """backend.engine, app.model, …: the entry at the top of its package."""
    return ".".join(module.split(".")[:2])


@pytest.mark.parametrize("group_of", [str, rule_of, top_of], ids=["modules", "rooms of the rules", "rooms at the top"])
def test_nothing_imports_in_a_circle(group_of: Callable[[str], str]) -> None:
    assert circles(grouped(module_graph(), group_of)) == []


def test_type_only_and_lazy_imports_count() -> None:
    source = "if TYPE_CHECKING:\n    from a.b import C\ndef f():\n    import d.e\n"
    assert sorted(imported_names(ast.parse(source))) == ["a.b.C", "d.e"]


def test_a_circle_is_found_through_any_number_of_modules() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": set()}) == []
    assert circles(grouped({"x.a": {"y.a"}, "y.b": {"x.b"}}, lambda module: module[0])) == [["x", "y"]]


def test_a_package_imports_only_those_above_it_in_the_table_of_the_architecture() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    rows = [row.split("|")[1] for row in page.splitlines() if row.startswith(("| `app/", "| `backend/"))]
    places = {
        name.strip("/").removesuffix(".py").replace("/", "."): place
        for place, row in enumerate(rows)
        for name in row.split("`")[1::2]
    }
    graph = grouped(module_graph(), top_of)
    assert len(places) > 15 and places.keys() <= graph.keys()
    below = {
        (home, other)
        for home, others in graph.items()
        for other in others
        if places.get(other, -1) > places.get(home, 99)
    }
    # Of `training/advantages.py` alone, which is plain Python: see the rules in `test_rooms`.
    assert below == {("backend.rewards", "backend.training")}
