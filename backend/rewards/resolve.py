"""Resolve the entries of the setting `reward_functions` to callables.

A name is looked up in the user's file first, then among the shipped functions, then among their short names; an entry
`file.py::function` names a plain function of that file, called as TRL calls it. Nothing is scored here: only shipped
functions are called, with no completions, so that they check the arguments that their entry sets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from backend.rewards.catalogue.catalog import (
    argument_sentences,
    duplicate_sentences,
    locate_reward_file,
    reward_call,
    unknown_sentence,
)
from backend.rewards.catalogue.entry import RewardCall
from backend.rewards.catalogue.parse import INPUTS, Parameter
from backend.rewards.registry import REWARD_REGISTRY, RewardCallable
from backend.rewards.user_files import RewardFile, load_plain_file, load_reward_file
from backend.utils.errors import ConfigProblem, UserError

# A reward function as the rest of the program knows it: what it is called, where it is, how it is called. Plain data.


@dataclass(frozen=True, slots=True)
class FunctionDescription:
    """`name` in metrics and tables; `file` None for a shipped function; `line` of its def, 0 where that is not in `file`."""

    name: str
    file: Path | None = None
    line: int = 0
    note: str = ""
    """A sentence to show with a run that uses it: it replaces a shipped function, or was registered twice."""
    is_async: bool = False
    """Calls of async functions are awaited together, after all others."""


# ── resolve ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

Dialect = Literal["ours", "trl"]
"""How a function is called: with texts, or as TRL does, see `backend.rewards.runner.inputs`."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """A function's parameters, read from its signature once: without a default, with one, and any `**kwargs`."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    has_kwargs: bool
    excluded: frozenset[str] = frozenset()
    """Parameters that get no input, whatever a column is called."""

    @classmethod
    def of(cls, call: Callable[..., Any], excluded: Iterable[str] = ()) -> Arguments:
        """`excluded` parameters get no input. Raises TypeError or ValueError for what has no signature."""
        parameters = inspect.signature(call).parameters.values()
        left_out = frozenset(excluded)
        named = [p for p in parameters if p.kind in _NAMED and p.name not in left_out]
        return cls(
            required=tuple(p.name for p in named if p.default is p.empty),
            optional=tuple(p.name for p in named if p.default is not p.empty),
            has_kwargs=any(p.kind is p.VAR_KEYWORD for p in parameters),
            excluded=left_out,
        )

    def missing(self, inputs: Iterable[str]) -> list[str]:
        """The required parameters that `inputs` does not have."""
        return [name for name in self.required if name not in set(inputs)]

    def select(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs that this function takes. `**kwargs` takes all but the column `prompt`, as in TRL."""
        if self.has_kwargs:
            kept = {name: value for name, value in inputs.items() if name not in self.excluded}
            return {name: value for name, value in kept.items() if name != "prompt" or name in self.required}
        return {name: inputs[name] for name in (*self.required, *self.optional) if name in inputs}


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function under the name that metrics and tables use; `user_file` is None for a shipped one.

    `kwargs` are the arguments that its entry sets, as in `keyword(word=so)`; they win over columns of the same name.
    """

    name: str
    call: RewardCallable
    arguments: Arguments
    user_file: RewardFile | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    dialect: Dialect = "ours"

    @property
    def file(self) -> Path | None:
        return self.user_file.path if self.user_file else None

    @property
    def line(self) -> int | None:
        """The function's first line in its file, decorators included; None where its code is not of that file."""
        code = getattr(inspect.unwrap(self.call), "__code__", None)
        return code.co_firstlineno if code and code.co_filename == str(self.file) else None

    @property
    def note(self) -> str | None:
        """A sentence to show with a run that uses it: it replaces a shipped function, or was registered twice."""
        return self.user_file.notes.get(self.name) if self.user_file else None

    @property
    def is_async(self) -> bool:
        """Whether calling it returns a coroutine, which is then awaited concurrently with others."""
        own_call = getattr(self.call, "__call__", None)  # noqa: B004 - an object's, as of a class with `async def __call__`
        return inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(own_call)

    @property
    def description(self) -> FunctionDescription:
        """What other processes may know of it."""
        return FunctionDescription(self.name, self.file, self.line or 0, self.note or "", self.is_async)

    def call_kwargs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of a call: the inputs that it takes, and what its entry sets."""
        return {**self.arguments.select(inputs), **self.kwargs}


def _function(
    entry: RewardCall,
    call: RewardCallable,
    user_file: RewardFile | None,
    excluded: Iterable[str] = (),
    dialect: Dialect = "ours",
) -> RewardFunction:
    try:
        arguments = Arguments.of(call, {*excluded, *entry.arguments})
    except (TypeError, ValueError) as error:
        raise UserError("reward_functions", f"{entry.name} is not a function whose arguments can be read.") from error
    return RewardFunction(entry.name, call, arguments, user_file, dict(entry.arguments), dialect)


def resolve(
    names: list[str], file: Path | None = None, base: Path | None = None, executed: dict[Path, RewardFile] | None = None
) -> list[RewardFunction]:
    """The functions behind these entries, in their order; the user's `file` is run first.

    A path before `::` is relative to the folder `base` (default: the working directory). `executed` holds the files that were
    run already, by resolved path, and is filled: calls that share it run each file once. Raises UserError on
    `reward_functions_file` if `file` fails, and on `reward_functions`, for all entries together, if there are none, one
    is unknown (the nearest is named), its arguments are wrong, its file fails, or two have the same name.
    """
    executed = {} if executed is None else executed
    user_file = None
    if file is not None:
        path = locate_reward_file(file).resolve()
        user_file = executed[path] = executed.get(path) or load_reward_file(file)
    available = _AvailableFunctions(user_file, base, executed)
    functions: list[RewardFunction] = []
    faults: list[ConfigProblem] = [] if names else [ConfigProblem("reward_functions", "No reward function is chosen.")]
    entries: list[RewardCall] = []
    for text in names:
        try:
            entries.append(reward_call(text, available.by_name))
            functions.append(available.function(entries[-1]))
        except UserError as mistake:
            faults += mistake.faults
    faults += [
        ConfigProblem("reward_functions", sentence) for sentence in duplicate_sentences(entry.name for entry in entries)
    ]
    if faults:
        raise UserError(faults)
    return functions


def resolve_stages(
    stages: Sequence[Sequence[str]],
    file: Path | None = None,
    base: Path | None = None,
    executed: dict[Path, RewardFile] | None = None,
) -> list[list[RewardFunction]]:
    """The functions of every stage; each reward file is executed once, however many stages name it, and `executed` is as in `resolve`.
    Raises UserError as `resolve`."""
    executed = {} if executed is None else executed
    return [resolve(list(names), file, base, executed) for names in stages]


class _AvailableFunctions:
    """The functions that entries may name: the shipped functions, those of the user's file, those of files before `::`."""

    def __init__(self, user_file: RewardFile | None, base: Path | None, files: dict[Path, RewardFile]) -> None:
        self.user_file = user_file
        self.registered = user_file.functions if user_file else {}
        self.by_name = REWARD_REGISTRY | self.registered
        self._base = base
        self._files = files

    def function(self, entry: RewardCall) -> RewardFunction:
        """Raises UserError on `reward_functions`."""
        if entry.file:
            user_file = self._file(entry.file)
            return self._checked(entry, user_file.module_function(entry.function), user_file, "trl")
        if entry.function not in self.by_name:
            raise UserError("reward_functions", unknown_sentence(entry.function, self.by_name))
        user_file = self.user_file if entry.function in self.registered else None
        return self._checked(entry, self.by_name[entry.function], user_file, "ours")

    def _file(self, path: str) -> RewardFile:
        """The file, which is run once however many functions of it are named."""
        resolved = locate_reward_file(path, self._base).resolve()
        if resolved not in self._files:
            self._files[resolved] = load_plain_file(resolved)
        return self._files[resolved]

    def _checked(
        self, entry: RewardCall, call: RewardCallable, user_file: RewardFile | None, dialect: Dialect
    ) -> RewardFunction:
        is_shipped = user_file is None
        parameters = _parameters(call) if entry.arguments or is_shipped else []
        sentences = argument_sentences(entry, parameters, is_shipped)
        if sentences:
            raise UserError([ConfigProblem("reward_functions", sentence) for sentence in sentences])
        if is_shipped:
            _check_arguments(entry, call)
        # A column may have the name of a parameter. A user's function means the column by it, a shipped one never does.
        excluded = [parameter.name for parameter in parameters] if is_shipped else []
        return _function(entry, call, user_file, excluded, dialect)


def _parameters(call: RewardCallable) -> list[Parameter]:
    """The settable parameters of a function object; `backend.rewards.catalogue.parse` reads the same from source text."""
    try:
        signature = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return []  # `_function` reports that it cannot be inspected
    named = [p for p in signature if p.kind in _NAMED and p.name not in INPUTS]
    settable = [p for p in named if p.default is not p.empty or p.kind is p.KEYWORD_ONLY]
    return [Parameter(p.name, _annotation(p), None if p.default is p.empty else repr(p.default)) for p in settable]


def _annotation(parameter: inspect.Parameter) -> str:
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _check_arguments(entry: RewardCall, call: RewardCallable) -> None:
    """Let a shipped function check its arguments, which it does before it looks at completions (`require`)."""
    try:
        call(prompts=[], completions=[], answer=[], **entry.arguments)
    except ValueError as error:
        raise UserError("reward_functions", f"{entry.text} cannot be used: {error}.") from error
