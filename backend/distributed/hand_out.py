"""Which rank samples which prompts of a step: shares by measured pace first, then smaller rounds to whoever is free.

Decoding a round takes a fixed time (every token of the longest completion is a pass over the weights) and a time that grows with its
completions, so a rank's pace is a line fitted to its last rounds. A free rank gets three quarters of what would let all ranks end together,
and the rest later, when lengths are known that nobody could foresee; all of it at once where another round would cost more than it evens
out; and nothing where it would be the last to end (guided self-scheduling, Polychronopoulos and Kuck 1987, with unequal processors).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

FIRST_SHARE = 0.75
"""Share of its even part that a rank gets in one round."""
UNKNOWN_SHARE = 0.5
"""The same while the pace of some rank is not known yet."""
ROUNDS = 24
"""Rounds of a rank that its pace is fitted to."""
FADING = 0.9
"""Weight of a round, against the one after it."""
RECOVERY = 0.9
"""What the seconds of a rank are multiplied by for each step in which it gets nothing."""


@dataclass(frozen=True, slots=True)
class Pace:
    """A round of n completions takes `fixed_s` + `each_s` · n seconds."""

    fixed_s: float
    each_s: float


class RankPaces:
    """What is known of the ranks' paces, over the steps of a run."""

    def __init__(self, size: int) -> None:
        self._rounds = [deque[tuple[int, float]](maxlen=ROUNDS) for _ in range(size)]

    def observe(self, rank: int, completions: int, seconds: float) -> None:
        """A round is done: sampled and scored."""
        self._rounds[rank].append((completions, max(seconds, 1e-9)))

    def assume_faster(self, rank: int) -> None:
        """It got nothing to do, so nothing new is known of it: a rank that was slow for a while is given another chance in time."""
        self._rounds[rank] = deque([(n, RECOVERY * s) for n, s in self._rounds[rank]], ROUNDS)

    @property
    def are_known(self) -> bool:
        return all(self._rounds)

    def usual_s(self, rank: int, completions: int) -> tuple[float, bool] | None:
        """(seconds that a round of so many completions takes this rank, whether it has done one); of one that has not, the mean of the
        others. None while no rank has."""
        if not any(self._rounds):
            return None
        pace = self[rank]
        return pace.fixed_s + pace.each_s * completions, bool(self._rounds[rank])

    def __getitem__(self, rank: int) -> Pace:
        """Of a rank without a round: the mean of the others."""
        if self._rounds[rank]:
            return _fitted(self._rounds[rank])
        known = [_fitted(rounds) for rounds in self._rounds if rounds] or [Pace(0.0, 1.0)]
        return Pace(*(sum(values) / len(known) for values in zip(*((p.fixed_s, p.each_s) for p in known), strict=True)))

    def speeds(self) -> list[float]:
        """Completions a second of each rank, the fixed time left out."""
        return [1 / self[rank].each_s for rank in range(len(self._rounds))]


def _fitted(rounds: Sequence[tuple[int, float]]) -> Pace:
    """The line through the rounds by weighted least squares; through the origin where a line would fall, or begin below 0."""
    weights = [FADING**age for age in reversed(range(len(rounds)))]
    total = sum(weights)
    mean_n = sum(w * n for w, (n, _) in zip(weights, rounds, strict=True)) / total
    mean_s = sum(w * s for w, (_, s) in zip(weights, rounds, strict=True)) / total
    spread = sum(w * (n - mean_n) ** 2 for w, (n, _) in zip(weights, rounds, strict=True))
    slope = 0.0
    if spread > 0:
        slope = sum(w * (n - mean_n) * (s - mean_s) for w, (n, s) in zip(weights, rounds, strict=True)) / spread
    fixed = mean_s - slope * mean_n
    return Pace(fixed, slope) if slope > 0 and fixed > 0 else Pace(0.0, mean_s / mean_n)


class PromptScheduler:
    """The prompts of one step, of which each is handed out once. `take` is asked for every rank that is free, and again later for one that
    got nothing."""

    def __init__(self, prompts: int, completions_each: int, paces: RankPaces, size: int) -> None:
        self.prompts, self._each, self._paces, self._size = prompts, completions_each, paces, size
        self._next = 0
        self._free_at = [0.0] * size
        """When each rank should be done with its round, in seconds on the caller's clock."""

    @property
    def left(self) -> int:
        return self.prompts - self._next

    def take(self, rank: int, now: float) -> range:
        """The next prompts for a rank that is free now; empty where it should have none."""
        count = self._count(rank, now)
        taken = range(self._next, self._next + count)
        if count:
            self._next += count
            self._free_at[rank] = now + self._seconds(rank, count)
        return taken

    def is_free(self, rank: int, now: float) -> None:
        """The rank is done with its round, earlier than expected or not."""
        self._free_at[rank] = now

    def _count(self, rank: int, now: float) -> int:
        if not self.left:
            return 0
        self._free_at[rank] = now
        free_at = [max(at, now) for at in self._free_at]
        even = self._even_part(rank, free_at)
        count = round(even)
        if not count:  # a single one may be better off here all the same, if nobody would end it earlier
            ends = [at + self._seconds(other, 1) for other, at in enumerate(free_at)]
            return int(min(range(self._size), key=lambda other: (ends[other], other)) == rank)
        share = FIRST_SHARE if self._paces.are_known else UNKNOWN_SHARE
        later, pace = (1 - share) * even, self._paces[rank]
        # Another round would last longer by more than it would even out: it pays the fixed time again, and its longest completion.
        if later < 1 or later * self._each * pace.each_s < pace.fixed_s:
            return min(count, self.left)
        return min(max(1, int(share * even)), self.left)

    def _even_part(self, rank: int, free_at: Sequence[float]) -> float:
        """How many of the prompts that are left this rank would have if all ended together."""
        paces = [self._paces[other] for other in range(self._size)]
        # By bisection: what the ranks get done until a time grows with it.
        low = min(free_at)
        high = max(at + self._seconds(other, self.left) for other, at in enumerate(free_at))
        for _ in range(50):
            end = (low + high) / 2
            parts = [self._done_by(end, at, pace) for at, pace in zip(free_at, paces, strict=True)]
            low, high = (end, high) if sum(parts) < self.left else (low, end)
        return self._done_by(high, free_at[rank], paces[rank])

    def _done_by(self, end: float, free_at: float, pace: Pace) -> float:
        """Prompts that a rank which is free at `free_at` gets done until `end` in one round."""
        return max(0.0, end - free_at - pace.fixed_s) / (pace.each_s * self._each)

    def _seconds(self, rank: int, prompts: int) -> float:
        pace = self._paces[rank]
        return pace.fixed_s + pace.each_s * self._each * prompts
