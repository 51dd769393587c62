"""Ablations: each technique of the engine switched off by itself, with the plain way to do the same in its place.

A switch is a context manager that patches one function or constant; models, rollouts and learners made and run inside
it go the plain way. Results are the same but for rounding. tests/benchmarks enters every switch, so one whose target
has moved is noticed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

Off = contextlib.AbstractContextManager[Any]


def no_prompt_sharing() -> Off:
    """Training reads a prompt once for each of its completions."""
    from backend.engine import model_probe

    return mock.patch.object(model_probe, "_prefix_layers", lambda model, split_model: 0)


def prefill_per_micro_batch() -> Off:
    """Training prefills a prompt in each micro-batch that has rows of it."""
    from backend.training.shared_prefix import SharedPrefix

    return mock.patch.object(SharedPrefix, "pays", staticmethod(lambda *_: False))


def one_micro_batch() -> Off:
    """Training takes all rows of a batch through the model together."""
    from backend.engine import chunk_sizes

    return mock.patch.dict(chunk_sizes.MICRO_BATCH_TOKENS, {False: 1 << 30, True: 1 << 30})


def plain_log_softmax() -> Off:
    """Log-probabilities by autodiff of log-softmax over the whole vocabulary, all tokens in one pass."""
    import mlx.core as mx
    import mlx.nn as nn

    from backend.engine import forward
    from backend.engine.lm_head import TokenScores

    def token_logps(
        project: Any,
        head: Any,
        hidden: Any,
        target: Any,
        *,
        temperature: float,
        entropy_gradient: bool = False,
        **_: Any,
    ) -> TokenScores:
        logp_NV = nn.log_softmax(project(hidden).astype(mx.float32) / temperature, axis=-1)
        logp_N = mx.take_along_axis(logp_NV, target[:, None], axis=-1)[:, 0]
        entropy_N = -(mx.exp(logp_NV) * logp_NV).sum(axis=-1)
        return TokenScores(logp_N, entropy_N if entropy_gradient else mx.stop_gradient(entropy_N))

    return mock.patch.object(forward, "token_logps", token_logps)


def old_policy_pass() -> Off:
    """The old log-probabilities come from a forward pass of their own, though one update follows a rollout."""
    from backend.training.grpo import Grpo

    return mock.patch.object(Grpo, "_needs_old_pass", lambda algorithm: True)


def prefill_per_completion() -> Off:
    """Sampling prefills a prompt once for each of its completions."""
    from backend.sampling.rollout import Sampler
    from backend.types import Group

    sample = Sampler.sample

    def sample_in_groups_of_one(
        self: Sampler, problems: Sequence[Any], group_size: int, *args: Any, **kwargs: Any
    ) -> list[Group]:
        repeated = [replace(problem) for problem in problems for _ in range(group_size)]
        completions = [group.completions[0] for group in sample(self, repeated, 1, *args, **kwargs)]
        return [
            Group(problem, completions[i * group_size : (i + 1) * group_size]) for i, problem in enumerate(problems)
        ]

    return mock.patch.object(Sampler, "sample", sample_in_groups_of_one)


def group_by_group() -> Off:
    """Sampling decodes one group after the other, as for models whose rows cannot be of unequal length."""
    from backend.sampling.rollout import Sampler

    return mock.patch.object(Sampler, "_trial_decode", lambda rollout: "switched off")


def no_compaction() -> Off:
    """Rows that have ended stay in the batch until the last row ends."""
    from backend.sampling.row_costs import RowCosts

    return mock.patch.object(RowCosts, "compacted", lambda costs, rows, needed: max(needed, rows))


def unfused_layers() -> Off:
    """Decoding runs the policy's own layers: one product for each projection, two more for each adapter."""
    from backend.sampling import fused_model

    return mock.patch.object(fused_model, "fusable_linears", lambda model, merge: [])


def unmerged_adapters() -> Off:
    """Layers that share an input are packed into one product, but adapters stay products of their own."""
    from backend.sampling import rollout

    fused = rollout.FusedModel
    return mock.patch.object(rollout, "FusedModel", lambda *parts, **how: fused(*parts, **(how | {"merge": False})))


def uncompiled() -> Off:
    """Every operation of a decoding step is launched by itself."""
    import mlx.core as mx

    return mock.patch.object(mx, "compile", lambda function, *_, **__: function)


def read_at_once() -> Off:
    """Sampled tokens are read after every step."""
    from backend.sampling import scheduler

    return mock.patch.object(scheduler, "DECODE_CHUNK", 1)


def mlx_exp() -> Off:
    """exp is mlx's, one number at a time on x86: in softmax, attention and sampling."""
    from backend.engine import cpu

    return mock.patch.object(cpu, "exp_is_scalar", lambda: False)


def mlx_lm_swiglu() -> Off:
    """swiglu, and the attention of a decoding step, are mlx-lm's."""
    from backend.engine import patches

    return mock.patch.object(patches, "exp_is_scalar", lambda: False)


def unsliced_products() -> Off:
    """A product of few rows goes to the BLAS in one piece."""
    from backend.engine import cpu

    return mock.patch.object(cpu, "MAX_ROWS", 0)


def unpinned_threads() -> Off:
    """Python's thread and mlx's run on whichever cores the system chooses."""
    from backend.engine import cpu

    return mock.patch.object(cpu, "_mlx_threads", list)


def mlx_attention() -> Off:
    """Attention by mlx's autodiff, which keeps the softmax [tokens, tokens] of every layer."""
    from backend.engine import patches

    return mock.patch.object(patches, "_training_inputs", lambda *_: None)


# For GPUs and for 16 bits; on a CPU most of these change nothing, because it takes the plain way by itself.


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
    from backend.engine import caches

    return mock.patch.object(caches, "on_gpu", lambda: False)


def any_row_count() -> Off:
    """All rows are decoded together, whatever tiles a GPU multiplies in."""
    from backend.sampling import rollout
    from backend.sampling.row_costs import ON_CPU

    return mock.patch.object(rollout, "row_costs", lambda *_: ON_CPU)


@contextlib.contextmanager
def freed_buffers() -> Iterator[None]:
    """Freed buffers are given back to the system after sampling, and before learning."""
    import mlx.core as mx

    from backend.sampling import rollout
    from benchmarks import our_contenders

    with (
        mock.patch.object(rollout, "release_cached_buffers", mx.clear_cache),
        mock.patch.object(our_contenders, "release_cached_buffers", mx.clear_cache),
    ):
        yield


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

    from backend.engine import layers

    with (
        mock.patch.object(layers, "METHODS", ()),  # or a policy made inside would install them again
        mock.patch.object(LoRALinear, "__call__", layers.MLX_LM_LORA),
    ):
        yield


def no_correction() -> Off:
    """The loss takes the sampler's tokens for the policy's own: no importance ratio."""
    from backend.training import grpo

    return mock.patch.object(grpo, "correction_mode", lambda config, dtype: ("none", ""))


def atomic_gathers() -> Off:
    """The gradients of gathers add with atomics, in no fixed order."""
    from backend.engine import layers

    return mock.patch.object(layers, "on_gpu", lambda: False)


SWITCHES: dict[str, Callable[[], Off]] = {
    "groups decoded together": group_by_group,
    "one prefill a prompt": prefill_per_completion,
    "packed and merged layers": unfused_layers,
    "merged adapters": unmerged_adapters,
    "compaction": no_compaction,
    "compiled decoding": uncompiled,
    "late reading": read_at_once,
    "exp in vectors": mlx_exp,
    "gated unit in vectors": mlx_lm_swiglu,
    "sliced products": unsliced_products,
    "both threads on one core": unpinned_threads,
    "attention in blocks": mlx_attention,
    "prompt sharing": no_prompt_sharing,
    "prompts read once for all micro-batches": prefill_per_micro_batch,
    "small micro-batches": one_micro_batch,
    "fused head": plain_log_softmax,
    "no old-policy pass": old_policy_pass,
}
"""Technique → its switch. The names are keys of docs/performance.json."""

GPU_SWITCHES: dict[str, Callable[[], Off]] = {
    "filters without a sort": sorted_vocabulary,
    "steps queued ahead": wait_for_every_token,
    "fused blocks": blocks_of_the_model,
    "kernels of our own": no_kernels_of_our_own,
    "adapters beside the weights": folded_adapters,
    "transposed A": untransposed_a,
    "one kernel a cache write": sliced_cache_write,
    "full tiles of rows": any_row_count,
    "buffers kept": freed_buffers,
    "adapters rounded alike": mlx_lm_adapters,
    "importance correction": no_correction,
    "gathers in order": atomic_gathers,
}
"""The techniques that matter on a GPU or in 16 bits: `python -m benchmarks ablation` measures them where there is
one."""
