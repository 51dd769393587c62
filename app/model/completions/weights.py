"""The weights behind the totals of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from app.model.completions.facts import listed_completions, scores_of

if TYPE_CHECKING:
    from app.model.runs.run import Run


def weights_at(run: Run, step: int, rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """The weight of each of `run.reward_names` at a step, in that order. Empty where they are not known: what the settings or the
    diary say must make up the total of every completion in `rows`."""
    names = run.reward_names
    candidates = (_from_diary(run, names, step), _from_settings(run, names))
    return next((weights for weights in candidates if weights and _explains(names, weights, rows)), [])


def _from_diary(run: Run, names: Sequence[str], step: int) -> list[float]:
    """The metrics that a run with varying weights writes at every step."""
    weights = []
    for name in names:
        steps, values = run.series(f"reward_weights/{name}")
        at = int(np.searchsorted(steps, step))
        if at == len(steps) or steps[at] != step:
            return []
        weights.append(float(values[at]))
    return weights


def _from_settings(run: Run, names: Sequence[str]) -> list[float]:
    listed = run.config.get("reward_weights") or [1.0] * len(names)
    are_numbers = isinstance(listed, list) and all(isinstance(x, (int, float)) for x in listed)
    return [float(x) for x in listed] if are_numbers and len(listed) == len(names) else []


def _explains(names: Sequence[str], weights: Sequence[float], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether Σ weight · score is the reward of every completion, as far as it has one."""
    for completion in (completion for row in rows for completion in listed_completions(row)):
        scores, reward = scores_of(completion), completion.get("reward")
        known = [(weight, scores.get(name)) for name, weight in zip(names, weights, strict=True)]
        total = sum(weight * score for weight, score in known if isinstance(score, (int, float)))
        if isinstance(reward, (int, float)) and abs(total - reward) > 1e-6 * max(1.0, abs(reward)):
            return False
    return True
