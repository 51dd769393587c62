"""Registry of reward functions; decorators for them and map functions. A user file has its own (`registering_into`)."""

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RewardCallable = Callable[..., Any]  # (prompts, completions, answer, types) → number or None of each; may be async
Texts = list[str]
Types = list[str] | None
Ids = list[list[int]] | None
Scores = list[float | None]
Table = MutableMapping[str, RewardCallable]

REWARD_REGISTRY: dict[str, RewardCallable] = {}  # shipped functions in definition order

# (reward functions, map functions). The innermost comes last: those of a file while it is loaded.
_tables: list[tuple[Table, Table]] = [(REWARD_REGISTRY, {})]


@dataclass(frozen=True, slots=True)
class FunctionDescription:
    """`file` is None for a shipped one; `line` of its def or 0. `note`: that it replaces another."""

    name: str
    file: Path | None = None
    line: int = 0
    note: str = ""


def register_reward_function(name: Any = None, *, label: str | None = None) -> Callable[[Any], Any]:
    """Register a reward function as `name`, by default its own name. `label` is its name in tables."""
    return _registration(0, name)


def register_map_function(name: Any = None) -> Callable[[Any], Any]:
    """Register a map function as `name`: it maps a row to the row to train on, or None to drop it."""
    return _registration(1, name)


def _registration(kind: int, name: Any) -> Any:
    def decorate(call: RewardCallable) -> RewardCallable:
        _tables[-1][kind][name if isinstance(name, str) and name else call.__name__] = call
        return call

    return decorate(name) if callable(name) else decorate


def get_reward_function(name: str, table: Table | None = None) -> RewardCallable:
    """The function registered as `name`. Raises KeyError listing known names."""
    table = _tables[-1][0] if table is None else table
    if name not in table:
        raise KeyError(f"no reward function is called {name}; known are {', '.join(table)}")
    return table[name]


def require(sound: bool, sentence: str) -> None:
    """Raise ValueError unless `sound`. Functions are called without completions to check their parameters."""
    if not sound:
        raise ValueError(sentence)


@contextmanager
def registering_into(table: Table, maps: Table) -> Iterator[None]:
    """Register in `table` and `maps`, and look up in `table`, while open."""
    _tables.append((table, maps))
    try:
        yield
    finally:
        _tables.pop()
