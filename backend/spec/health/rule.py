"""The form of a rule: its threshold with the reason for it, and the function that looks at a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from backend.spec.health.finding import Finding
from backend.spec.health.recent import WINDOW, Recent

Level = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Threshold:
    """A limit, in words that follow “when”, and where the number comes from."""

    value: float
    means: str
    source: str


@dataclass(frozen=True, slots=True)
class Sign:
    """What a rule saw. `value` and `limit` (where it is not the threshold itself) are in the metric's unit.

    `about` tells findings of one rule apart: the reward functions it is about. `advice` replaces the rule's.
    """

    value: float | None
    sentence: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    about: tuple[str, ...] = ()
    limit: float | None = None
    metric: str = ""
    advice: str = ""


Look = Callable[[Recent, float], Sign | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """`look(recent, threshold)` returns what it saw, or None. `metric` is the one behind it and `chart` the title of the chart that
    shows it; `setting` the one to look at first."""

    code: str
    title: str
    chart: str
    metric: str
    threshold: Threshold
    advice: str
    look: Look
    setting: str = ""
    level: Level = "warning"
    needs: int = WINDOW
    """Steps before it can find anything."""

    def find(self, recent: Recent) -> Finding | None:
        """What the rule finds at the newest step."""
        sign = self.look(recent, self.threshold.value)
        if sign is None:
            return None
        return Finding(
            " ".join((self.code, *sign.about)),
            sign.sentence,
            sign.advice or self.advice,
            self.level,
            sign.metric or self.metric,
            sign.value,
            self.threshold.value if sign.limit is None else sign.limit,
            dict(sign.settings),
        )
