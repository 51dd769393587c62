"""Sums over the ranks that never end: who is to blame where every rank answers and a sum is none the less not done.

A rank that dies or falls silent is found by its connection. What is left are a cable that carries the heartbeats and not the sums, the
deadlock of MLX's ring with three ranks or more (mlx#4475), and a sum that MLX has given up on one rank while the others wait. A rank that
has not begun a sum yet is slower than the others; how long that may last is `patience`'s.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

SUSPICION_S = 3.0
"""How long after MLX has given up a sum the leader waits for the sign that another rank is gone, which is why."""
LEAST_LIMIT_S = 15.0
"""The least time that a sum may take which every rank has begun."""
SLOWEST_BANDWIDTH = 1e6
"""Bytes a second that a cable is always granted, however fast it was before."""
MARGIN = 3.0
"""How much slower than the fastest so far a sum may be."""


class SummingRank(Protocol):
    """How far the collectives of this rank are.

    `entered` and `left` count those that it has begun and ended, `failure` is what MLX said of one that broke, `pending_bytes` the size of
    the one under way, and `bandwidth` the most bytes a second that one has moved.
    """

    @property
    def entered(self) -> int: ...
    @property
    def left(self) -> int: ...
    @property
    def failure(self) -> str: ...
    @property
    def pending_bytes(self) -> int: ...
    @property
    def bandwidth(self) -> float: ...


def pulse_of(group: SummingRank) -> dict[str, Any]:
    """What a rank's heartbeat tells of its collectives."""
    return {"entered": group.entered, "left": group.left, "failure": group.failure}


@dataclass(frozen=True, slots=True)
class CollectiveProgress:
    """How far the collectives of one rank are, by its last heartbeat."""

    entered: int = 0
    left: int = 0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A rank, and why the run cannot go on with it, to follow its name in a sentence."""

    rank: int
    why: str


class CollectiveWatch:
    """Judges by the heartbeats of all ranks. `take` is called in reading threads, `verdict` in the leader's main thread."""

    def __init__(self, group: SummingRank) -> None:
        """`group`: the leader's own collectives."""
        self._group = group
        self._lock = threading.Lock()
        self._progress: dict[int, CollectiveProgress] = {}
        self._stuck: tuple[int, float] = (0, 0.0)
        """The number of the collective that was under way at the last look, and since when every rank has begun it."""
        self._failed_since: float | None = None

    def take(self, rank: int, pulse: Mapping[str, Any]) -> None:
        """The heartbeat of a worker."""
        progress = CollectiveProgress(
            int(pulse.get("entered", 0)), int(pulse.get("left", 0)), str(pulse.get("failure", ""))
        )
        with self._lock:
            self._progress[rank] = progress

    def behind(self) -> list[int]:
        """The workers that have not begun the collective that the leader is in; the one that is furthest behind first."""
        with self._lock:
            entered = {rank: progress.entered for rank, progress in self._progress.items()}
        return sorted((rank for rank, count in entered.items() if count < self._group.entered), key=entered.__getitem__)

    def verdict(self, now: float) -> Verdict | None:
        """Who is to blame at `now` (monotonic seconds); None as long as nobody is."""
        with self._lock:
            workers = dict(self._progress)
        if not workers:
            return None
        everyone = workers | {0: CollectiveProgress(self._group.entered, self._group.left, self._group.failure)}
        return self._of_failure(everyone, now) or self._of_stuck(everyone, now)

    def _of_failure(self, everyone: Mapping[int, CollectiveProgress], now: float) -> Verdict | None:
        failed = [rank for rank in sorted(everyone, reverse=True) if everyone[rank].failure]
        if not failed:
            return None
        self._failed_since = self._failed_since or now
        if now - self._failed_since < SUSPICION_S:
            return None
        # With two ranks the leader's own failure is that of its link to the other.
        whom = failed[0] or max(everyone)
        return Verdict(whom, f"could not add up the gradients with the others ({everyone[failed[0]].failure})")

    def _of_stuck(self, everyone: Mapping[int, CollectiveProgress], now: float) -> Verdict | None:
        begun = min(progress.entered for progress in everyone.values())
        behind = [rank for rank, progress in everyone.items() if progress.left < begun]
        if not behind:
            self._stuck = (0, 0.0)
            return None
        if self._stuck[0] != begun:
            self._stuck = (begun, now)
        took = now - self._stuck[1]
        if took < self._limit_s():
            return None
        whom = max(behind) or max(everyone)
        return Verdict(whom, f"has answered, but a sum over all ranks did not end within {took:.0f} seconds")

    def _limit_s(self) -> float:
        size, bandwidth = self._group.pending_bytes, self._group.bandwidth
        return LEAST_LIMIT_S + max(size / SLOWEST_BANDWIDTH, MARGIN * size / bandwidth if bandwidth else 0.0)
