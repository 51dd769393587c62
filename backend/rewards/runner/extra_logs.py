"""TRL's `log_extra` and `log_metric`: what reward functions log beside their scores, as a column of the completions or
a metric.

Bad arguments raise inside the user's own code, so that the sentence which stops the run names the line.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TRAINER_METRICS = (
    *(
        "loss",
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "frac_groups_without_signal",
        "kl",
        "entropy",
        "learning_rate",
        "grad_norm",
        "epoch",
    ),
    *("clip_ratio_low", "clip_ratio_high", "clip_ratio_total", "hit_max_tokens_ratio", "peak_memory_gb", "num_tokens"),
    *("reward_std_within_groups", "waiting_share"),
    *("rollout_tokens_per_second", "train_tokens_per_second", "grad_clipped"),
)
"""Names that reward functions may not log under, nor any that begins with one of these prefixes:"""
_TRAINER_PREFIXES = (
    "rewards/",
    "completions/",
    "time/",
    "sampling/",
    "peak_memory_gb/",
    "process/",
    "machine/",
    "ranks/",
    "eval_",
)


class ExtraLogs:
    """Columns and metrics that the functions of one step have logged so far."""

    def __init__(self) -> None:
        self._columns: dict[tuple[str, str], list[Any]] = {}
        self._metrics: dict[str, list[float]] = {}

    def loggers_for(self, function: str) -> dict[str, Callable[..., None]]:
        """`log_extra(column, values)` and `log_metric(name, value)` for one function."""

        def log_extra(column: str, values: Sequence[Any]) -> None:
            self._log_extra(function, column, values)

        def log_metric(name: str, value: float) -> None:
            self._log_metric(name, value)

        return {"log_extra": log_extra, "log_metric": log_metric}

    @property
    def columns(self) -> dict[str, list[Any]]:
        """Column → values, one for each completion once `length_error` is empty for every function."""
        return {column: values for (_, column), values in self._columns.items()}

    @property
    def metrics(self) -> dict[str, float]:
        """Metric → the mean of the values logged under its name in this step."""
        return {name: statistics.fmean(values) for name, values in self._metrics.items()}

    def length_error(self, function: str, count: int) -> str:
        """What is wrong with the columns of a function that has returned; empty if each has `count` values.

        Checked only then, because a function may call `log_extra` several times for one column.
        """
        for (name, column), values in self._columns.items():
            if name == function and len(values) != count:
                return f"logged {len(values)} values in the column {column} for {count} completions"
        return ""

    def _log_extra(self, function: str, column: str, values: Sequence[Any]) -> None:
        check_name("log_extra", column)
        owner = next((f for f, c in self._columns if c == column and f != function), None)
        if owner:
            raise ValueError(f"the column {column} was logged by {owner} already")
        if isinstance(values, str | bytes | Mapping):
            raise TypeError(f"log_extra takes a list of values, one a completion, not {type(values).__name__}")
        values = values.tolist() if hasattr(values, "tolist") else values  # pyright: ignore
        self._columns.setdefault((function, column), []).extend(_as_json(value) for value in values)

    def _log_metric(self, name: str, value: float) -> None:
        check_metric_name(name)
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"log_metric takes a finite number, and {name} is {number}")
        self._metrics.setdefault(name, []).append(number)


def check_metric_name(name: Any) -> None:
    """Raises ValueError for a name under which no metric may be logged."""
    check_name("log_metric", name)
    if name in TRAINER_METRICS or name.startswith(_TRAINER_PREFIXES):
        raise ValueError(f"{name} is a metric of the trainer; log yours under another name")


def check_name(function: str, name: Any) -> None:
    """Raises ValueError for what is no name on one line; `function` is called so in the sentence."""
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ValueError(f"{function} takes a name on one line first, not {name!r}")


def _as_json(value: Any) -> Any:
    """Numbers, text, lists and mappings as they are, NaN as None, anything else as its text."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)
