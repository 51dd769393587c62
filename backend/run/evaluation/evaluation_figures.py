"""From the completions of an evaluation to its figures: means with intervals by side, paired differences, rows.

Knows no model: what comes in are the completions of each prompt, scored.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backend.run.evaluation.estimates import Column, estimates, pass_at_k
from backend.spec.completion_rows import CompletionRow
from backend.spec.evaluation import (
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
    return [_row(i, problem, results) for i, problem in enumerate(problems)]


def _row(i: int, problem: Problem, results: Results) -> EvaluatedRow:
    row = EvaluatedRow(
        index=problem.index, prompt=problem.prompt, answer=problem.answer, type=problem.type, greedy=None, sampled=None
    )
    for decoding, sides in results.items():
        row[decoding] = RowSides(**{side: made.by_prompt[i] for side, made in sides.items()})
    return row
