"""Draw prompts by their pass rate: those whose groups are likely to have both passes and failures.

The pass rate of a row has a Beta distribution (MoPPS, arXiv:2507.04632): α = α₀ + passes and β = β₀ + failures, where
older groups count half as much with each newer one. α₀ and β₀ follow the rows that are sampled for the first time, by
their mean pass rate and by how many of their groups have a signal; those of about the same length count most. A row
counts less with each group it has had: the same few rows again and again teach little else.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from backend.data.signal import PRIOR, passes, prior_strength, signal_chance
from backend.types import Group

DECAY = 0.5  # weight of a row's earlier groups when a newer one is counted
LENGTHS = 8  # classes of rows by length, about equally large
FOLLOWS, FOLLOWS_OTHERS = 0.2, 0.05  # weight of a new row's group in the prior of its own length, and of others
CANDIDATES = 16  # rows compared for each prompt drawn
KNOWN_SHARE = 0.7  # share of the candidates that have been sampled before, once there are enough
DRAWS = 3  # pass rates drawn for each candidate: one alone often makes a row of which nothing is known the best


class PassRates:
    """The pass rates of rows of `sizes` characters. `solved_from`: the reward from which a completion passes;
    below it, it counts as its share of the range of rewards so far. `uniform_share`: share of the prompts that are
    drawn from all rows alike.
    Each draw depends on the seed, the position in the run and the finished steps alone."""

    def __init__(
        self, sizes: Sequence[int], seed: int, group_size: int, uniform_share: float, solved_from: float
    ) -> None:
        self.seed, self.group_size = seed, group_size
        self.uniform_share, self.solved_from = uniform_share, solved_from
        self.begin(sizes)

    def begin(self, sizes: Sequence[int]) -> None:
        """Forget everything, for other rows."""
        self.passes_N, self.failures_N, self.groups_N = np.zeros((3, len(sizes)), np.float32)
        limits = np.unique(np.quantile(sizes, np.arange(1, LENGTHS) / LENGTHS))
        self._length_N = np.searchsorted(limits, sizes)  # class of each row
        self._lowest, self._highest = np.array([math.inf, -math.inf], np.float32)
        self._prior_L = np.full(LENGTHS, 0.5, np.float32)
        at_first = signal_chance(PRIOR / 2, PRIOR / 2, self.group_size)
        self._signal_L = np.full(LENGTHS, at_first, np.float32)  # share of new rows' groups with a signal
        self._drawn = set[int]()
        self._rewards: list[tuple[int, list[float]]] = []  # of the step in flight, by row

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies of the state after the last finished step."""
        limits, priors = np.array([self._lowest, self._highest]), np.array([self._prior_L, self._signal_L])
        rows = {"passes": self.passes_N, "failures": self.failures_N, "groups": self.groups_N}
        return {name: array.copy() for name, array in rows.items()} | {"limits": limits, "priors": priors}

    def restore(self, arrays: Mapping[str, Any]) -> None:
        """Restore `arrays`. Raises KeyError for those of an earlier version, ValueError for another number of rows."""
        names = "passes", "failures", "groups", "limits", "priors"
        passes, failures, groups, limits, priors = (np.array(arrays[name], np.float32) for name in names)
        if not passes.shape == failures.shape == groups.shape == self.passes_N.shape:
            raise ValueError(f"The pass rates are of {passes.size} rows, not of {self.passes_N.size}.")
        self.passes_N, self.failures_N, self.groups_N = passes, failures, groups
        (self._lowest, self._highest), (self._prior_L, self._signal_L) = limits, priors
        self._rewards = []
        self._drawn.clear()

    def posterior(self, rows: Any) -> tuple[Any, Any]:
        """(α, β) of a row or an array of rows."""
        priors = zip(self._prior_L.tolist(), self._signal_L.tolist(), strict=True)
        strength_L = np.array([prior_strength(*prior, self.group_size) for prior in priors])
        length = self._length_N[rows]
        strength, mean = strength_L[length], self._prior_L[length]
        return strength * mean + self.passes_N[rows], strength * (1 - mean) + self.failures_N[rows]

    def order(self, count: int, position: int) -> Iterator[int]:
        """Rows for `count` prompts, best first, without end: some may not fit. None twice if there are others."""
        generator, rows = np.random.default_rng([self.seed, position]), len(self.passes_N)
        uniform = int(self.uniform_share * count + generator.random())
        most, known = min(CANDIDATES * count, rows), np.flatnonzero(self.groups_N)
        while True:
            anywhere = generator.choice(rows, most, replace=False)
            old = min(len(known), round(KNOWN_SHARE * most))
            chosen = known[generator.choice(len(known), old, replace=False)]
            candidates = np.array([*chosen, *anywhere[uniform:]][:most], int)
            rate = generator.beta(*self.posterior(candidates), (DRAWS, len(candidates)))  # Thompson sampling
            signal = (1 - rate**self.group_size - (1 - rate) ** self.group_size).mean(axis=0)
            worth = signal / np.sqrt(1 + self.groups_N[candidates])
            for row in [*anywhere[:uniform].tolist(), *candidates[np.argsort(-worth, kind="stable")].tolist()]:
                if row not in self._drawn:
                    self._drawn.add(row)
                    yield row
            if len(self._drawn) == rows:
                self._drawn.clear()

    def observe(self, groups: Sequence[Group]) -> dict[str, float]:
        """Note the scored groups of the step in flight. → its metrics."""
        scored = [(group.problem.index, [each.reward for each in group.completions]) for group in groups]
        self._rewards = [(row, known) for row, rewards in scored if (known := [r for r in rewards if r is not None])]
        if not self._rewards:
            return {}
        beliefs = [self.posterior(row) for row, _ in self._rewards]
        return {
            "curriculum/pass_rate": float(np.mean([a / (a + b) for a, b in beliefs])),
            "curriculum/expected_signal": float(np.mean([signal_chance(a, b, self.group_size) for a, b in beliefs])),
            "curriculum/signal": float(np.mean([max(rewards) > min(rewards) for _, rewards in self._rewards])),
        }

    def finish_step(self) -> None:
        """Count the groups of the step in flight."""
        for _, rewards in self._rewards:
            # In float32, as a checkpoint keeps them: a resumed run counts alike.
            limits = min(self._lowest, *rewards), max(self._highest, *rewards)
            self._lowest, self._highest = np.array(limits, np.float32)
        for row, rewards in self._rewards:
            solved = sum(passes(reward, self.solved_from, self._lowest, self._highest) for reward in rewards)
            if not self.groups_N[row]:
                follows_L = np.where(np.arange(LENGTHS) == self._length_N[row], FOLLOWS, FOLLOWS_OTHERS)
                self._prior_L += follows_L * (min(max(solved / len(rewards), 0.05), 0.95) - self._prior_L)
                self._signal_L += follows_L * ((max(rewards) > min(rewards)) - self._signal_L)
            self.passes_N[row] = DECAY * self.passes_N[row] + solved
            self.failures_N[row] = DECAY * self.failures_N[row] + len(rewards) - solved
            self.groups_N[row] += 1
        self._rewards = []
        self._drawn.clear()
