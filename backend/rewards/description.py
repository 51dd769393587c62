"""A reward function as the rest of the program knows it: what it is called, where it is, how it is called. Plain data.

The callable itself stays in the process that executed its file (`backend.rewards.resolve`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
