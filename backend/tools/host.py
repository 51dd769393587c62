"""What sampling asks of whatever runs the tools: a worker process, this process, MCP servers, or several of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from backend.types import ToolCall, ToolResult
from backend.utils.errors import UserError
from backend.utils.text import quote

Poll = Callable[[], None]  # called while something is waited for; may raise to stop
NOT_TOOLS = ("reset", "get_reward", "close")  # public methods of an environment that the model cannot call


@dataclass(frozen=True, slots=True)
class ToolSchemas:
    """JSON schemas as chat templates take them. `shared`: of tools that every row has; `by_environment`: of those that
    a row of it has besides, under "" if there is only one."""

    shared: Sequence[dict[str, Any]] = ()
    by_environment: Mapping[str, Sequence[dict[str, Any]]] = field(default_factory=dict[str, Any])

    def __bool__(self) -> bool:
        return bool(self.shared) or any(self.by_environment.values())

    def of(self, environment: str = "") -> list[dict[str, Any]]:
        """The schemas that a row of this environment has."""
        return [*self.shared, *self.by_environment.get(environment, ())]


NO_TOOLS = ToolSchemas()


def environment_name(row: Mapping[str, Any], column: str, known: Iterable[str], where: str = "a row") -> str:
    """The environment that a column of the row names. Raises UserError unless it is `known`."""
    name = "" if row.get(column) is None else str(row[column])
    if name not in known:
        sentence = f"{quote(column, 30)}={quote(repr(name), 30)} in {where} is not among the environments"
        raise UserError("environment", f"{sentence}: {quote(', '.join(known), 60)}.")
    return name


class ServedEnvironment:
    """What reward functions see of an environment that a server runs. `total`: the rewards of its steps."""

    total = 0.0

    def reset(self, **row: Any) -> None: ...

    def get_reward(self) -> float:
        return self.total


class ToolHost(Protocol):
    """Runs the calls of one conversation in order, and conversations side by side."""

    schemas: ToolSchemas

    def begin(self, rows: Sequence[Mapping[str, Any]], poll: Poll) -> list[tuple[int, str | None]]:
        """One conversation for each row of a new rollout. → its number, and the text of its environment's `reset`.
        Raises UserError where that fails."""
        ...

    def submit(self, conversation: int, calls: Sequence[ToolCall], poll: Poll) -> None:
        """Begin to run calls; returns at once."""
        ...

    def finished(self, wait_s: float, poll: Poll) -> list[tuple[int, list[ToolResult]]]:
        """(conversation, results) of all that have ended since the last call, after up to `wait_s` for the first."""
        ...

    def new_notes(self) -> list[str]:
        """Messages for the user since the last call."""
        ...

    def close(self) -> None:
        """End everything; environments are closed."""
        ...
