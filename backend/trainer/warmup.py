"""The supervised warm-up: the first steps of a run, in which a learner of their own imitates answers. GRPO learns
nothing while no completion of a group earns a reward; a few supervised steps change that (marin#8876: start it by
pass@G, not by loss)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from backend.config.config import Config
from backend.config.updates import OWN
from backend.types import Group

MEASURED_EVERY = 10
"""Steps between two measurements of the pass rate, where each needs a rollout; the first is that of step 1."""
PASS_RATE = "warmup/pass_rate"
METRICS = {name: f"warmup/{name}" for name in ("loss", "entropy", "learning_rate")}
"""Metric of a learner → its name in the steps of a warm-up."""


def warmup_settings(config: Config) -> Config:
    """The settings of the warm-up's learner: a constant rate, and AdamW in place of a program's optimizer."""
    rate = config.warmup_learning_rate or config.learning_rate
    own = {"optimizer": "adamw"} if config.optimizer == OWN else {}
    schedule = {"learning_rate": rate, "lr_schedule": "constant", "lr_warmup_ratio": None}
    return config.model_copy(update={"train_mode": "sft", **schedule, **own})


def pass_rate(groups: Sequence[Group], config: Config) -> float:
    """pass@G: the share of groups with a solved completion."""
    least = config.success_reward_threshold
    solved = [any(c.reward is not None and c.reward >= least for c in group.completions) for group in groups]
    return sum(solved) / len(solved)


def keep_best(groups: Sequence[Group]) -> None:
    """Rejection sampling: a group's best completion, if above its mean, has the advantage 1, all others 0."""
    for group in groups:
        rewards = [-math.inf if completion.reward is None else completion.reward for completion in group.completions]
        known = [reward for reward in rewards if reward > -math.inf]
        is_above, best = max(known, default=0.0) > min(known, default=0.0), rewards.index(max(rewards))
        for place, completion in enumerate(group.completions):
            completion.advantage = float(is_above and place == best)


def reason_of_end(step: int, config: Config, metrics: Mapping[str, float]) -> str:
    """Why the warm-up ends with this step, in words that follow “ended after step 40”; "" while it lasts."""
    rate = metrics.get(PASS_RATE)
    if rate is not None and 0 < config.warmup_pass_rate <= rate:
        goal = f"and its goal was {config.warmup_pass_rate:.0%}"
        return f": one of {config.group_size} completions solves {rate:.0%} of the prompts, {goal}"
    return ", its last" if step >= config.warmup_steps else ""
