"""Shipped reward functions that judge how long a completion is, in tokens, the end-of-sequence token and, as in TRL,
the results of tools included. The default of a length limit is the run's `max_completion_length`. They never read the
text, and return None where the sampled tokens are not known, as for texts scored from a file."""

from __future__ import annotations

import math
import sys
from typing import Any

from backend.rewards.functions.formats import known_ids
from backend.rewards.functions.math_equality import correct
from backend.rewards.registry import Ids, Scores, Texts, Types, register_reward_function, require

CACHE_SHARE = 0.2  # DAPO's ratio: a buffer of 4096 tokens before a limit of 20480 (arXiv:2503.14476)


@register_reward_function("soft_overlong_punishment_reward", label="Soft Overlong")
def soft_overlong_punishment_reward(
    prompts: Texts,
    completions: Texts,
    answer: Texts,
    types: Types = None,
    *,
    completion_ids: Ids = None,
    trainer_state: Any = None,
    max_completion_length: int | None = None,
    cache: int | None = None,
) -> Scores:
    """0.0 up to `cache` tokens below the limit, then falling evenly to -1.0 at the limit and beyond. Equation 13 of
    DAPO (arXiv:2503.14476), as TRL's function of this name. `max_completion_length` is the limit, `cache` a fifth of it
    where it is not given. 0 for an empty completion, -1 for any huge one."""
    limit = _limit(max_completion_length, trainer_state, completions)
    buffer = round(CACHE_SHARE * limit) if cache is None else cache
    require(0 <= buffer <= limit, f"cache must be from 0 to max_completion_length ({limit}), not {buffer}")
    lengths = [None if ids is None else len(ids) for ids in known_ids(completions, completion_ids)]
    past = [None if length is None else length - (limit - buffer) for length in lengths]
    return [None if over is None else 0.0 if over <= 0 else -1.0 if over > buffer else -over / buffer for over in past]


@register_reward_function("cosine_scaled_reward", label="Cosine Length")
def cosine_scaled_reward(
    prompts: Texts,
    completions: Texts,
    answer: Texts,
    types: Types = None,
    *,
    completion_ids: Ids = None,
    trainer_state: Any = None,
    max_completion_length: int | None = None,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Scores:
    """Right answers from 1.0 for the shortest down to 0.5 at the limit, wrong ones from -1.0 up to -0.5, along a
    cosine. The cosine reward of arXiv:2502.03373, as Open R1 has it, with length in tokens. `accuracy_reward` judges
    what is right; None where the dataset has no answer."""
    limit = _limit(max_completion_length, trainer_state, completions)
    require(min_value_wrong <= max_value_wrong, "min_value_wrong must not be above max_value_wrong")
    require(min_value_correct <= max_value_correct, "min_value_correct must not be above max_value_correct")
    scores: list[float | None] = []
    for ids, right in zip(known_ids(completions, completion_ids), correct(completions, answer), strict=True):
        shortest, longest = (max_value_correct, min_value_correct) if right else (min_value_wrong, max_value_wrong)
        share = min(len(ids or ()) / limit, 1.0)
        score = longest + 0.5 * (shortest - longest) * (1.0 + math.cos(math.pi * share))
        scores.append(None if ids is None or right is None else score)
    return scores


@register_reward_function("length_target", label="Length Target")
def length_target(
    prompts: Texts,
    completions: Texts,
    answer: Texts,
    types: Types = None,
    *,
    completion_ids: Ids = None,
    target: int = 200,
) -> Scores:
    """1.0 at `target` tokens, falling evenly to 0.0 at none and at twice as many. 0 for an empty completion and for a
    huge one."""
    require(target >= 1, f"target must be at least 1, not {target}")
    known = known_ids(completions, completion_ids)
    return [None if ids is None else max(0.0, 1.0 - abs(len(ids) - target) / target) for ids in known]


def _limit(limit: int | None, trainer_state: Any, completions: list[str]) -> int:
    require(limit is None or limit >= 1, f"max_completion_length must be at least 1, not {limit}")
    limit = limit or getattr(trainer_state, "max_completion_length", None)
    require(bool(limit) or not completions, "it needs a max_completion_length")
    return limit or sys.maxsize
