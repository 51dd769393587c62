"""From the entries of `reward_functions` to functions that can be called.

A name is looked for in the person's file first, then among the shipped functions, then among their short names; an
entry `file.py::function` names a plain function of that file. None is called but the shipped ones, on no completions,
so that they judge the arguments they are given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from backend.rewards.registry import REWARD_REGISTRY, RewardCallable
from backend.rewards.user_files import RewardFile, load_plain_file, load_reward_file
from backend.spec.faults import Fault, Mistake
from backend.spec.rewards.catalog import (
    argument_sentences,
    duplicate_sentences,
    locate_reward_file,
    reward_call,
    unknown_sentence,
)
from backend.spec.rewards.entry import RewardCall
from backend.spec.rewards.parse import INPUTS, Parameter

_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

Dialect = Literal["ours", "trl"]
"""How a function is called: with texts, or as TRL calls it, with messages where the dataset's prompts are messages."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a function asks for, read from its signature once: names without and with a default, and `**kwargs`."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    rest: bool

    @classmethod
    def of(cls, call: Callable[..., Any], without: Iterable[str] = ()) -> Arguments:
        """Raises TypeError or ValueError for what has no signature. `without`: names that are never offered."""
        parameters = inspect.signature(call).parameters.values()
        named = [p for p in parameters if p.kind in _NAMED and p.name not in set(without)]
        return cls(
            required=tuple(p.name for p in named if p.default is p.empty),
            optional=tuple(p.name for p in named if p.default is not p.empty),
            rest=any(p.kind is p.VAR_KEYWORD for p in parameters),
        )

    def lacking(self, offered: Iterable[str]) -> list[str]:
        """The names it cannot do without that are not offered."""
        return [name for name in self.required if name not in set(offered)]

    def choose(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """Of what is offered, what this function takes. `**kwargs` takes all but `prompt`, as TRL leaves that out."""
        if self.rest:
            return {name: value for name, value in offered.items() if name != "prompt" or name in self.required}
        return {name: offered[name] for name in (*self.required, *self.optional) if name in offered}


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function under the name that metrics and tables use; `home` is the person's file, None for a shipped one.

    `given` are the arguments that its entry sets; they win over columns of the same name.
    """

    name: str
    call: RewardCallable
    arguments: Arguments
    home: RewardFile | None = None
    given: dict[str, Any] = field(default_factory=dict)
    dialect: Dialect = "ours"

    @property
    def file(self) -> Path | None:
        return self.home.path if self.home else None

    @property
    def line(self) -> int | None:
        """Where in its file the function begins, decorators included; None where that cannot be told."""
        code = getattr(inspect.unwrap(self.call), "__code__", None)
        return code.co_firstlineno if code and code.co_filename == str(self.file) else None

    @property
    def note(self) -> str | None:
        """A sentence to show with a run that uses it: it replaces a built-in function, or was registered twice."""
        return self.home.notes.get(self.name) if self.home else None

    @property
    def is_async(self) -> bool:
        """Whether calling it gives a coroutine, to be awaited together with others."""
        own_call = getattr(self.call, "__call__", None)  # noqa: B004 - an object's, as of a class with `async def __call__`
        return inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(own_call)

    def takes(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of a call: what it asks for of what is offered, and what its entry sets."""
        return {**self.arguments.choose(offered), **self.given}


def reward_function(name: str, call: RewardCallable, home: RewardFile | None = None) -> RewardFunction:
    """Make any callable a RewardFunction; Mistake on `reward_functions` if it cannot be called or inspected."""
    return _function(RewardCall(name), call, home)


def _function(
    entry: RewardCall, call: RewardCallable, home: RewardFile | None, own: Iterable[str] = (), dialect: Dialect = "ours"
) -> RewardFunction:
    try:
        arguments = Arguments.of(call, {*own, *entry.arguments})
    except (TypeError, ValueError) as error:
        raise Mistake("reward_functions", f"{entry.name} is not a function whose arguments can be read.") from error
    return RewardFunction(entry.name, call, arguments, home, dict(entry.arguments), dialect)


def resolve(names: list[str], file: Path | None = None, base: Path | None = None) -> list[RewardFunction]:
    """The functions behind these entries, in their order; the person's `file` is loaded first.

    A path before `::` is taken from the folder `base` (else from where we run). Raises Mistake on
    `reward_functions_file` if `file` fails, and on `reward_functions`, for all entries at once, if there are none, one
    is unknown (the nearest is named), its arguments are wrong, its file fails, or two have the same name.
    """
    shelf = _Shelf(load_reward_file(file) if file else None, base)
    found: list[RewardFunction] = []
    faults: list[Fault] = [] if names else [Fault("reward_functions", "No reward function is chosen.")]
    entries: list[RewardCall] = []
    for text in names:
        try:
            entries.append(reward_call(text, shelf.known))
            found.append(shelf.function(entries[-1]))
        except Mistake as mistake:
            faults += mistake.faults
    faults += [Fault("reward_functions", sentence) for sentence in duplicate_sentences(entry.name for entry in entries)]
    if faults:
        raise Mistake(faults)
    return found


class _Shelf:
    """The functions that entries may name: shipped ones, those of the person's file, those of files before `::`."""

    def __init__(self, home: RewardFile | None, base: Path | None) -> None:
        self.home = home
        self.own = home.functions if home else {}
        self.known = REWARD_REGISTRY | self.own
        self._base = base
        self._files = {home.path.resolve(): home} if home else {}

    def function(self, entry: RewardCall) -> RewardFunction:
        """Raises Mistake on `reward_functions`."""
        if entry.file:
            home = self._file(entry.file)
            return self._checked(entry, home.plain(entry.function), home, "trl")
        if entry.function not in self.known:
            raise Mistake("reward_functions", unknown_sentence(entry.function, self.known))
        home = self.home if entry.function in self.own else None
        return self._checked(entry, self.known[entry.function], home, "ours")

    def _file(self, path: str) -> RewardFile:
        """Each file is run once, however many functions of it are named."""
        place = locate_reward_file(path, self._base).resolve()
        if place not in self._files:
            self._files[place] = load_plain_file(place)
        return self._files[place]

    def _checked(
        self, entry: RewardCall, call: RewardCallable, home: RewardFile | None, dialect: Dialect
    ) -> RewardFunction:
        shipped = home is None
        parameters = _parameters(call) if entry.arguments or shipped else []
        sentences = argument_sentences(entry, parameters, shipped)
        if sentences:
            raise Mistake([Fault("reward_functions", sentence) for sentence in sentences])
        if shipped:
            _try_out(entry, call)
        # A column may have the name of a parameter. A person's own function means the column by it, a shipped one never.
        own = [parameter.name for parameter in parameters] if shipped else []
        return _function(entry, call, home, own, dialect)


def _parameters(call: RewardCallable) -> list[Parameter]:
    """What `backend.spec.rewards.parse` reads from the text of a `def`, from the function itself."""
    try:
        signature = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return []  # it cannot be called by name either, which is told elsewhere
    named = [p for p in signature if p.kind in _NAMED and p.name not in INPUTS]
    settable = [p for p in named if p.default is not p.empty or p.kind is p.KEYWORD_ONLY]
    return [Parameter(p.name, _kind(p), None if p.default is p.empty else repr(p.default)) for p in settable]


def _kind(parameter: inspect.Parameter) -> str:
    kind = parameter.annotation
    return "" if kind is parameter.empty else kind if isinstance(kind, str) else inspect.formatannotation(kind)


def _try_out(entry: RewardCall, call: RewardCallable) -> None:
    """Let a shipped function judge its arguments, which it does before it looks at completions."""
    try:
        call(prompts=[], completions=[], answer=[], **entry.arguments)
    except ValueError as error:
        raise Mistake("reward_functions", f"{entry.text} cannot be used: {error}.") from error
