"""From the names in `reward_functions` to functions that can be called. It calls none of them.

A name is looked for in the person's file first, then among the built-in functions, then among their short names.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.rewards.files import RewardFile, load_reward_file
from backend.rewards.registry import REWARD_REGISTRY, RewardCall
from backend.spec.catalog import canonical, nearest
from backend.spec.faults import Fault, Mistake

INPUTS = ("prompts", "completions", "answer", "types", "completion_ids", "completions_ids")
"""What every function may ask for by name, besides the dataset's columns. TRL's documentation uses the last two for
one thing: the sampled token ids."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a function asks for, read from its signature once: names without and with a default, and `**kwargs`."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    rest: bool

    @classmethod
    def of(cls, call: Callable[..., Any]) -> Arguments:
        """Raises TypeError or ValueError for what has no signature."""
        parameters = inspect.signature(call).parameters.values()
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
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
    """A function under the name that metrics and tables use; `home` is the person's file, None for a built-in one."""

    name: str
    call: RewardCall
    arguments: Arguments
    home: RewardFile | None = None

    @property
    def file(self) -> Path | None:
        return self.home.path if self.home else None

    @property
    def note(self) -> str | None:
        """A sentence to show with a run that uses it: it replaces a built-in function, or was registered twice."""
        return self.home.notes.get(self.name) if self.home else None


def reward_function(name: str, call: RewardCall, home: RewardFile | None = None) -> RewardFunction:
    """Make any callable a RewardFunction; Mistake on `reward_functions` if it cannot be called or inspected."""
    try:
        return RewardFunction(name, call, Arguments.of(call), home)
    except (TypeError, ValueError) as error:
        raise Mistake("reward_functions", f"{name} is not a function whose arguments can be read.") from error


def resolve(names: list[str], file: Path | None = None) -> list[RewardFunction]:
    """The functions of these names, in their order; the person's `file` is loaded first.

    Raises Mistake on `reward_functions_file` if that fails, and on `reward_functions`, for all names at once, if there
    are none, one is unknown (the nearest is named) or one stands twice.
    """
    home = load_reward_file(file) if file else None
    known = REWARD_REGISTRY | (home.functions if home else {})
    full = [name if name in known else canonical(name) for name in names]
    faults = _faults(full, known)
    if faults:
        raise Mistake(faults)
    own = home.functions if home else {}
    return [reward_function(name, known[name], home if name in own else None) for name in full]


def _faults(names: list[str], known: Iterable[str]) -> list[Fault]:
    sentences = [_unknown(name, known) for name in names if name not in known]
    sentences += [f"{name} is listed {times} times." for name, times in Counter(names).items() if times > 1]
    if not names:
        sentences.append("No reward function is chosen.")
    return [Fault("reward_functions", sentence) for sentence in sentences]


def _unknown(name: str, known: Iterable[str]) -> str:
    close = nearest(name, known)
    hint = f"the nearest is {close}, and " if close else ""
    return f"There is no reward function {name}; {hint}the known ones are {', '.join(known)}."
