"""What reward functions log beside their scores: a column of the completions table, a metric of the step.

The two functions that TRL passes as `log_extra` and `log_metric`. They raise inside the person's own code, so that the
sentence which stops the run names its line.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

OURS = (
    *("loss", "reward", "reward_std", "frac_reward_zero_std", "kl", "entropy", "learning_rate", "grad_norm", "epoch"),
    *("clip_ratio_low", "clip_ratio_high", "clip_ratio_total", "hit_max_tokens_ratio", "peak_memory_gb", "num_tokens"),
    *("rollout_tokens_per_second", "train_tokens_per_second"),
)
"""Metrics of the trainer, which no reward function may take for its own."""
_OUR_FAMILIES = ("rewards/", "completions/", "time/", "sampling/", "peak_memory_gb/", "eval_")


class Logs:
    """What the functions of one step have logged."""

    def __init__(self) -> None:
        self._columns: dict[tuple[str, str], list[Any]] = {}
        self._metrics: dict[str, list[float]] = {}

    def offered_to(self, function: str) -> dict[str, Callable[..., None]]:
        """`log_extra(column, values)` and `log_metric(name, value)` for one function."""

        def log_extra(column: str, values: Sequence[Any]) -> None:
            self._extra(function, column, values)

        def log_metric(name: str, value: float) -> None:
            self._metric(name, value)

        return {"log_extra": log_extra, "log_metric": log_metric}

    @property
    def columns(self) -> dict[str, list[Any]]:
        """Column → values, one a completion where `uneven` has nothing to say of it."""
        return {column: values for (_, column), values in self._columns.items()}

    @property
    def metrics(self) -> dict[str, float]:
        """Metric → the mean of what was logged under its name in this step."""
        return {name: statistics.fmean(values) for name, values in self._metrics.items()}

    def uneven(self, function: str, count: int) -> str:
        """What is wrong with the columns of a function that has returned; empty if each has `count` values."""
        wrong = [(c, values) for (f, c), values in self._columns.items() if f == function and len(values) != count]
        return next((f"logged {len(v)} values in the column {c} for {count} completions" for c, v in wrong), "")

    def _extra(self, function: str, column: str, values: Sequence[Any]) -> None:
        _check_name("log_extra", column)
        other = next((f for f, c in self._columns if c == column and f != function), None)
        if other:
            raise ValueError(f"the column {column} was logged by {other} already")
        if isinstance(values, str | bytes | Mapping):
            raise TypeError(f"log_extra takes a list of values, one a completion, not {type(values).__name__}")
        values = values.tolist() if hasattr(values, "tolist") else values  # pyright: ignore
        self._columns.setdefault((function, column), []).extend(_plain(value) for value in values)

    def _metric(self, name: str, value: float) -> None:
        _check_name("log_metric", name)
        if name in OURS or name.startswith(_OUR_FAMILIES):
            raise ValueError(f"{name} is a metric of the trainer; log yours under another name")
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"log_metric takes a finite number, and {name} is {number}")
        self._metrics.setdefault(name, []).append(number)


def _check_name(function: str, name: Any) -> None:
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ValueError(f"{function} takes a name on one line first, not {name!r}")


def _plain(value: Any) -> Any:
    """A value as JSON can keep it: numbers, text, lists and mappings as they are, anything else as its text."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)
