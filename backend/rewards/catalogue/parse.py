"""Parses a Python file with reward functions: its functions, their labels, docstrings and parameters.

Nothing is run, so names computed at run time stay unknown. `backend.rewards.catalogue.catalog` builds on this.
"""

from __future__ import annotations

import ast
import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from backend.utils.errors import UserError
from backend.utils.files import read_bytes, reason, user_path
from backend.utils.text import quote

INPUTS = (
    *("prompts", "completions", "answer", "types", "completion_ids", "completions_ids"),
    *("trainer_state", "log_extra", "log_metric"),
)
"""Parameters that are filled with the sample, besides the dataset's columns. TRL's documentation calls the sampled token ids
`completions_ids`, its code `completion_ids`; both are accepted."""

_REWARD_FILE = "reward_functions_file"
_REWARD_DECORATOR = "register_reward_function"
_SENTENCE_END = re.compile(r"(?<=[.!?])\s")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter that an entry may set in brackets. `kind` and `default` are source text, such as `int | None` and `3`; the
    kind is empty without an annotation, the default None where a value is required."""

    name: str
    kind: str
    default: str | None


@dataclass(frozen=True, slots=True)
class RewardEntry:
    """One reward function as tables show it.

    `scores` is the first sentence of its docstring, empty without one; `source` is "built in" or the file's path;
    `line` is the line of its `def`, from 1.
    """

    name: str
    label: str
    scores: str
    source: str
    line: int
    parameters: tuple[Parameter, ...] = ()


def locate_reward_file(path: str | Path, base: Path | None = None) -> Path:
    """The path of a `reward_functions_file`: `~` expanded, relative to `base` (default: the working directory). Raises UserError for what
    cannot be a path, and for a link that leads back to itself, on which `Path.resolve` fails."""
    located = user_path(str(path), _REWARD_FILE, base or Path.cwd())
    try:
        located.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(_REWARD_FILE, f"{quote(located)} cannot be read: {reason(error)}.") from None
    return located


def parse_reward_file(path: Path, setting: str = _REWARD_FILE) -> ast.Module:
    """The syntax tree of a user's file, compiled but not run. Raises UserError on `setting`, with the line of a syntax error."""
    source = _read(path, setting)
    try:
        tree = ast.parse(source)
        # The parser lets some errors pass that only compiling finds, such as a `return` outside a function.
        compile(tree, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        line = f" on line {error.lineno}" if error.lineno else ""
        raise UserError(setting, f"{quote(path.name)} has a syntax error{line}: {quote(error.msg)}.") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserError(setting, f"{quote(path.name)} cannot be read as Python: {quote(error)}.") from error
    return tree


def _read(path: Path, setting: str) -> bytes:
    if path.suffix.lower() not in (".py", ".txt"):
        raise UserError(setting, f"{quote(path.name)} should be a Python file that ends in .py or .txt.")
    return read_bytes(path, setting)


def registered_entries(tree: ast.Module, source: str) -> list[RewardEntry]:
    decorators = _decorator_names(tree)
    entries: list[RewardEntry] = []
    for function in functions(tree):
        for decorator in function.decorator_list:
            entry = _entry(function, decorator, decorators, source)
            if entry:
                entries.append(entry)
    return entries


def _entry(function: Function, decorator: ast.expr, decorators: set[str], source: str) -> RewardEntry | None:
    """The function as registered by this decorator; None for any other decorator or a name that is not a literal."""
    call = decorator if isinstance(decorator, ast.Call) else None
    if not _is_decorator(call.func if call else decorator, decorators):
        return None
    arguments = _arguments(call) if call else {}
    name = _text(arguments["name"]) if "name" in arguments else function.name
    if name is None:
        return None
    label = _text(arguments.get("label")) or _spelled_out(name or function.name)
    return _described(function, name or function.name, label, source)


def plain_entry(function: Function, path: Path) -> RewardEntry:
    return _described(function, function.name, _spelled_out(function.name), str(path))


def _spelled_out(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _described(function: Function, name: str, label: str, source: str) -> RewardEntry:
    return RewardEntry(name, label, _first_sentence(function), source, function.lineno, tuple(_parameters(function)))


def _parameters(function: Function) -> Iterator[Parameter]:
    """Parameters with a default or keyword-only, inputs excluded; all others are columns of the dataset."""
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + args.defaults
    optional = [(arg, default) for arg, default in zip(positional, defaults, strict=True) if default]
    for arg, default in [*optional, *zip(args.kwonlyargs, args.kw_defaults, strict=True)]:
        if arg.arg not in INPUTS:
            kind = ast.unparse(arg.annotation) if arg.annotation else ""
            yield Parameter(arg.arg, kind, ast.unparse(default) if default else None)


def _arguments(call: ast.Call) -> dict[str, ast.expr]:
    keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    return {"name": call.args[0], **keywords} if call.args else keywords


def _text(node: ast.expr | None) -> str | None:
    """The value of a string literal; "" for a literal None, as the decorator takes it; None for anything else."""
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str)):
        return node.value or ""
    return None


def _first_sentence(function: Function) -> str:
    paragraph = (ast.get_docstring(function) or "").split("\n\n")[0]
    return _SENTENCE_END.split(" ".join(paragraph.split()))[0]


def functions(parent: ast.AST) -> Iterator[Function]:
    """Every function defined when the file is loaded: at top level, under `if` or `try` too, but not inside functions."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, Function):
            yield node
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from functions(node)


def takes_completions(function: Function) -> bool:
    args = function.args
    names = {arg.arg for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs]}
    return bool(args.kwarg or names & {"completions", "completion_ids", "completions_ids"})


def may_define(tree: ast.Module, name: str) -> bool:
    """Whether running the file may bind this name other than by a `def`: by assignment, import, or a class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.alias) and (node.name == "*" or (node.asname or node.name) == name):
            return True
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.ClassDef) and node.name == name:
            return True
    return False


def count_decorator_uses(tree: ast.Module) -> int:
    """How often the source uses our decorator's name, for registering or anything else."""
    decorators = _decorator_names(tree)
    return sum(_is_decorator(node, decorators) for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute))


def _decorator_names(tree: ast.Module) -> set[str]:
    """Names of our decorator in the file: its own, and any that it is imported as."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    aliases = (alias for node in imports for alias in node.names if alias.name == _REWARD_DECORATOR)
    return {_REWARD_DECORATOR} | {alias.asname for alias in aliases if alias.asname}


def _is_decorator(node: ast.expr, decorators: set[str]) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == _REWARD_DECORATOR
    return isinstance(node, ast.Name) and node.id in decorators
