"""Draw prompts by their pass rate: those whose groups are likely to have both passes and failures.

The pass rate of a row has a Beta distribution (MoPPS, arXiv:2507.04632): α = α₀ + passes and β = β₀ + failures, where
older groups count half as much with each newer one. α₀ and β₀ follow the rows that are sampled for the first time, by
their mean pass rate and by how many of their groups have a signal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from backend.data.signal import PRIOR, passes, prior_strength, signal_chance
from backend.types import Group

DECAY = 0.5  # weight of a row's earlier groups when a newer one is counted
FOLLOWS = 0.1  # weight of a new row's group in the prior
CANDIDATES = 16  # rows compared for each prompt drawn
KNOWN_SHARE = 0.9  # share of the candidates that have been sampled before, once there are enough


class PassRates:
    """The pass rates of `rows` rows. `solved_from`: the reward from which a completion passes; below it, it counts as
    its share of the range of rewards so far. `uniform_share`: share of the prompts that are drawn from all rows alike.
    Each draw depends on the seed, the position in the run and the finished steps alone."""

    def __init__(self, rows: int, seed: int, group_size: int, uniform_share: float, solved_from: float) -> None:
        self.seed, self.group_size = seed, group_size
        self.uniform_share, self.solved_from = uniform_share, solved_from
        self.begin(rows)

    def begin(self, rows: int) -> None:
        """Forget everything, for other rows."""
        self.passes_N, self.failures_N = np.zeros((2, rows), np.float32)
        self._prior, self._lowest, self._highest = np.array([0.5, math.inf, -math.inf], np.float32)
        self._signal = np.float32(signal_chance(PRIOR / 2, PRIOR / 2, self.group_size))  # share of new rows' groups
        self._drawn = set[int]()
        self._rewards: list[tuple[int, list[float]]] = []  # of the step in flight, by row

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies of the state after the last finished step."""
        course = np.array([self._prior, self._lowest, self._highest, self._signal], np.float32)
        return {"passes": self.passes_N.copy(), "failures": self.failures_N.copy(), "course": course}

    def restore(self, arrays: Mapping[str, Any]) -> None:
        """Restore `arrays`. Raises ValueError for those of another number of rows."""
        passes, failures, course = (np.array(arrays[name], np.float32) for name in ("passes", "failures", "course"))
        prior, lowest, highest, signal = course
        if not passes.shape == failures.shape == self.passes_N.shape:
            raise ValueError(f"The pass rates are of {passes.size} rows, not of {self.passes_N.size}.")
        self.begin(passes.size)
        self.passes_N, self.failures_N = passes, failures
        self._prior, self._lowest, self._highest, self._signal = prior, lowest, highest, signal

    def posterior(self, rows: Any) -> tuple[Any, Any]:
        """(α, β) of a row or an array of rows."""
        strength = prior_strength(float(self._prior), float(self._signal), self.group_size)
        return strength * self._prior + self.passes_N[rows], strength * (1 - self._prior) + self.failures_N[rows]

    def order(self, count: int, position: int) -> Iterator[int]:
        """Rows for `count` prompts, best first, without end: some may not fit. None twice if there are others."""
        generator, rows = np.random.default_rng([self.seed, position]), len(self.passes_N)
        uniform = int(self.uniform_share * count + generator.random())
        most, known = min(CANDIDATES * count, rows), np.flatnonzero(self.passes_N + self.failures_N)
        while True:
            anywhere = generator.choice(rows, most, replace=False)
            old = min(len(known), round(KNOWN_SHARE * most))
            chosen = known[generator.choice(len(known), old, replace=False)]
            candidates = np.array([*chosen, *anywhere[uniform:]][:most], int)
            rate = generator.beta(*self.posterior(candidates))  # Thompson sampling
            signal = 1 - rate**self.group_size - (1 - rate) ** self.group_size
            for row in [*anywhere[:uniform].tolist(), *candidates[np.argsort(-signal, kind="stable")].tolist()]:
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
            if not self.passes_N[row] + self.failures_N[row]:
                self._prior += FOLLOWS * (min(max(solved / len(rewards), 0.05), 0.95) - self._prior)
                self._signal += FOLLOWS * ((max(rewards) > min(rewards)) - self._signal)
            self.passes_N[row] = DECAY * self.passes_N[row] + solved
            self.failures_N[row] = DECAY * self.failures_N[row] + len(rewards) - solved
        self._rewards = []
        self._drawn.clear()
