"""The techniques that the bench switches off, one at a time, and the work on which each is measured.

To add one: a row of `SWITCHES`. `off` is a context manager; what is built and run inside it goes the plain way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from backend.bench import ablation, plain_ways


@dataclass(frozen=True, slots=True)
class Technique:
    """One technique, the way to do without it, and the workload that it matters for."""

    name: str
    off: Callable[[], contextlib.AbstractContextManager[Any]]
    work: Literal["sampling", "learning", "both"]
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
    # Sampling, the dearest first.
    Technique("filters without a sort", plain_ways.sorted_vocabulary, "sampling", group_size=32, filters=True),
    Technique("steps queued ahead", plain_ways.wait_for_every_token, "sampling"),
    Technique("fused blocks", plain_ways.blocks_of_the_model, "sampling"),
    Technique("kernels of our own", plain_ways.no_kernels_of_our_own, "sampling"),
    Technique("adapters beside the weights", plain_ways.folded_adapters, "sampling", weights="float", has_gap=True),
    Technique("packed layers", ablation.unfused_layers, "sampling"),
    Technique("transposed A", plain_ways.untransposed_a, "sampling"),
    Technique("one kernel a cache write", plain_ways.sliced_cache_write, "sampling"),
    Technique("full tiles of rows", plain_ways.any_row_count, "sampling", prompts=5),
    Technique("compiled decoding", ablation.uncompiled, "sampling"),
    Technique("late reading", ablation.read_at_once, "sampling"),
    Technique("groups decoded together", ablation.group_by_group, "sampling", prompts=4),
    Technique("one prefill a prompt", ablation.prefill_per_completion, "sampling", group_size=32),
    # Learning.
    Technique("buffers kept", plain_ways.freed_buffers, "both"),
    Technique("adapters rounded alike", plain_ways.mlx_lm_adapters, "learning", weights="float", has_gap=True),
    Technique("importance correction", plain_ways.no_correction, "learning", weights="float"),
    Technique("prompt sharing", ablation.no_prompt_sharing, "learning"),
    Technique("attention in blocks", ablation.mlx_attention, "learning"),
    Technique("fused head", ablation.plain_log_softmax, "learning"),
    Technique("small micro-batches", ablation.one_micro_batch, "learning", prompts=2),
    Technique("gathers in order", plain_ways.atomic_gathers, "learning"),
)
"""In the order in which they are measured."""


def switch_named(name: str) -> Technique:
    return next(switch for switch in SWITCHES if switch.name == name)
