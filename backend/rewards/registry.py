"""The table of reward functions by name, and the decorator that writes into it.

It holds no weights and calls nothing. What a person's file registers goes into a table of that file's own
(`registering_into`), so a file that fails, or is replaced by another, leaves no trace among the built-ins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeVar, overload

RewardCallable = Callable[..., Any]
"""(prompts, completions, answer, types) → one number or None for each completion; may be `async def`."""

Call = TypeVar("Call", bound=RewardCallable)

REWARD_REGISTRY: dict[str, RewardCallable] = {}
"""The functions that ship with the program, in the order in which they are written."""

# Innermost last. Only `compat.library`, which holds a lock, pushes here.
_tables: list[MutableMapping[str, RewardCallable]] = [REWARD_REGISTRY]


@overload
def register_reward_function(name: str | None = None, *, label: str | None = None) -> Callable[[Call], Call]: ...
@overload
def register_reward_function(name: Call) -> Call: ...
def register_reward_function(name: Any = None, *, label: str | None = None) -> Any:
    """Register the decorated function as `name`, or under its own name without one (brackets may be left out).

    `label` is what tables call it. It is read from the source text by `backend.spec.rewards.catalog`, which never runs a
    person's file; nothing here keeps it.
    """
    if callable(name):
        return register_reward_function()(name)

    def decorate(call: Call) -> Call:
        _tables[-1][name or call.__name__] = call
        return call

    return decorate


def get_reward_function(name: str) -> RewardCallable:
    """The function registered as `name`; KeyError, naming the known ones, if there is none."""
    if name not in _tables[-1]:
        raise KeyError(f"no reward function is called {name}; known are {', '.join(_tables[-1])}")
    return _tables[-1][name]


def list_reward_functions() -> list[str]:
    """Every registered name, as the running file sees them: its own and the built-in ones."""
    return list(_tables[-1])


def require(sound: bool, sentence: str) -> None:
    """For a shipped function to judge its parameters, before it looks at any completion; ValueError if unsound.

    `backend.rewards.resolve` calls it on no completions at all, so that a run is refused before anything is loaded.
    """
    if not sound:
        raise ValueError(sentence)


@contextmanager
def registering_into(table: MutableMapping[str, RewardCallable]) -> Iterator[None]:
    """While open, the decorator writes to `table` and look-ups read from it."""
    _tables.append(table)
    try:
        yield
    finally:
        _tables.pop()
