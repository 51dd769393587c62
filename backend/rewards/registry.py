"""The table of reward functions by name, and the decorator that registers them.

It holds no weights and calls nothing. The functions of a user's file go into a table of that file (`registering_into`), so
that a file that fails, or is replaced by another, leaves nothing among the shipped functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeVar, overload

RewardCallable = Callable[..., Any]
"""(prompts, completions, answer, types) → one number or None for each completion; may be `async def`."""

Call = TypeVar("Call", bound=RewardCallable)

REWARD_REGISTRY: dict[str, RewardCallable] = {}
"""The shipped functions, in the order in which they are defined."""

# Innermost last. Only `mlx_lm_lora.stand_in_library`, which holds a lock, pushes here.
_tables: list[MutableMapping[str, RewardCallable]] = [REWARD_REGISTRY]


@overload
def register_reward_function(name: str | None = None, *, label: str | None = None) -> Callable[[Call], Call]: ...
@overload
def register_reward_function(name: Call) -> Call: ...
def register_reward_function(name: Any = None, *, label: str | None = None) -> Any:
    """Register the decorated function as `name`, by default its own name (the parentheses may be left out).

    `label` is its name in tables. `backend.spec.rewards.catalog` reads it from the source text, for it never runs a
    user's file; it is not kept here.
    """
    if callable(name):
        return register_reward_function()(name)

    def decorate(call: Call) -> Call:
        _tables[-1][name or call.__name__] = call
        return call

    return decorate


def get_reward_function(name: str) -> RewardCallable:
    """The function registered as `name`. Raises KeyError, which lists the known names."""
    if name not in _tables[-1]:
        raise KeyError(f"no reward function is called {name}; known are {', '.join(_tables[-1])}")
    return _tables[-1][name]


def list_reward_functions() -> list[str]:
    """Every registered name: those of the shipped functions, and while a user's file runs, its own."""
    return list(_tables[-1])


def require(sound: bool, sentence: str) -> None:
    """Called by shipped functions on their parameters, before they look at any completion. Raises ValueError.

    `backend.rewards.resolve` calls them without completions, so that a run with bad parameters is refused before
    anything is loaded.
    """
    if not sound:
        raise ValueError(sentence)


@contextmanager
def registering_into(table: MutableMapping[str, RewardCallable]) -> Iterator[None]:
    """While open, the decorator registers in `table` and look-ups read from it."""
    _tables.append(table)
    try:
        yield
    finally:
        _tables.pop()
