"""How much each reward function counts, step by step: always the same, along a line, or by how well it goes.

It changes no scores and knows no trainer: the trainer asks for the weights of a step, and says afterwards how often
each function was satisfied. Everything that a resumed run needs is in `state`, as plain JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from backend.types import Group

Kind = Literal["constant", "linear", "adaptive"]

STRUGGLING, SUCCEEDING = 0.3, 0.8
"""Success rates below and above which an adaptive weight changes."""
RAISE, LOWER = 1.2, 0.9
LEAST, MOST = 0.1, 10.0
"""Bounds of an adaptive weight, as multiples of what it began as."""


class WeightSchedule:
    """The weights of a run's reward functions at every step.

    `constant`: `weights`. `linear`: from `weights` at step 1 along a line to `final` at step `steps`, and there it
    stays. `adaptive`: begins with `weights`; every `every` steps, a function whose success rate over the last `window`
    steps is below 0.3 gets 1.2 times its weight, one above 0.8 gets 0.9 times, between a tenth and ten times of what
    each began with. A weight of 0 stays 0, a negative one stays negative.
    """

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
        """`names` of the functions, in the order of `weights`, are needed for `adaptive` only.

        Raises ValueError with a sentence for settings that do not fit together.
        """
        _check(kind, weights, final, steps, names, every, window)
        self.kind: Kind = kind
        self.weights = [float(weight) for weight in weights]
        self.final = [float(weight) for weight in final or weights]
        self.steps, self.every, self.window = steps, every, window
        self.names = list(names)
        self._seen = 0
        self._factors = dict.fromkeys(names, 1.0)
        self._rates: dict[str, list[list[float]]] = {name: [] for name in names}
        self._ranges = {name: [0.0, 0.0] for name in names}

    def at(self, step: int) -> list[float]:
        """The weights of step `step`, counted from 1, in the order of the functions.

        Adaptive weights are those that follow from what has been observed, whatever the step.
        """
        if self.kind == "linear":
            share = min(max((step - 1) / (self.steps - 1), 0.0), 1.0)
            return [(1 - share) * start + share * end for start, end in zip(self.weights, self.final, strict=True)]
        if self.kind == "adaptive":
            return [weight * self._factors[name] for name, weight in zip(self.names, self.weights, strict=True)]
        return list(self.weights)

    def observe(self, step: int, success: Mapping[str, float]) -> None:
        """Take in each function's success rate (0 to 1) in a step that has ended; the next step's weights follow from
        it.

        A function that is not in `success` had no opinion in this step. Steps come in order; ValueError otherwise.
        """
        if step <= self._seen:
            raise ValueError(f"step {step} was observed before; the last one was {self._seen}")
        self._seen = step
        if self.kind != "adaptive":
            return
        for name in self.names:
            kept = [entry for entry in self._rates[name] if entry[0] > step - self.window]
            self._rates[name] = kept + ([[step, float(success[name])]] if name in success else [])
        if step % self.every == 0:
            self._factors = {name: self._adapted(name) for name in self.names}

    def observe_scores(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """`observe` with the success rates of a step's scored completions, which are returned.

        A completion succeeds at a function when it scores more than half of the way from the worst to the best that the
        function has given in this run, 0 counted in: above 1.0 for one that gives 0 or 2, above -0.5 for a penalty down
        to -1. A function that has given nothing but 0 so far is left out: raising its weight would change nothing now,
        and too much once it does give something.
        """
        scores = {name: _opinions(groups, name) for name in self.names}
        for name, given in scores.items():
            low, high = self._ranges[name]
            self._ranges[name] = [min([low, *given]), max([high, *given])]
        success = {name: self._rate(name, given) for name, given in scores.items() if given and any(self._ranges[name])}
        self.observe(step, success)
        return success

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs to go on exactly; plain JSON."""
        return {
            "kind": self.kind,
            "names": list(self.names),
            "seen": self._seen,
            "factors": dict(self._factors),
            "rates": dict(self._rates),  # whose lists are replaced, never changed
            "ranges": dict(self._ranges),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave. Raises ValueError for the state of other functions or of another kind."""
        if (state.get("kind"), state.get("names")) != (self.kind, self.names):
            raise ValueError("the saved reward weights are of another schedule or of other reward functions")
        self._seen = int(state["seen"])
        self._factors = {name: float(factor) for name, factor in state["factors"].items()}
        self._rates, self._ranges = dict(state["rates"]), dict(state["ranges"])

    def _adapted(self, name: str) -> float:
        rates = [rate for _, rate in self._rates[name]]
        mean = sum(rates) / len(rates) if rates else math.nan
        change = RAISE if mean < STRUGGLING else LOWER if mean > SUCCEEDING else 1.0
        return min(max(self._factors[name] * change, LEAST), MOST)

    def _rate(self, name: str, scores: Sequence[float]) -> float:
        low, high = self._ranges[name]
        return sum(score > (low + high) / 2 for score in scores) / len(scores)


def _opinions(groups: Sequence[Group], name: str) -> list[float]:
    found = (completion.scores.get(name) for group in groups for completion in group.completions)
    return [score for score in found if score is not None]


def _check(
    kind: str,
    weights: Sequence[float],
    final: Sequence[float] | None,
    steps: int,
    names: Sequence[str],
    every: int,
    window: int,
) -> None:
    linear, adaptive = kind == "linear", kind == "adaptive"
    rules = [
        (kind in ("constant", "linear", "adaptive"), f"reward weights are constant, linear or adaptive, not {kind}"),
        (all(map(math.isfinite, [*weights, *(final or [])])), "every reward weight must be a finite number"),
        (
            not linear or len(final or []) == len(weights),
            "linear reward weights need final ones, one for each function",
        ),
        (not linear or steps >= 2, "linear reward weights need at least 2 steps"),
        (not adaptive or len(set(names)) == len(weights), "adaptive reward weights need the name of each function"),
        (min(every, window) >= 1, "adaptive reward weights need an interval and a window of at least 1 step"),
    ]
    for holds, sentence in rules:
        if not holds:
            raise ValueError(sentence)
