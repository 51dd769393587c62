"""Resolve `reward_functions` entries to callables: user's file first, then shipped and short names.

`file.py::function` is called as in TRL.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from backend.rewards.catalogue import (
    INPUTS,
    Parameter,
    RewardCall,
    argument_sentences,
    duplicate_sentences,
    locate_reward_file,
    reward_call,
    unknown_sentence,
)
from backend.rewards.registry import REWARD_REGISTRY, FunctionDescription, RewardCallable
from backend.rewards.user_files import RewardFile, load_reward_file
from backend.utils.errors import ConfigProblem, UserError

_SETTING = "reward_functions"
_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

Dialect = Literal["ours", "trl"]  # call convention, see `backend.rewards.inputs`


@dataclass(frozen=True, slots=True)
class Arguments:
    """A function's parameters: required, optional, any `**kwargs`. `excluded` get no input."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    has_kwargs: bool
    excluded: frozenset[str] = frozenset()

    @classmethod
    def of(cls, call: Callable[..., Any], excluded: Iterable[str] = ()) -> Arguments:
        """Raises TypeError or ValueError without a signature."""
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
        """Required parameters missing from `inputs`."""
        return [name for name in self.required if name not in set(inputs)]

    def select(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs that the function takes. `**kwargs` excludes `prompt`, as in TRL."""
        if self.has_kwargs:
            left_out = self.excluded | ({"prompt"} - set(self.required))
            return {name: value for name, value in inputs.items() if name not in left_out}
        return {name: inputs[name] for name in (*self.required, *self.optional) if name in inputs}


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function and its metric name; `user_file` is None for shipped ones.

    `kwargs` from its entry override columns.
    """

    name: str
    call: RewardCallable
    arguments: Arguments
    user_file: RewardFile | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    dialect: Dialect = "ours"

    @property
    def file(self) -> Path | None:
        """The user's file."""
        return self.user_file.path if self.user_file else None

    @property
    def line(self) -> int:
        """First line in its file with decorators, or 0."""
        code = getattr(inspect.unwrap(self.call), "__code__", None)
        return code.co_firstlineno if code and code.co_filename == str(self.file) else 0

    @property
    def note(self) -> str:
        """Message of the file about it."""
        return self.user_file.notes.get(self.name, "") if self.user_file else ""

    @property
    def is_async(self) -> bool:
        """True if calling it returns a coroutine."""
        own_call = getattr(self.call, "__call__", None)  # noqa: B004 - an object with `async def __call__`
        return inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(own_call)

    @property
    def description(self) -> FunctionDescription:
        """What other processes know of it."""
        return FunctionDescription(self.name, self.file, self.line, self.note, self.is_async)

    def call_kwargs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments of a call: inputs and entry arguments."""
        return {**self.arguments.select(inputs), **self.kwargs}


def resolve(
    names: Sequence[str],
    file: Path | None = None,
    base: Path | None = None,
    executed: dict[Path, RewardFile] | None = None,
) -> list[RewardFunction]:
    """Functions of these entries, in order, after running the user's `file`.

    Paths before `::` are relative to `base` (default: working directory). `executed` caches files already run. Raises
    UserError on `reward_functions_file` or `reward_functions`.
    """
    executed = {} if executed is None else executed
    user_file = None
    if file is not None:
        path = locate_reward_file(file).resolve()
        user_file = executed[path] = executed.get(path) or load_reward_file(file)
    registered = user_file.functions if user_file else {}
    by_name = REWARD_REGISTRY | registered
    functions: list[RewardFunction] = []
    entries: list[str] = []
    problems = [] if names else [ConfigProblem(_SETTING, "No reward function is chosen.")]
    for text in names:
        try:
            entry = reward_call(text, by_name)
            entries.append(entry.name)
            if entry.file:
                path = locate_reward_file(entry.file, base).resolve()
                if path not in executed:
                    executed[path] = load_reward_file(path, plain=True)
                own_file, call = executed[path], executed[path].module_function(entry.function)
            elif entry.function in by_name:
                own_file, call = user_file if entry.function in registered else None, by_name[entry.function]
            else:
                raise UserError(_SETTING, unknown_sentence(entry.function, by_name))
            functions.append(_function(entry, call, own_file))
        except UserError as error:
            problems += error.faults
    problems += [ConfigProblem(_SETTING, sentence) for sentence in duplicate_sentences(entries)]
    if problems:
        raise UserError(problems)
    return functions


def _function(entry: RewardCall, call: RewardCallable, user_file: RewardFile | None) -> RewardFunction:
    is_shipped = user_file is None
    parameters: list[Parameter] = []
    try:
        for each in inspect.signature(call).parameters.values() if entry.arguments or is_shipped else ():
            is_settable = each.default is not each.empty or each.kind is each.KEYWORD_ONLY
            if each.kind in _NAMED and each.name not in INPUTS and is_settable:
                kind = "" if each.annotation is each.empty else inspect.formatannotation(each.annotation).strip("'")
                parameters.append(
                    Parameter(each.name, kind, None if each.default is each.empty else repr(each.default))
                )
        # A column may have the name of a parameter. A user's function means the column, a shipped one never does.
        excluded = [parameter.name for parameter in parameters] if is_shipped else []
        arguments = Arguments.of(call, {*excluded, *entry.arguments})
    except (TypeError, ValueError) as error:
        raise UserError(_SETTING, f"{entry.name} is not a function whose arguments can be read.") from error
    if sentences := argument_sentences(entry, parameters, is_shipped):
        raise UserError([ConfigProblem(_SETTING, sentence) for sentence in sentences])
    if is_shipped:
        try:  # a shipped function checks its arguments before it reads completions (`require`)
            call(prompts=[], completions=[], answer=[], **entry.arguments)
        except ValueError as error:
            raise UserError(_SETTING, f"{entry.text} cannot be used: {error}.") from error
    dialect: Dialect = "trl" if entry.file else "ours"
    return RewardFunction(entry.name, call, arguments, user_file, dict(entry.arguments), dialect)
