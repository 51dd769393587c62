"""What the rules read of a run: its settings, the metrics of its first and newest steps, its newest evaluations.

Bounded, however long the run is, and a function of the event log alone.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

from backend.config.config import SETTINGS
from backend.rewards.catalogue import builtin_rewards

Metrics = Mapping[str, float]
"""A step's finite metrics."""

WINDOW = 10
"""Steps over which most rules average; with fewer they find nothing."""
LONG = 60
"""Newest steps that are kept, for the rules about a trend."""
EVALUATIONS = 8
"""Newest evaluations that are kept."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The held-out reward after a step, and the mean training reward of the WINDOW steps before it."""

    step: int
    reward: float
    training: float | None


class Recent:
    """`first`: metrics of the run's first WINDOW steps; `steps`: of the LONG newest, newest last; `step`: the number
    of the newest; `not_numbers`: names of its metrics that are null."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings`: raw ones; those that are missing have their defaults."""
        self._settings = dict(settings)
        self.first: list[Metrics] = []
        self.steps: deque[Metrics] = deque(maxlen=LONG)
        self.evaluations: deque[HeldOut] = deque(maxlen=EVALUATIONS)
        self.first_evaluation: HeldOut | None = None
        self.step = 0
        self.not_numbers: Set[str] = set()
        self.changed: set[str] = set()
        """Settings that were changed while the run trained."""

    def take(self, event: Mapping[str, Any]) -> None:
        """Note what an event of the event log adds; events of no interest are skipped, damaged ones too."""
        kind = event.get("kind")
        metrics, changed = _mapping(event.get("metrics")), _mapping(event.get("settings"))
        if kind == "step" and metrics:
            self._take_step(event, metrics)
        elif kind == "eval" and metrics and event.get("split") != "test":
            self._take_evaluation(metrics)
        elif kind == "change" and changed:
            self._settings |= {key: pair[-1] for key, pair in changed.items() if isinstance(pair, list) and pair}
            self.changed |= changed.keys()

    def _take_step(self, event: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        step = event.get("step")
        self.step = step if isinstance(step, int) else self.step + 1
        finite = {name: float(value) for name, value in metrics.items() if is_number(value)}
        self.not_numbers = metrics.keys() - finite.keys()
        if len(self.first) < WINDOW:
            self.first.append(finite)
        self.steps.append(finite)

    def _take_evaluation(self, metrics: Mapping[str, Any]) -> None:
        reward = metrics.get("reward")
        if is_number(reward):
            self.evaluations.append(HeldOut(self.step, reward, self.mean("reward")))
            self.first_evaluation = self.first_evaluation or self.evaluations[0]

    def setting(self, key: str) -> Any:
        """The setting's present value."""
        return self._settings.get(key, SETTINGS[key].default)

    def scaled(self, key: str, factor: float) -> float:
        """The setting's value times `factor`, in two digits: a proposal."""
        return float(f"{self.setting(key) * factor:.2g}")

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer updates between two rollouts: with a single one the ratio is 1, and nothing can be clipped."""
        return self.setting("num_iterations") * self.setting("steps_per_generation")

    def values(self, name: str, count: int = WINDOW) -> list[float]:
        """The metric in the last `count` steps, without the steps that did not measure it; [] while there are fewer
        steps."""
        if len(self.steps) < count:
            return []
        return known([self.steps[index] for index in range(-count, 0)], name)

    def mean(self, name: str, count: int = WINDOW) -> float | None:
        values = self.values(name, count)
        return sum(values) / len(values) if values else None

    def median(self, name: str, count: int = WINDOW) -> float | None:
        """For metrics with single outliers, such as the KL estimate."""
        values = self.values(name, count)
        return statistics.median(values) if values else None

    def rewards(self) -> list[str]:
        """Names of the reward functions of the newest step."""
        return [name.split("/")[1] for name in self.steps[-1] if name.startswith("rewards/") and name.endswith("/mean")]

    @property
    def has_improved(self) -> bool:
        """True if the mean reward of the newest steps is clearly above that of the run's first."""
        change = MeanChange.between(known(self.first, "reward"), self.values("reward"))
        return change is not None and change.size > LIKELY * change.error

    @property
    def has_converged(self) -> bool:
        """True if the run has learned what its rewards ask for: the reward has risen, and nearly all completions get
        about the same. Then equal completions and groups without signal are what success looks like."""
        reward, spread = self.mean("reward"), self.mean("reward_std")
        if reward is None or spread is None or not self.has_improved:
            return False
        return spread <= SOLVED_SPREAD * abs(reward)


SOLVED_SPREAD = 0.5
"""Spread of the rewards over their mean below which nearly all completions succeed: with rewards of 0 and 1 it is
0.5 at 80 %."""
LIKELY = 2.0
"""Standard errors by which two means differ in all likelihood: enough to hold a finding back."""
CERTAIN = 4.0
"""Standard errors from which on a difference is a finding by itself. With many rules and many steps two would come
by chance."""


@dataclass(frozen=True, slots=True)
class MeanChange:
    """From one mean to another, and its standard error (from the scatter of the steps)."""

    before: float
    after: float
    error: float

    @staticmethod
    def between(early: Sequence[float], late: Sequence[float]) -> MeanChange | None:
        """None where either has fewer than three values."""
        if min(len(early), len(late)) < 3:
            return None
        before, after = sum(early) / len(early), sum(late) / len(late)
        # Not statistics.variance: its exact fractions take fifty times as long, and this is called a few times a step.
        errors = [
            sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)
            for values, mean in ((early, before), (late, after))
        ]
        return MeanChange(before, after, math.sqrt(sum(errors)))

    @property
    def size(self) -> float:
        return self.after - self.before

    @property
    def is_clear(self) -> bool:
        return abs(self.size) > CERTAIN * self.error


def is_number(value: Any) -> TypeGuard[float]:
    """True if an event log's value is a finite number: it may hold null, and by damage anything."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _mapping(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def known(steps: Sequence[Metrics], name: str) -> list[float]:
    """The metric's values in these steps, where it was measured."""
    return [step[name] for step in steps if name in step]


def label_of(reward: str) -> str:
    """What a reward function is called in the window: the label of a shipped one, else its name."""
    return next((entry.label for entry in builtin_rewards() if entry.name == reward), reward)
