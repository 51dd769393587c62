"""Rules over the metrics of the last steps that find what goes wrong in a run, with advice: one function per rule.

A rule takes the metrics of steps, newest last, and returns a Finding or None. To add one, write it below.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Steps = Sequence[Mapping[str, Any]]

WINDOW = 10
"""Steps over which most rules average; with fewer they find nothing."""
LONG = 60
"""Steps that the rule about the trend needs; the trainer keeps this many."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`code` stays the same as long as a rule keeps finding the same, so that it is reported once."""

    code: str
    sentence: str
    advice: str
    level: str = "warning"


Rule = Callable[[Steps], "Finding | None"]
RULES: list[Rule] = []


def _rule(rule: Rule) -> Rule:
    RULES.append(rule)
    return rule


def findings(steps: Steps) -> list[Finding]:
    """The findings of all rules on these steps."""
    return [finding for rule in RULES if (finding := rule(steps)) is not None]


def _mean(steps: Steps, name: str, count: int = WINDOW) -> float | None:
    """Mean of a metric over the last `count` steps; None with fewer steps, or where it was never measured."""
    values = [step.get(name) for step in steps[-count:]]
    known = [float(value) for value in values if value is not None]
    return statistics.fmean(known) if len(values) >= count and known else None


@_rule
def cut_off(steps: Steps) -> Finding | None:
    share = _mean(steps, "hit_max_tokens_ratio")
    if share is None or share <= 0.3:
        return None
    return Finding(
        "cut_off",
        f"{share:.0%} of the completions of the last {WINDOW} steps ran into the length limit.",
        "Raise Completion, or strengthen a reward for the right form.",
    )


@_rule
def no_signal(steps: Steps) -> Finding | None:
    share = _mean(steps, "frac_reward_zero_std")
    if share is None or share < 0.95:
        return None
    return Finding(
        "no_signal",
        f"In the last {WINDOW} steps nearly every group got the same reward throughout, so there is nothing to learn from.",
        "Take a larger group, a higher temperature, rewards with partial credit, or other prompts; or stop, if the reward is full.",
    )


@_rule
def drifting(steps: Steps) -> Finding | None:
    kl = _mean(steps, "kl")
    if kl is None or kl <= 0.5:
        return None
    return Finding(
        "drifting",
        f"The KL from the reference is {kl:.2g} nats a token.",
        "Lower the learning rate, or raise the KL weight.",
    )


@_rule
def moving_fast(steps: Steps) -> Finding | None:
    clipped = _mean(steps, "clip_ratio_total")
    if clipped is None or clipped <= 0.2:
        return None
    return Finding(
        "moving_fast",
        f"{clipped:.0%} of the tokens are clipped: the policy moves faster than its completions allow.",
        "Lower the learning rate, widen epsilon, or make fewer updates per rollout.",
    )


@_rule
def sampler_differs(steps: Steps) -> Finding | None:
    """Measured before top-p, top-k and min-p, so filters do not count: only the rounding of the type that the model computes in."""
    gap = _mean(steps, "sampling/logp_gap/mean")
    if gap is None or gap <= 0.05:
        return None
    return Finding(
        "sampler_differs",
        f"Sampling and learning differ by {gap:.2g} nats a token in the log-probability of the same token: the model's numbers "
        f"are too coarse.",
        "Set Precision to float16 or float32, and leave Sampling correction on Automatic.",
    )


@_rule
def never_scores(steps: Steps) -> Finding | None:
    """Reward functions that gave 0 to every completion."""
    if len(steps) < WINDOW:
        return None
    names = [key for key in steps[-1] if key.startswith("rewards/") and key.endswith("/mean")]
    silent = [name.split("/")[1] for name in names if not any(step.get(name) for step in steps)]
    if not silent:
        return None
    return Finding(
        f"never_scores {' '.join(silent)}",
        f"{', '.join(silent)} gave 0 to every completion of the last {len(steps)} steps.",
        "Read some completions: the model may never write what the function looks for, or a column may be the wrong one.",
    )


@_rule
def flat(steps: Steps) -> Finding | None:
    """No trend in the reward: the means of its older and newer half differ by less than their standard error."""
    rewards = [float(step["reward"]) for step in steps[-LONG:] if step.get("reward") is not None]
    if len(rewards) < LONG:
        return None
    half = LONG // 2
    early, late = rewards[:half], rewards[half:]
    error = (statistics.variance(early) / half + statistics.variance(late) / half) ** 0.5
    share = _mean(steps, "frac_reward_zero_std")
    if abs(statistics.fmean(late) - statistics.fmean(early)) > error or (share or 0) > 0.5:
        return None  # it moves; or most groups have no signal, which another rule reports
    return Finding(
        "flat",
        f"The reward has not moved in {LONG} steps.",
        "Score some completions by hand first: rewards may be too harsh or the prompts too hard. Then a higher learning rate.",
    )
