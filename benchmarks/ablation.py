"""Ablations: each technique of the engine switched off by itself, with the plain way to do the same in its place.

A switch makes a context manager that patches a function or a constant; models, rollouts and learners made and run
inside it go the plain way. Results are the same but for rounding. tests/benchmarks enters every switch of a CPU, so one
whose target has moved is noticed.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn

from backend.engine import layers
from backend.engine.chunk_sizes import MICRO_BATCH_TOKENS
from backend.engine.lm_head import TokenScores
from backend.sampling import fused_model
from backend.sampling.fused_linear import base_of, has_adapter
from backend.sampling.fused_model import FusedModel
from backend.sampling.rollout import Sampler
from backend.sampling.row_costs import ON_CPU
from backend.types import Group

Switch = Callable[[], contextlib.AbstractContextManager[Any]]
ALL_ROWS = 1 << 30  # tokens of a micro-batch that holds every row


def off(target: str, plain: Any) -> Switch:
    """A switch that puts `plain` in the place of `target`, as "module.name" in `backend`."""
    return partial(mock.patch, f"backend.{target}", plain)


def plain_log_softmax(
    project: Any, head: Any, hidden: Any, target: Any, *, temperature: float, entropy_gradient: bool = False, **_: Any
) -> TokenScores:
    logp_NV = nn.log_softmax(project(hidden).astype(mx.float32) / temperature, axis=-1)
    logp_N = mx.take_along_axis(logp_NV, target[:, None], axis=-1)[:, 0]
    entropy_N = -(mx.exp(logp_NV) * logp_NV).sum(axis=-1)
    return TokenScores(logp_N, entropy_N if entropy_gradient else mx.stop_gradient(entropy_N))


_sample, _fusion = Sampler.sample, fused_model._fusion


def sample_in_groups_of_one(
    self: Sampler, problems: Sequence[Any], group_size: int, *args: Any, **kwargs: Any
) -> list[Group]:
    repeated = [replace(problem) for problem in problems for _ in range(group_size)]
    completions = [group.completions[0] for group in _sample(self, repeated, 1, *args, **kwargs)]
    return [Group(problem, completions[i * group_size : (i + 1) * group_size]) for i, problem in enumerate(problems)]


def folding(members: list[nn.Module], merge: bool) -> Any:
    is_float = isinstance(base_of(members[0]), nn.Linear)
    return "merge" if merge and is_float and any(map(has_adapter, members)) else _fusion(members, merge)


def unmerged(*parts: Any, **how: Any) -> FusedModel:
    return FusedModel(*parts, **(how | {"merge": False}))


@contextlib.contextmanager
def products_in_one_piece() -> Iterator[None]:
    with off("engine.cpu.MAX_ROWS", 0)(), off("engine.cpu.STORED_WIDTH", ALL_ROWS)():
        yield


@contextlib.contextmanager
def freed_buffers() -> Iterator[None]:
    with (
        mock.patch("backend.sampling.rollout.release_cached_buffers", mx.clear_cache),
        mock.patch("benchmarks.our_contenders.release_cached_buffers", mx.clear_cache),
    ):
        yield


@contextlib.contextmanager
def mlx_lm_adapters() -> Iterator[None]:
    with (
        mock.patch.object(layers, "METHODS", ()),  # or a policy made inside would install them again
        mock.patch("mlx_lm.tuner.lora.LoRALinear.__call__", layers.MLX_LM_LORA),
    ):
        yield


SWITCHES: dict[str, Switch] = {
    # Sampling decodes one group after the other, as for models whose rows cannot be of unequal length.
    "groups decoded together": off("sampling.rollout.Sampler._trial_decode", lambda rollout: "switched off"),
    # Sampling prefills a prompt once for each of its completions.
    "one prefill a prompt": off("sampling.rollout.Sampler.sample", sample_in_groups_of_one),
    # Decoding runs the policy's own layers: one product for each projection, two more for each adapter.
    "packed and merged layers": off("sampling.fused_model.fusable_linears", lambda model, merge: []),
    # Layers that share an input are packed into one product, but adapters stay products of their own.
    "merged adapters": off("sampling.rollout.FusedModel", unmerged),
    # Decoding steps run the model's own blocks: every norm, rotation and cache write by itself.
    "fused blocks": off("sampling.fused_model.FusedModel._replace_blocks", lambda fused: ""),
    # Rows that have ended stay in the batch until the last row ends.
    "compaction": off("sampling.row_costs.RowCosts.compacted", lambda costs, rows, needed: max(needed, rows)),
    # Every operation of a decoding step is launched by itself.
    "compiled decoding": partial(mock.patch.object, mx, "compile", lambda function, *_, **__: function),
    # Sampled tokens are read after every step.
    "late reading": off("sampling.scheduler.DECODE_CHUNK", 1),
    # exp is mlx's, one number at a time on x86: in softmax, attention and sampling.
    "exp in vectors": off("engine.cpu.exp_is_scalar", lambda: False),
    # swiglu, and the attention of a decoding step, are mlx-lm's.
    "gated unit in vectors": off("engine.patches.exp_is_scalar", lambda: False),
    # A product of few rows goes to the BLAS in one piece.
    "sliced products": products_in_one_piece,
    # Attention by mlx's autodiff, which keeps the softmax [tokens, tokens] of every layer.
    "attention in blocks": off("engine.patches._training_inputs", lambda *_: None),
    # Training reads a prompt once for each of its completions.
    "prompt sharing": off("engine.model_probe._prefix_layers", lambda model, split_model: 0),
    # Training prefills a prompt in each micro-batch that has rows of it.
    "prompts read once for all micro-batches": off(
        "training.shared_prefix.SharedPrefix.pays", staticmethod(lambda *_: False)
    ),
    # Training takes all rows of a batch through the model together.
    "small micro-batches": partial(mock.patch.dict, MICRO_BATCH_TOKENS, {False: ALL_ROWS, True: ALL_ROWS}),
    # Log-probabilities by autodiff of log-softmax over the whole vocabulary, all tokens in one pass.
    "fused head": off("engine.forward.token_logps", plain_log_softmax),
    # The old log-probabilities come from a forward pass of their own, though one update follows a rollout.
    "no old-policy pass": off("training.grpo.Grpo._needs_old_pass", lambda algorithm: True),
}
"""Technique → its switch, with what happens while it is off. The names are keys of docs/performance.json."""

GPU_SWITCHES: dict[str, Switch] = {
    # Top-k sorts the whole vocabulary for every token.
    "filters without a sort": off("sampling.sampler.largest", lambda values_BV, k: mx.sort(values_BV, axis=-1)[:, -k:]),
    # A decoding step is submitted when the one before it has ended.
    "steps queued ahead": off("sampling.scheduler.on_cpu", lambda: True),
    # Fused blocks are computed by mlx's kernels alone.
    "kernels of our own": off("sampling.fused_model.FusedModel.use_kernels", lambda fused, on: None),
    # Adapters are added to the weights for a rollout, and rounded to their 16 bits.
    "adapters beside the weights": off("sampling.fused_model._fusion", folding),
    # The product x A of adapters is split over its long axis and added up in a second kernel.
    "transposed A": off("sampling.fused_linear.on_gpu", lambda: False),
    # A step writes its column of the KV cache by a slice update, whose offset another kernel computes.
    "one kernel a cache write": off("engine.caches.on_gpu", lambda: False),
    # All rows are decoded together, whatever tiles a GPU multiplies in.
    "full tiles of rows": off("sampling.rollout.row_costs", lambda *_: ON_CPU),
    # Freed buffers are given back to the system after sampling, and before learning.
    "buffers kept": freed_buffers,
    # The learner computes adapters as mlx-lm does, in float32, and the sampler in 16 bits.
    "adapters rounded alike": mlx_lm_adapters,
    # The loss takes the sampler's tokens for the policy's own: no importance ratio.
    "importance correction": off("training.grpo.correction_mode", lambda config, dtype: ("none", "")),
    # The gradients of gathers add with atomics, in no fixed order.
    "gathers in order": off("engine.layers.on_gpu", lambda: False),
}
"""The techniques that matter on a GPU or in 16 bits; on a CPU most of these change nothing."""
