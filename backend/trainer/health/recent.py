"""A run as the health rules see it: its settings, the metrics of its first and newest steps, its newest evaluations."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from backend.config.config import SETTINGS
from backend.rewards.catalogue import builtin_rewards
from backend.runs.events import is_number
from backend.runs.metric_names import measure_of

Metrics = Mapping[str, float]  # a step's finite metrics

WINDOW = 10  # steps over which most rules average; with fewer they find nothing
LONG = 60  # newest steps that are kept, for the rules about a trend
EVALUATIONS = 8  # newest evaluations that are kept

SOLVED_SPREAD = 0.5  # of rewards over their mean, below which nearly all succeed: 80 %, for rewards of 0 and 1
LOWEST_RATE = 1e-6  # a proposed learning rate is never below
LIKELY, CERTAIN = 2.0, 4.0  # standard errors by which two means differ in all likelihood; a finding from the second


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The held-out reward (or negative loss) after a step, and the mean training reward of WINDOW steps before it."""

    step: int
    reward: float
    training: float | None


class Recent:
    """`first`: metrics of the run's first WINDOW steps; `steps`: of the LONG newest; `step`: the number of the newest;
    `not_numbers`: names of its metrics that are null; `changed`: settings changed on the way."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = dict(settings)
        self.first: list[Metrics] = []
        self.steps: deque[Metrics] = deque(maxlen=LONG)
        self.evaluations: deque[HeldOut] = deque(maxlen=EVALUATIONS)
        self.first_evaluation: HeldOut | None = None
        self.step = 0
        self.not_numbers: Set[str] = set()
        self.changed: set[str] = set()

    def take(self, event: Mapping[str, Any]) -> None:
        kind, metrics, changed = event.get("kind"), event.get("metrics"), event.get("settings")
        if kind == "step" and isinstance(metrics, dict) and metrics and "warmup/loss" not in metrics:
            step = event.get("step")
            self.step = step if isinstance(step, int) else self.step + 1
            finite = {name: float(value) for name, value in metrics.items() if is_number(value)}
            self.not_numbers = metrics.keys() - finite.keys()
            if len(self.first) < WINDOW:
                self.first.append(finite)
            self.steps.append(finite)
        elif kind == "eval" and isinstance(metrics, dict) and event.get("split") != "test":
            measure = measure_of(metrics)
            if is_number(value := metrics.get(measure)):
                reward = value if measure == "reward" else -value
                self.evaluations.append(HeldOut(self.step, reward, self.mean("reward")))
                self.first_evaluation = self.first_evaluation or self.evaluations[0]
        elif kind == "change" and isinstance(changed, dict):
            self._settings |= {key: pair[-1] for key, pair in changed.items() if isinstance(pair, list) and pair}
            self.changed |= changed.keys()

    def setting(self, key: str) -> Any:
        return self._settings.get(key, SETTINGS[key].default)

    def slower(self, factor: float) -> dict[str, float]:
        return {"learning_rate": float(f"{self.setting('learning_rate') * factor:.2g}")}

    def faster(self, factor: float) -> dict[str, float]:
        return {"learning_rate": max(LOWEST_RATE, *self.slower(factor).values())}

    def values(self, name: str, count: int = WINDOW) -> list[float]:
        """The metric in the last `count` steps where it was measured; [] while there are fewer steps."""
        return known([*self.steps][-count:], name) if len(self.steps) >= count else []

    def mean(self, name: str, count: int = WINDOW) -> float | None:
        return _mean(self.values(name, count))

    def mean_at_first(self, name: str) -> float | None:
        return _mean(known(self.first, name))

    def median(self, name: str, count: int = WINDOW) -> float | None:
        values = self.values(name, count)
        return statistics.median(values) if values else None

    def rewards(self) -> list[str]:
        names = [*self.steps[-1], *sorted(self.not_numbers)]
        return [name.split("/")[1] for name in names if name.startswith("rewards/") and name.endswith("/mean")]

    @property
    def has_improved(self) -> bool:
        """True if the mean reward of the newest steps is clearly above that of the run's first."""
        change = MeanChange.between(known(self.first, "reward"), self.values("reward"))
        return change is not None and change.size > LIKELY * change.error

    @property
    def has_converged(self) -> bool:
        """True if the reward has risen, and nearly all completions get about the same."""
        reward, spread = self.mean("reward"), self.mean("reward_std")
        if reward is None or spread is None or not self.has_improved:
            return False
        return spread <= SOLVED_SPREAD * abs(reward)


@dataclass(frozen=True, slots=True)
class MeanChange:
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


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def known(steps: Sequence[Metrics] | deque[Metrics], name: str) -> list[float]:
    return [step[name] for step in steps if name in step]


def label_of(reward: str) -> str:
    return next((entry.label for entry in builtin_rewards() if entry.name == reward), reward)
