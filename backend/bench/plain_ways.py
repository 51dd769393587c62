"""How to do without what the engine does for GPUs and for 16 bits: each function is a context in which the plain way is taken.

As in `backend.bench.ablation`: names of our modules are patched, so models, rollouts and learners must be made inside. On a CPU most
of them change nothing, because it takes the plain way by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

Off = contextlib.AbstractContextManager[Any]


# ── sampling ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def sorted_vocabulary() -> Off:
    """Top-k sorts the whole vocabulary for every token."""
    import mlx.core as mx

    from backend.sampling import sampler

    return mock.patch.object(sampler, "largest", lambda values_BV, k: mx.sort(values_BV, axis=-1)[:, -k:])


def wait_for_every_token() -> Off:
    """A decoding step is submitted when the one before it has ended."""
    from backend.sampling import scheduler

    return mock.patch.object(scheduler, "on_cpu", lambda: True)


def blocks_of_the_model() -> Off:
    """Decoding steps run the model's own blocks: norms, rotations and two cache writes as kernels of their own."""
    from backend.sampling.fused_model import FusedModel

    return mock.patch.object(FusedModel, "_replace_blocks", lambda fused: "")


def no_kernels_of_our_own() -> Off:
    """Fused blocks are computed by mlx's kernels alone."""
    from backend.sampling.fused_model import FusedModel

    return mock.patch.object(FusedModel, "use_kernels", lambda fused, on: None)


def untransposed_a() -> Off:
    """The product x A of adapters is split over its long axis and added up in a second kernel."""
    from backend.sampling import fused_linear

    return mock.patch.object(fused_linear, "on_gpu", lambda: False)


def sliced_cache_write() -> Off:
    """A step writes its column of the KV cache by a slice update, whose offset another kernel computes."""
    from backend.engine import slot_cache

    return mock.patch.object(slot_cache, "on_gpu", lambda: False)


def any_row_count() -> Off:
    """All rows are decoded together, whatever tiles a GPU multiplies in."""
    from backend.sampling import rollout
    from backend.sampling.row_costs import ON_CPU

    return mock.patch.object(rollout, "row_costs", lambda *_: ON_CPU)


@contextlib.contextmanager
def freed_buffers() -> Iterator[None]:
    """Freed buffers are given back to the system after sampling, and before learning."""
    import mlx.core as mx

    from backend.bench import workload
    from backend.sampling import rollout

    with (
        mock.patch.object(rollout, "release_cached_buffers", mx.clear_cache),
        mock.patch.object(workload, "release_cached_buffers", mx.clear_cache),
    ):
        yield


# ── 16 bits ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def folded_adapters() -> Off:
    """Adapters are added to the weights for a rollout, and rounded to their 16 bits."""
    import mlx.nn as nn

    from backend.sampling import fused_model
    from backend.sampling.fused_linear import base_of, has_adapter

    fusion = fused_model._fusion

    def folding(members: list[nn.Module], merge: bool) -> Any:
        is_float = isinstance(base_of(members[0]), nn.Linear)
        return "merge" if merge and is_float and any(map(has_adapter, members)) else fusion(members, merge)

    return mock.patch.object(fused_model, "_fusion", folding)


@contextlib.contextmanager
def mlx_lm_adapters() -> Iterator[None]:
    """The learner computes adapters as mlx-lm does, in float32, and the sampler in 16 bits."""
    from mlx_lm.tuner.lora import LoRALinear

    from backend.engine import adapter_product

    with (
        mock.patch.object(adapter_product, "METHODS", ()),  # or a policy made inside would install them again
        mock.patch.object(LoRALinear, "__call__", adapter_product.MLX_LM_LORA),
    ):
        yield


def no_correction() -> Off:
    """The loss takes the sampler's tokens for the policy's own: no importance ratio."""
    from backend.training import grpo

    return mock.patch.object(grpo, "correction_mode", lambda config, dtype: ("none", ""))


# ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def atomic_gathers() -> Off:
    """The gradients of gathers add with atomics, in no fixed order."""
    from backend.engine import gathers

    return mock.patch.object(gathers, "on_gpu", lambda: False)
