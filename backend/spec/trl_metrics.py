"""Names of metrics in TRL: what trackers and tables outside of this program call ours, so that runs of both lie on one chart.

The diary and the window keep our names. A metric that is not listed has the same name in both, or TRL has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TRL_NAMES = {
    "time/step": "step_time",
    "clip_ratio_total": "clip_ratio/region_mean",
    "clip_ratio_low": "clip_ratio/low_mean",
    "clip_ratio_high": "clip_ratio/high_mean",
    "hit_max_tokens_ratio": "completions/clipped_ratio",
}
"""Our name → TRL's, as `GRPOTrainer` logs it."""

SPREAD = "reward_std", "reward_std_within_groups"
"""Our standard deviations of the reward: over the step, and the mean of the groups' own. TRL has one name for both, and which it means
depends on `scale_rewards`."""
OVER_THE_STEP = "reward_std_over_step"


def trl_metrics(metrics: Mapping[str, Any], scale_rewards: str) -> dict[str, Any]:
    """`metrics` under TRL's names. Its `reward_std` is the mean within groups, but with `scale_rewards: batch` that over the step; the
    other one keeps a name of ours."""
    renamed = dict(TRL_NAMES)
    over_step, within = SPREAD
    if scale_rewards != "batch" and within in metrics:
        renamed |= {within: over_step, over_step: OVER_THE_STEP}
    return {renamed.get(name, name): value for name, value in metrics.items()}


def prefixed(split: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics with the prefix that transformers gives them for trackers: train/ for the split "train", eval/ for "valid", test/ for "test",
    and eval/NAME_ for an evaluation set of its own name."""
    prefix = {"train": "train/", "valid": "eval/", "test": "test/"}.get(split, f"eval/{split}_")
    return {prefix + name: value for name, value in metrics.items()}
