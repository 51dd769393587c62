"""A policy too large for one machine: each rank of a group has a part of every layer, and all of them compute every pass together.

mlx-lm's `model.shard(group)` deals the layers out, and its layers sum over the ranks inside the forward pass. So every rank has to run
the same passes in the same order, from loading on. Weights are read an array at a time and only this rank's part is kept.

Settings that only one machine can do are refused by `backend.config.checks`, architectures by `backend.models.sharded_architectures`, and
sizes that do not divide by the number of ranks here (`check_divides`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from backend.config.setting_groups import ModelSettings
from backend.engine import device
from backend.engine.cpu import compiler
from backend.engine.sharding import adapters
from backend.engine.sharding.adapters import Adapters, Sum
from backend.engine.sharding.tensor import LayerShare, Unshardable, read_weights, shard
from backend.engine.shared_weights import copy_sharing_arrays
from backend.models.adapters import attach_adapters
from backend.models.loading import check_runs, loading, open_model
from backend.models.policy import Policy, cast, check_can_learn, check_computes, frozen, quantized_as
from backend.models.tokenizers import run_tokenizer, with_end_tokens
from backend.utils.errors import UserError
from backend.utils.text import quote

SETTING = "parallelism"


class ShardedPolicy(Policy):
    """This rank's part of a policy. `masters` are the whole adapters, on every rank alike, in float32."""

    is_sharded = True

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        model_config: dict[str, Any],
        reference: nn.Module | None,
        whole: Any,
        adapted_keys: list[str],
        adapters: Adapters,
        group: mx.distributed.Group,
        add_up: Sum | None = None,
    ) -> None:
        self.adapters, self.group, self._add_up = adapters, group, add_up or self._sum_over_group
        super().__init__(model, tokenizer, model_config, reference, masters=whole, adapted_keys=adapted_keys)

    def set_parameters(self, parameters: Any) -> None:
        self.masters = parameters
        self.model.update(self.adapters.parts(parameters))
        # By the thread that has made them: mlx ties graphs to threads, and the next one may be another.
        mx.eval(self.arrays())

    def gather_gradient(self, gradient: Any) -> Any:
        return self.adapters.gather_gradient(gradient, self._add_up)

    def broadcast_from_rank0(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """The first rank's values of these arrays of 32 bits and one shape: exact, since bits are added to zeros."""
        bits = mx.stack([array.view(mx.int32) for array in arrays])
        # A product, not zeros of their own: those would depend on nothing, and this sum would begin before those of the forward pass.
        bits = mx.distributed.all_sum(bits * int(self.group.rank() == 0), group=self.group)
        return [bits[i].view(array.dtype) for i, array in enumerate(arrays)]

    def _sum_over_group(self, vector: mx.array) -> mx.array:
        # Evaluated before it is sent, so that no GPU waits for a rank that is still computing (mlx#4475).
        mx.eval(vector)
        total = mx.distributed.all_sum(vector, group=self.group, stream=mx.cpu)
        mx.eval(total)
        return total


def load_sharded_policy(
    config: ModelSettings,
    group: mx.distributed.Group,
    note: Callable[[str], None] = lambda sentence: None,
    add_up: Sum | None = None,
) -> ShardedPolicy:
    """As `load_policy`, this rank's part. Every rank of `group` must call it, having met at a barrier before: the trial passes in it are
    computed together. `add_up`: the sum of gradients over the ranks, where it is not a plain one over the group.

    Raises UserError, on every rank alike, for a model that cannot be dealt out to so many.
    """
    device.use(config.device)
    if sentence := compiler.prepare():
        note(sentence)
    model, tokenizer, model_config = open_model(config.model, "model")
    tokenizer = run_tokenizer(config.tokenizer, tokenizer, model)
    if config.tokenizer:
        model_config = with_end_tokens(model_config, tokenizer)
    model, model_config = quantized_as(model, model_config, config)
    cast(model, config.dtype)
    # The adapters of the whole model, whose weights are not read for that: the same arrays as on one machine, from the same seed.
    adapted = copy_sharing_arrays(model)
    keys = attach_adapters(adapted, config, note)
    shares = _sharded(model, config, group)
    reference = frozen(copy_sharing_arrays(model)) if config.needs_reference else None
    of_group = _adapted(model, adapted, shares, config, group)
    arrays: Any = tree_flatten(adapted.trainable_parameters())
    whole = tree_unflatten(arrays)  # without the empty parts of layers that `model` has another class of
    model.update(of_group.parts(whole))
    del adapted  # it holds the arrays of whole layers
    with loading(config.model, "model"):
        read_weights(model)
        mx.eval(reference.parameters() if reference else [], whole)
    check_runs(model, config.model, "model")
    check_computes(model, config)
    check_can_learn(model, config.model)
    return ShardedPolicy(model, tokenizer, model_config, reference, whole, keys, of_group, group, add_up)


def check_divides(model: nn.Module, config: ModelSettings, size: int) -> None:
    """Raise the UserError that `load_sharded_policy` would raise for so many ranks, as far as it shows without the weights of `model`, which
    may be left unread; it is of no use afterwards."""
    group: Any = AbsentGroup(size)
    adapted = copy_sharing_arrays(model)
    attach_adapters(adapted, config)
    _adapted(model, adapted, _sharded(model, config, group), config, group)


class AbsentGroup:
    """The first rank of a group of this size, without the others: to see whether a model divides. Nothing can be computed with it."""

    def __init__(self, size: int) -> None:
        self._size = size

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size


def _sharded(model: nn.Module, config: ModelSettings, group: mx.distributed.Group) -> dict[str, LayerShare]:
    try:
        return shard(model, group)
    except Unshardable as reason:
        raise _mistake(config, group, reason) from reason


def _adapted(
    model: nn.Module,
    adapted: nn.Module,
    shares: dict[str, LayerShare],
    config: ModelSettings,
    group: mx.distributed.Group,
) -> Adapters:
    try:
        return adapters.install(model, adapted, shares, group.rank(), group.size())
    except Unshardable as reason:
        raise _mistake(config, group, reason) from reason


def _mistake(config: ModelSettings, group: mx.distributed.Group, reason: Unshardable) -> UserError:
    name = quote(Path(config.model), 50)
    return UserError(SETTING, f"The model {name} cannot be divided among {group.size()} machines: {quote(reason, 90)}.")
