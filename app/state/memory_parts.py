"""The memory that a run will need, as the window shows it: parts that add up, against this machine's limit.

Plain data: `app.state.memory` makes it from an estimate; nothing is estimated here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backend.config.config import Config

GB = 1e9


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One use of memory: “Weights”, “KV cache”, …; `about` is a sentence for its tip."""

    name: str
    bytes: float
    about: str = ""


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """`limit` is what a process may use of this machine's memory, in bytes. `advice` says what to change where the run may not fit,
    and `row_tip` what would make one that fits faster, in a sentence each.

    `slack` is how far the estimate may be off, as a share of it: beyond that, a run that does not fit surely does not.
    """

    parts: tuple[MemoryPart, ...]
    limit: float
    advice: str = ""
    slack: float = 0.15
    row_tip: str = ""
    machines_note: str = ""
    """Whose memory it is, of a run on several machines; a sentence or ""."""

    @property
    def total(self) -> float:
        return sum(part.bytes for part in self.parts)

    @property
    def verdict(self) -> str:
        """fits, tight (it may not fit) or over (it surely does not)."""
        if self.total * (1 + self.slack) <= self.limit:
            return "fits"
        return "over" if self.total * (1 - self.slack) > self.limit else "tight"

    @property
    def sentence(self) -> str:
        needs, limit = amount(self.total), amount(self.limit)
        verdict = {
            "fits": f"Needs about {needs} of {limit}.",
            "tight": f"Needs about {needs}; this machine has {limit} to give, so it may not fit.",
            "over": f"Needs about {needs}, and this machine has only {limit} to give.",
        }[self.verdict]
        return f"{verdict} {self.machines_note}".rstrip()


MemoryEstimator = Callable[[Config], MemoryParts | None]
"""Estimates what a run needs; None where that is not known, as for a model that is not on this machine yet."""


def amount(size: float) -> str:
    """“9.8 GB”, “640 MB”."""
    if size < GB:
        return f"{size / 1e6:.0f}\u00a0MB"
    return f"{size / GB:.1f}\u00a0GB" if size < 100 * GB else f"{size / GB:.0f}\u00a0GB"
