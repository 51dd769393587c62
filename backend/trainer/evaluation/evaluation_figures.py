"""From the completions of an evaluation to its figures: means with intervals by side, paired differences, rows.

Knows no model: what comes in are the completions of each prompt, scored.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from backend.runs.completion_rows import CompletionRow
from backend.trainer.evaluation.evaluation_rows import (
    CONFIDENCE,
    TOTAL,
    DecodingName,
    EvaluatedRow,
    Figures,
    MeanWithInterval,
    PassRule,
    RowSides,
    SideName,
    SideResult,
    change_of,
    mean_reward,
)
from backend.types import Problem

# What an evaluation's figures are worth: bootstrap intervals over prompts, and pass@k. Plain numpy; knows no model
# and no file.

RESAMPLES = 10_000
RESAMPLES_AT_ONCE = 256
BOOTSTRAP_SEED = 0x626F6F74
"""The same resamples at every evaluation ("boot" in ASCII): the same completions give the same intervals."""

ROUNDING = 1e-9
"""Sums of floats in another order differ by less."""


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of every prompt, in the prompts' order; NaN where a prompt has none.

    `low` and `high` are the ends of the range that the figure can have, or that was seen where its range is not known.
    """

    values: np.ndarray
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float | None], low: float, high: float) -> Column:
        return cls(np.array([np.nan if value is None else value for value in values], np.float64), low, high)

    @classmethod
    def difference(cls, after: Column, before: Column) -> Column:
        """after − before, prompt by prompt.

        Its range reaches as far as the largest change that was seen, to both sides; where nothing changed, as far as it could have.
        The whole range in any case would drown small changes of rewards that differ much between prompts.
        """
        values = after.values - before.values
        largest = float(np.nanmax(np.abs(values), initial=0.0))
        reach = largest if largest > ROUNDING else max(after.high, before.high) - min(after.low, before.low)
        return cls(values, -reach, reach)


def estimates(
    columns: Sequence[Column], resamples: int = RESAMPLES, rng: np.random.Generator | None = None
) -> list[MeanWithInterval]:
    """The mean of each column over its prompts, with its interval. All columns are resampled together.

    A column without any number has no mean. One whose range is a single value has no interval: nothing varied, so nothing is known of
    how much could.
    """
    if not columns:
        return []
    values_PM = np.stack([column.values for column in columns], axis=1)
    ends = np.array([[column.low for column in columns], [column.high for column in columns]])
    means_RM = _resampled_means(np.concatenate([values_PM, ends]), resamples, rng)
    tail = (1 - CONFIDENCE) / 2
    low_M, high_M = np.quantile(means_RM, [tail, 1 - tail], axis=0)
    return [
        _estimate(column, float(low), float(high)) for column, low, high in zip(columns, low_M, high_M, strict=True)
    ]


def _estimate(column: Column, low: float, high: float) -> MeanWithInterval:
    known = column.values[~np.isnan(column.values)]
    if not known.size:
        return MeanWithInterval()
    value = float(known.mean())
    if not column.high > column.low:
        return MeanWithInterval(value=value)
    # The two added prompts pull the interval towards the middle of the range, at the end of the range past the mean itself.
    return MeanWithInterval(value=value, low=min(low, value), high=max(high, value))


def _resampled_means(values_PM: np.ndarray, resamples: int, rng: np.random.Generator | None) -> np.ndarray:
    """Means [resamples, M] of P prompts drawn with replacement from the rows of [P, M], NaN left out."""
    rng = rng or np.random.default_rng(BOOTSTRAP_SEED)
    prompts = len(values_PM)
    is_known_PM = (~np.isnan(values_PM)).astype(np.float64)
    known_PM = np.nan_to_num(values_PM)
    means: list[np.ndarray] = []
    for start in range(0, resamples, RESAMPLES_AT_ONCE):
        count = min(RESAMPLES_AT_ONCE, resamples - start)
        drawn_RP = rng.integers(0, prompts, (count, prompts), dtype=np.int32)
        # How often each prompt was drawn: the means are then one product, whatever the number of columns.
        offset_R1 = np.arange(count, dtype=np.int64)[:, None] * prompts
        times_RP = np.bincount((drawn_RP + offset_R1).ravel(), minlength=count * prompts).reshape(count, prompts)
        times_RP = times_RP.astype(np.float64)
        # A resample may draw no prompt that has a figure; the ends of the range always have one.
        means.append((times_RP @ known_PM) / np.maximum(times_RP @ is_known_PM, 1))
    return np.concatenate(means)


def pass_at_k(completions: int, passed: int, k: int) -> float:
    """The chance that at least one of k completions passes, unbiased, from `passed` of `completions` that did.

    1 − C(n − c, k) / C(n, k), as a product that cannot overflow (Chen et al. 2021, arXiv:2107.03374, section 2.1). Raises ValueError
    for a k that is not within 1 … n.
    """
    if not 1 <= k <= completions:
        raise ValueError(f"k must be within 1 and {completions}, not {k}")
    if completions - passed < k:
        return 1.0
    failing = np.arange(completions - passed + 1, completions + 1)
    return float(1.0 - np.prod(1.0 - k / failing))


# ── evaluation figures ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Completions:
    """One side's completions of every prompt under one decoding, and the seconds that sampling and scoring took."""

    by_prompt: list[list[CompletionRow]]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(row["tokens"] for rows in self.by_prompt for row in rows)


Results = dict[DecodingName, dict[SideName, Completions]]

DIFFERENCE = "difference"


def decoding_figures(
    name: DecodingName,
    sides: dict[SideName, Completions],
    rows: Sequence[EvaluatedRow],
    rule: PassRule | None,
    ks: Sequence[int],
) -> dict[str, Any]:
    """The parts of a `Decoding` that come from its completions: sides, difference, and how many prompts got better or worse."""
    columns = _columns({side: completions.by_prompt for side, completions in sides.items()}, rule, ks)
    if {"base", "tuned"} <= columns.keys():
        base, tuned = columns["base"], columns["tuned"]
        columns[DIFFERENCE] = {key: Column.difference(tuned[key], base[key]) for key in base}
    keys = [(group, key) for group, of_group in columns.items() for key in of_group]
    means = dict(zip(keys, estimates([columns[group][key] for group, key in keys]), strict=True))
    figures = {group: _figures({key: means[group, key] for key in of}) for group, of in columns.items()}
    results = {
        side: SideResult(figures=figures[side], seconds=made.seconds, tokens_per_second=made.tokens / made.seconds)
        for side, made in sides.items()
    }
    return {"sides": results, "difference": figures.get(DIFFERENCE), **_changes(name, rows)}


def _columns(
    sides: dict[SideName, list[list[CompletionRow]]], rule: PassRule | None, ks: Sequence[int]
) -> dict[str, dict[str, Column]]:
    """Side → figure → its value for each prompt."""
    values = {side: _values(completions, rule, ks) for side, completions in sides.items()}
    keys = next(iter(values.values())).keys()
    ranges = {key: _range(key, [of_side[key] for of_side in values.values()]) for key in keys}
    return {side: {key: Column.of(of_side[key], *ranges[key]) for key in keys} for side, of_side in values.items()}


def _values(
    by_prompt: list[list[CompletionRow]], rule: PassRule | None, ks: Sequence[int]
) -> dict[str, list[float | None]]:
    """Figure → its value for each prompt, the mean over the prompt's completions."""
    names = list(by_prompt[0][0]["rewards"])
    values: dict[str, list[float | None]] = {
        TOTAL: [mean_reward(rows) for rows in by_prompt],
        **{f"rewards/{name}": [_mean_score(rows, name) for rows in by_prompt] for name in names},
        "tokens": [sum(row["tokens"] for row in rows) / len(rows) for rows in by_prompt],
        "cut_off": [sum(row["stop"] == "length" for row in rows) / len(rows) for rows in by_prompt],
    }
    if all(len(rows) > 1 for rows in by_prompt):
        values["spread"] = [_spread(rows) for rows in by_prompt]
        values["different"] = [len({row["text"] for row in rows}) / len(rows) for rows in by_prompt]
    if rule is not None:
        for k in ks:
            values[f"pass/{k}"] = [pass_at_k(len(rows), sum(map(rule.is_met_by, rows)), k) for rows in by_prompt]
    return values


def _range(key: str, of_sides: list[list[float | None]]) -> tuple[float, float]:
    """The range of a figure: 0 to 1 for a share, else what was seen on either side."""
    if key in ("cut_off", "different") or key.startswith("pass/"):
        return 0.0, 1.0
    seen = [value for values in of_sides for value in values if value is not None]
    return min(seen, default=0.0), max(seen, default=0.0)


def _figures(means: dict[str, MeanWithInterval]) -> Figures:
    return Figures(
        reward=means[TOTAL],
        rewards=_below("rewards/", means),
        tokens=means["tokens"],
        cut_off=means["cut_off"],
        spread=means.get("spread"),
        different=means.get("different"),
        pass_at={int(k): mean for k, mean in _below("pass/", means).items()},
    )


def _below(prefix: str, means: dict[str, MeanWithInterval]) -> dict[str, MeanWithInterval]:
    return {key.removeprefix(prefix): mean for key, mean in means.items() if key.startswith(prefix)}


def _mean_score(rows: list[CompletionRow], name: str) -> float | None:
    scores = [score for row in rows if (score := row["rewards"][name]) is not None]
    return sum(scores) / len(scores) if scores else None


def _spread(rows: list[CompletionRow]) -> float | None:
    """As `reward_std_within_groups` of a step; None where fewer than two completions have a reward."""
    rewards = [reward for row in rows if (reward := row["reward"]) is not None]
    return statistics.stdev(rewards) if len(rewards) > 1 else None


def _changes(name: DecodingName, rows: Sequence[EvaluatedRow]) -> dict[str, int]:
    changes = [change for row in rows if (change := change_of(row, name)) is not None]
    better, worse = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    return {"better": better, "worse": worse, "unchanged": len(changes) - better - worse}


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4 … up to `most`."""
    return [1 << power for power in range(most.bit_length())]


def row_results(problems: Sequence[Problem], results: Results) -> list[EvaluatedRow]:
    """Every prompt with the completions of all sides."""
    return [_row_result(i, problem, results) for i, problem in enumerate(problems)]


def _row_result(i: int, problem: Problem, results: Results) -> EvaluatedRow:
    row = EvaluatedRow(
        index=problem.index, prompt=problem.prompt, answer=problem.answer, type=problem.type, greedy=None, sampled=None
    )
    for decoding, sides in results.items():
        row[decoding] = RowSides(**{side: made.by_prompt[i] for side, made in sides.items()})
    return row
