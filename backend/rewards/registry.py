"""The table of reward functions by name, and the decorators that register them and map functions.

The functions of a user's file go into a table of that file (`registering_into`), never among the shipped ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

RewardCallable = Callable[..., Any]
"""(prompts, completions, answer, types) → one number or None for each completion; may be `async def`."""

Call = TypeVar("Call", bound=RewardCallable)
MapCall = TypeVar("MapCall", bound=Callable[[dict[str, Any]], Any])

REWARD_REGISTRY: dict[str, RewardCallable] = {}
"""The shipped functions, in the order in which they are defined."""

REWARD_PROCESSES = {
    "scorer": "backend.rewards.worker",
    "programs": "backend.rewards.program_runner",
    "equality": "backend.rewards.functions.math_equality",
}
"""The argument that makes a bundled app's executable a child process → its module, whose `main(arguments)` runs."""

# The innermost table comes last. Only `user_files.stand_in_library`, which holds a lock, pushes here.
_tables: list[MutableMapping[str, RewardCallable]] = [REWARD_REGISTRY]
_map_tables: list[MutableMapping[str, Callable[..., Any]]] = [{}]


@dataclass(frozen=True, slots=True)
class FunctionDescription:
    """A reward function as the trainer knows it. `file` is None for a shipped function; `line` of its def, 0 if
    unknown."""

    name: str
    file: Path | None = None
    line: int = 0
    note: str = ""
    """A message for the run: it replaces a shipped function, or is registered twice."""
    is_async: bool = False


@overload
def register_reward_function(name: str | None = None, *, label: str | None = None) -> Callable[[Call], Call]: ...
@overload
def register_reward_function(name: Call) -> Call: ...
def register_reward_function(name: Any = None, *, label: str | None = None) -> Any:
    """Register the decorated function as `name`, by default its own name; the parentheses may be left out.

    `label` is its name in tables, which `backend.rewards.catalogue` reads from the source text.
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
    """Register the decorated function as the map function `name` (setting `map_function`), by default its own name.

    It takes a row of the dataset as a dict, and returns the row to train on, or None to leave it out.
    """
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
    """Every registered name; while a user's file runs, its own too."""
    return list(_tables[-1])


def require(sound: bool, sentence: str) -> None:
    """Raise ValueError unless `sound`. Shipped functions check their parameters with it before they read completions.

    `backend.rewards.resolve` calls them without completions, so a run with bad parameters is refused at once.
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
