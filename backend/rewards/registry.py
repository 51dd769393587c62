"""The table of reward functions by name, and the decorators that register them and map functions.

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

MapCall = TypeVar("MapCall", bound=Callable[[dict[str, Any]], Any])

# Innermost last. Only `mlx_lm_lora.stand_in_library`, which holds a lock, pushes here.
_tables: list[MutableMapping[str, RewardCallable]] = [REWARD_REGISTRY]
_map_tables: list[MutableMapping[str, Callable[..., Any]]] = [{}]


@overload
def register_reward_function(name: str | None = None, *, label: str | None = None) -> Callable[[Call], Call]: ...
@overload
def register_reward_function(name: Call) -> Call: ...
def register_reward_function(name: Any = None, *, label: str | None = None) -> Any:
    """Register the decorated function as `name`, by default its own name (the parentheses may be left out).

    `label` is its name in tables. `backend.rewards.catalogue.catalog` reads it from the source text, for it never runs a
    user's file; it is not kept here.
    """
    if callable(name):
        return register_reward_function()(name)

    def decorate(call: Call) -> Call:
        _tables[-1][name or call.__name__] = call
        return call

    return decorate


@overload
def register_map_function(name: str | None = None) -> Callable[[MapCall], MapCall]: ...
@overload
def register_map_function(name: MapCall) -> MapCall: ...
def register_map_function(name: Any = None) -> Any:
    """Register the decorated function as the map function `name` (`map_function`), by default under its own name: it takes a row of the dataset
    as a dict, and returns the row to train on, or None to leave it out."""
    if callable(name):
        return register_map_function()(name)

    def decorate(call: MapCall) -> MapCall:
        _map_tables[-1][name or call.__name__] = call
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
def registering_into(
    table: MutableMapping[str, RewardCallable], maps: MutableMapping[str, Callable[..., Any]]
) -> Iterator[None]:
    """While open, the decorators register in `table` and `maps`, and look-ups read from `table`."""
    _tables.append(table)
    _map_tables.append(maps)
    try:
        yield
    finally:
        _tables.pop()
        _map_tables.pop()
