"""The techniques that the bench switches off, one at a time, and the work on which each is measured.

To add one: a row of `SWITCHES`. `off` is a context manager; what is built and run inside it goes the plain way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from backend.bench import ablation


@dataclass(frozen=True, slots=True)
class Technique:
    """One technique, the way to do without it, and the workload that it matters for."""

    name: str
    off: Callable[[], contextlib.AbstractContextManager[Any]]
    work: Literal["sampling", "learning"]
    weights: Literal["4-bit", "float"] = "4-bit"
    prompts: int = 1
    group_size: int = 8
    filters: bool = False
    has_gap: bool = False
    """Whether it changes the gap between sampler and learner, which is then measured too."""

    @property
    def meaning(self) -> str:
        """What is done instead: the first line of `off`'s docstring."""
        return (self.off.__doc__ or "").strip().splitlines()[0]


SWITCHES = (
    Technique("compiled decoding", ablation.uncompiled, "sampling"),
    Technique("packed layers", ablation.unfused_layers, "sampling"),
    Technique("late reading", ablation.read_at_once, "sampling"),
    Technique("prompt sharing", ablation.no_prompt_sharing, "learning"),
    Technique("merged adapters", ablation.unmerged_adapters, "sampling", weights="float", has_gap=True),
    Technique("groups decoded together", ablation.group_by_group, "sampling", prompts=4),
    Technique("one prefill a prompt", ablation.prefill_per_completion, "sampling", group_size=32),
    Technique("attention in blocks", ablation.mlx_attention, "learning"),
    Technique("fused head", ablation.plain_log_softmax, "learning"),
    Technique("small micro-batches", ablation.one_micro_batch, "learning", prompts=2),
)
"""In the order of their weight: the first are measured first."""


def switch_named(name: str) -> Technique:
    return next(switch for switch in SWITCHES if switch.name == name)
