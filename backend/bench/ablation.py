"""Each technique of the engine switched off by itself, to see its share: the plain way to do the same, put in its place.

A switch is a context manager; what is made and run inside it goes the plain way. Results are the same but for rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

Off = contextlib.AbstractContextManager[Any]


def prompts_apart() -> Off:
    """Learning reads a prompt for each of its completions."""
    from backend.engine import forward

    return mock.patch.object(forward, "_shared_layers", lambda model, split_model: 0)


def read_again() -> Off:
    """Learning reads a prompt once in each micro-batch."""
    from backend.training.shared_prefix import SharedPrefix

    return mock.patch.object(SharedPrefix, "pays", staticmethod(lambda *_: False))


def one_micro_batch() -> Off:
    """Learning takes all rows of a batch through the model together."""
    from backend.spec.memory import chunking

    return mock.patch.dict(chunking.MICRO_BATCH_TOKENS, {False: 1 << 30, True: 1 << 30})


def plain_head() -> Off:
    """Log-probabilities as the formula has them: a log-softmax of all tokens over the whole vocabulary, differentiated."""
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


def old_pass() -> Off:
    """The old log-probabilities come from a forward pass of their own, though one update follows a rollout."""
    from backend.training.learner import Learner

    return mock.patch.object(Learner, "_needs_old_pass", lambda learner: True)


def prefill_apart() -> Off:
    """Sampling reads a prompt for each of its completions."""
    from backend.generation.rollout import Rollout
    from backend.types import Group

    sample = Rollout.sample

    def apart(self: Rollout, problems: Sequence[Any], group_size: int, *how: Any, **more: Any) -> list[Group]:
        everyone = [replace(problem) for problem in problems for _ in range(group_size)]
        alone = sample(self, everyone, 1, *how, **more)
        ones = [group.completions[0] for group in alone]
        return [Group(problem, ones[i * group_size : (i + 1) * group_size]) for i, problem in enumerate(problems)]

    return mock.patch.object(Rollout, "sample", apart)


def group_by_group() -> Off:
    """Sampling decodes one group after the other, as for models whose rows cannot be of unequal length."""
    from backend.generation.rollout import Rollout

    return mock.patch.object(Rollout, "_batching_obstacle", lambda rollout: "switched off")


def together_to_the_end() -> Off:
    """Rows that have ended are decoded on until the last row ends."""
    from backend.generation.scheduler import Scheduler

    return mock.patch.object(Scheduler, "_batch_size", lambda scheduler, needed: max(needed, len(scheduler.rows)))


def layer_by_layer() -> Off:
    """Decoding runs the policy's own layers, each projection and each adapter by itself."""
    from backend.generation import fused_model

    return mock.patch.object(fused_model, "fusable_linears", lambda model, merge: [])


def adapters_beside() -> Off:
    """Layers with one input are packed, and their adapters ride along as products of their own."""
    from backend.generation import rollout

    fused = rollout.FusedModel
    return mock.patch.object(rollout, "FusedModel", lambda *parts, **how: fused(*parts, **(how | {"merge": False})))


def uncompiled() -> Off:
    """Every operation of a decoding step is launched by itself."""
    import mlx.core as mx

    return mock.patch.object(mx, "compile", lambda function, *_, **__: function)


def read_at_once() -> Off:
    """Sampled tokens are read after every step."""
    from backend.generation import scheduler

    return mock.patch.object(scheduler, "DECODE_CHUNK", 1)


def library_exp() -> Off:
    """exp as mlx works it out, one number at a time on this processor: in softmax, attention and sampling."""
    from backend.engine.cpu import vector_exp

    return mock.patch.object(vector_exp, "spelled_out", lambda: False)


def library_gate() -> Off:
    """The gated unit, and the attention of a decoding step, as mlx-lm has them."""
    from backend.engine import patches

    return mock.patch.object(patches, "spelled_out", lambda: False)


def whole_products() -> Off:
    """A product of few rows goes to the BLAS as it is."""
    from backend.engine.cpu import small_matmul

    return mock.patch.object(small_matmul, "MOST_ROWS", 0)


def any_core() -> Off:
    """Python's thread and mlx's run on whichever core the system puts them."""
    from backend.engine.cpu import affinity

    return mock.patch.object(affinity, "_threads", list)


def library_attention() -> Off:
    """Attention as mlx differentiates it: the shares of all pairs of tokens kept, of all layers."""
    from backend.engine import patches

    return mock.patch.object(patches, "_seen", lambda *_: None)


SWITCHES: dict[str, Callable[[], Off]] = {
    "groups decoded together": group_by_group,
    "one prefill a prompt": prefill_apart,
    "packed and merged layers": layer_by_layer,
    "merged adapters": adapters_beside,
    "compaction": together_to_the_end,
    "compiled decoding": uncompiled,
    "late reading": read_at_once,
    "exp in vectors": library_exp,
    "gated unit in vectors": library_gate,
    "sliced products": whole_products,
    "both threads on one core": any_core,
    "attention in blocks": library_attention,
    "prompt sharing": prompts_apart,
    "prompts read once for all micro-batches": read_again,
    "small micro-batches": one_micro_batch,
    "fused head": plain_head,
    "no old-policy pass": old_pass,
}
"""Technique → how it is switched off."""
