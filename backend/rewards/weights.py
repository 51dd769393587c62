"""Reward weight schedules: constant, linear, or adapted to success rates."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from backend.types import Group

Kind = Literal["constant", "linear", "adaptive"]

STRUGGLING, SUCCEEDING = 0.3, 0.8  # success rates that trigger a change of an adaptive weight
RAISE, LOWER = 1.2, 0.9
LEAST, MOST = 0.1, 10.0  # bounds of an adaptive weight, relative to its initial value


class WeightSchedule:
    """Weights by step. `linear`: from `weights` at step 1 to `final` at `steps`. `adaptive`: every `every` steps × 1.2
    if the mean success rate over `window` steps is below 0.3, × 0.9 above 0.8, from a tenth to ten times the start."""

    def __init__(
        self,
        kind: Kind,
        weights: Sequence[float],
        final: Sequence[float] | None = None,
        steps: int = 0,
        *,
        names: Sequence[str] = (),
        every: int = 10,
        window: int = 10,
    ) -> None:
        """`adaptive` needs `names`. Raises ValueError for weights that are not finite and linear ones over one step."""
        if not all(map(math.isfinite, [*weights, *(final or [])])):
            raise ValueError("every reward weight must be a finite number")
        if kind == "linear" and steps < 2:
            raise ValueError("linear reward weights need at least 2 steps")
        self.kind: Kind = kind
        self.weights = [float(weight) for weight in weights]
        self.final = [float(weight) for weight in final or weights]
        self.steps, self.every, self.window = steps, every, window
        self.names = list(names)
        self._factors = dict.fromkeys(names, 1.0)
        self._rates: dict[str, list[list[float]]] = {name: [] for name in names}
        self._ranges = {name: [0.0, 0.0] for name in names}

    def at(self, step: int) -> list[float]:
        """Weights of step `step`, from 1. Adaptive ones depend only on observations."""
        if self.kind == "linear":
            share = min(max((step - 1) / (self.steps - 1), 0.0), 1.0)
            return [(1 - share) * start + share * end for start, end in zip(self.weights, self.final, strict=True)]
        if self.kind == "adaptive":
            return [weight * self._factors[name] for name, weight in zip(self.names, self.weights, strict=True)]
        return list(self.weights)

    def observe(self, step: int, success: Mapping[str, float]) -> None:
        """Record success rates (0 to 1) of a finished step. Functions missing in `success` had no opinion."""
        if self.kind != "adaptive":
            return
        for name in self.names:
            recent = [entry for entry in self._rates[name] if entry[0] > step - self.window]
            self._rates[name] = recent + ([[step, float(success[name])]] if name in success else [])
        for name, rates in self._rates.items() if step % self.every == 0 else ():
            mean = sum(rate for _, rate in rates) / len(rates) if rates else math.nan
            change = RAISE if mean < STRUGGLING else LOWER if mean > SUCCEEDING else 1.0
            self._factors[name] = min(max(self._factors[name] * change, LEAST), MOST)

    def observe_scores(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """`observe` the success rates of a step, and return them. Success is a score above the middle of the function's
        range in this run, 0 included; functions with only zeros so far are left out."""
        success: dict[str, float] = {}
        for name in self.names:
            given = (completion.scores.get(name) for group in groups for completion in group.completions)
            scores = [score for score in given if score is not None]
            low, high = min([self._ranges[name][0], *scores]), max([self._ranges[name][1], *scores])
            self._ranges[name] = [low, high]
            if scores and (low or high):
                success[name] = sum(score > (low + high) / 2 for score in scores) / len(scores)
        self.observe(step, success)
        return success

    def state(self) -> dict[str, Any]:
        """State for `restore`, as plain JSON."""
        return {
            "kind": self.kind,
            "names": list(self.names),
            "factors": dict(self._factors),
            "rates": dict(self._rates),  # whose lists are replaced, never changed
            "ranges": dict(self._ranges),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`. Raises ValueError if it does not match."""
        if (state.get("kind"), state.get("names")) != (self.kind, self.names):
            raise ValueError("the saved reward weights are of another schedule or of other reward functions")
        self._factors = {name: float(factor) for name, factor in state["factors"].items()}
        self._rates, self._ranges = dict(state["rates"]), dict(state["ranges"])
