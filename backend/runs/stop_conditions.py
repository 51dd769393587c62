"""Conditions that end a run: `stop_when: ["kl > 0.8", "reward >= 2.5"]`, and which metrics they may name.

A condition compares the mean of the last `WINDOW` steps, so that a single noisy step ends nothing. A metric with `eval/` before it is
that of the newest evaluation on held-out prompts, which is a mean already. The comparison with a run's metrics is
`backend.trainer.steering`'s.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backend.runs.metric_names import EVALUATION, known_metrics, our_name
from backend.utils.text import quote

WINDOW = 5
"""Steps whose mean is compared."""

COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip
_CONDITION = re.compile(r"^\s*([^\s<>=]+)\s*(>=|<=|>|<)\s*(\S+)\s*$")


@dataclass(frozen=True, slots=True)
class StopCondition:
    """`metric` `sign` `limit`, such as kl > 0.8."""

    metric: str
    sign: str
    limit: float

    def is_met(self, value: float) -> bool:
        """False for NaN, as every comparison with it."""
        return COMPARISONS[self.sign](value, self.limit)

    def __str__(self) -> str:
        return f"{self.metric} {self.sign} {self.limit:g}"


def parse_condition(text: str) -> StopCondition:
    """Raises ValueError with a sentence for text that is no condition."""
    match = _CONDITION.match(text)
    try:
        limit = float(match[3]) if match else float("nan")
    except ValueError:
        limit = float("nan")
    if match is None or not abs(limit) < float("inf"):
        raise ValueError(f"“{quote(text)}” is not a condition; write a metric, a sign and a number, such as kl > 0.8.")
    return StopCondition(match[1], match[2], limit)


def with_our_name(text: str) -> str:
    """A condition with its metric under the name that it has here; text that is none as it is."""
    match = _CONDITION.match(text)
    if match is None or our_name(match[1]) == match[1]:
        return text
    return f"{our_name(match[1])} {match[2]} {match[3]}"


def condition_fault(text: str, rewards: Sequence[str], may_log_metrics: bool, sets: Sequence[str] = ()) -> str:
    """Why a condition cannot be used, or "". `rewards`: the run's reward functions as the settings name them; `sets`: its named
    evaluation sets, whose metrics are eval/<name>/….

    `may_log_metrics`: reward functions of the user's own may log any metric, so that a name is only refused if it is nearly a known one.
    """
    try:
        condition = parse_condition(text)
    except ValueError as error:
        return str(error)
    return metric_fault(condition.metric, rewards, may_log_metrics, sets)


def metric_fault(metric: str, rewards: Sequence[str], may_log_metrics: bool, sets: Sequence[str] = ()) -> str:
    """Why there is no such metric, or ""; arguments as of `condition_fault`."""
    known = known_metrics(rewards)
    bare = metric.removeprefix(EVALUATION)
    of_set, _, rest = bare.partition("/")
    if bare != metric and of_set in sets and rest in known:
        return ""
    near = difflib.get_close_matches(bare, known, n=1, cutoff=0.6)
    if bare in known or (may_log_metrics and not near):
        return ""
    prefix = EVALUATION if metric != bare else ""
    return f"There is no metric {quote(metric, 60)}." + (f" Did you mean {prefix}{near[0]}?" if near else "")
