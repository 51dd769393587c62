"""Reward functions listed by reading source text: name, label, what it scores, line.

It never runs a person's file, and it imports no other room, so the window may ask it as often as it likes. The price:
it sees the names that stand in the text, not those that a file works out while it runs (`computes_names`).
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from backend.spec.faults import Mistake

BUILT_IN = "built in"
DEFAULT_REWARDS = (
    "r1_accuracy_reward_func",
    "r1_int_reward_func",
    "r1_strict_format_reward_func",
    "r1_soft_format_reward_func",
    "r1_count_xml",
)
"""What a run is scored by when `reward_functions` is left out."""

_REWARDS_SOURCE = Path(__file__).parents[1] / "rewards" / "builtin.py"
_REWARD_FILE = "reward_functions_file"
_REWARD_DECORATOR = "register_reward_function"
_SENTENCE_END = re.compile(r"(?<=[.!?])\s")


@dataclass(frozen=True, slots=True)
class RewardEntry:
    """One reward function as a table shows it.

    `scores` is the first sentence of its docstring, empty without one; `source` is "built in" or the file's path;
    `line` is where its `def` stands, counted from 1.
    """

    name: str
    label: str
    scores: str
    source: str
    line: int


def builtin_rewards() -> list[RewardEntry]:
    """The reward functions that ship with the program, in the order in which they are written."""
    return list(_builtin_rewards())


@cache
def _builtin_rewards() -> tuple[RewardEntry, ...]:
    return tuple(_entries(ast.parse(_REWARDS_SOURCE.read_bytes()), BUILT_IN))


def rewards_in_file(path: Path) -> list[RewardEntry]:
    """The functions that a person's file registers under names standing in its text, in the order of their lines.

    Raises Mistake on `reward_functions_file` for a file that is missing, unreadable or no Python.
    """
    return _entries(parse_reward_file(path), str(path))


def computes_names(path: Path) -> bool:
    """Whether the file registers functions in ways that cannot be read off its text (a loop, a name put together).

    Then a name that `rewards_in_file` does not list may still exist, and only running the file can tell.
    """
    tree = parse_reward_file(path)
    decorators = _decorator_names(tree)
    uses = sum(_is_decorator(node, decorators) for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute))
    return uses > len(_entries(tree, ""))


def canonical(name: str) -> str:
    """The registered name behind a short one (`r1_int` → `r1_int_reward_func`); any other name as it is."""
    return _short_names().get(name, name)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be, or None when nothing comes close.

    A short name of a known built-in function is looked at too, and answered with the full one.
    """
    names = {each.lower(): each for each in known}
    names |= {short: full for short, full in _short_names().items() if full in names}
    close = difflib.get_close_matches(name.lower(), names, n=1)
    return names[close[0]] if close else None


@cache
def _short_names() -> dict[str, str]:
    ending = "_reward_func"
    return {each.name.removesuffix(ending): each.name for each in _builtin_rewards() if each.name.endswith(ending)}


def locate_reward_file(path: str | Path, base: Path | None = None) -> Path:
    """Where a `reward_functions_file` lies: `~` expanded, a relative path taken from `base` (else where we run)."""
    return (base or Path.cwd()) / Path(path).expanduser()


def parse_reward_file(path: Path) -> ast.Module:
    """The syntax tree of a person's file, checked as far as it can be without running it.

    Raises Mistake on `reward_functions_file`, with the line for a syntax error.
    """
    source = _read(path)
    try:
        tree = ast.parse(source)
        # The parser lets some errors pass that only compiling finds, such as a `return` outside a function.
        compile(tree, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        line = f" on line {error.lineno}" if error.lineno else ""
        raise Mistake(_REWARD_FILE, f"{path.name} has a syntax error{line}: {error.msg}.") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise Mistake(_REWARD_FILE, f"{path.name} cannot be read as Python: {error}.") from error
    return tree


def _read(path: Path) -> bytes:
    if path.suffix.lower() not in (".py", ".txt"):
        raise Mistake(_REWARD_FILE, f"{path.name} should be a Python file that ends in .py or .txt.")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise Mistake(_REWARD_FILE, f"There is no file {path}.") from None
    except OSError as error:
        raise Mistake(_REWARD_FILE, f"{path} cannot be read: {error.strerror}.") from error


def _entries(tree: ast.Module, source: str) -> list[RewardEntry]:
    decorators = _decorator_names(tree)
    entries: list[RewardEntry] = []
    for function in _functions(tree):
        for decorator in function.decorator_list:
            entry = _entry(function, decorator, decorators, source)
            if entry:
                entries.append(entry)
    return entries


def _entry(
    function: ast.FunctionDef | ast.AsyncFunctionDef, decorator: ast.expr, decorators: set[str], source: str
) -> RewardEntry | None:
    """The function as registered by this decorator; None if it is another one or its name does not stand in the text."""
    call = decorator if isinstance(decorator, ast.Call) else None
    if not _is_decorator(call.func if call else decorator, decorators):
        return None
    given = _arguments(call) if call else {}
    name = _text(given["name"]) if "name" in given else function.name
    if name is None:
        return None
    label = _text(given.get("label")) or (name or function.name).replace("_", " ").capitalize()
    return RewardEntry(name or function.name, label, _first_sentence(function), source, function.lineno)


def _arguments(call: ast.Call) -> dict[str, ast.expr]:
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    return {"name": call.args[0], **given} if call.args else given


def _text(node: ast.expr | None) -> str | None:
    """A string written out in the source; "" for a written None, as the decorator takes it; None for anything else."""
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str)):
        return node.value or ""
    return None


def _first_sentence(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    paragraph = (ast.get_docstring(function) or "").split("\n\n")[0]
    return _SENTENCE_END.split(" ".join(paragraph.split()))[0]


def _functions(parent: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function whose `def` is reached when the file is loaded: under `if` or `try` too, but in no function."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _functions(node)


def _decorator_names(tree: ast.Module) -> set[str]:
    """What the file calls our decorator: its own name, and any that it imports it as."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    aliases = (alias for node in imports for alias in node.names if alias.name == _REWARD_DECORATOR)
    return {_REWARD_DECORATOR} | {alias.asname for alias in aliases if alias.asname}


def _is_decorator(node: ast.expr, decorators: set[str]) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == _REWARD_DECORATOR
    return isinstance(node, ast.Name) and node.id in decorators
