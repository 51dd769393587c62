"""A policy sharded over several machines with mlx-lm's `model.shard(group)`. Layers sum over ranks in the forward pass,
so all ranks must run the same passes in the same order."""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from backend.config.setting import ModelSettings
from backend.engine import cpu
from backend.engine.images import PromptImages
from backend.engine.sharding import Adapters, CannotShardError, Sum, install_adapters, shard
from backend.engine.shared_weights import copy_sharing_arrays
from backend.models.adapters import attach_adapters
from backend.models.architectures import model_type, module_of
from backend.models.loading import check_runs, loading
from backend.models.policy import Policy, cast, check_can_learn, check_computes, open_configured
from backend.types import Problem
from backend.utils.errors import UserError
from backend.utils.text import quote


@dataclass(eq=False, repr=False, kw_only=True)
class ShardedPolicy(Policy):
    """This rank's part of a policy. `masters`: whole float32 adapters, equal on all ranks. `add_up`: of gradients."""

    adapters: Adapters
    group: mx.distributed.Group
    add_up: Sum

    is_sharded: ClassVar[bool] = True

    def images_of(self, problems: Iterable[Problem]) -> list[PromptImages | None]:
        if any(problem.images for problem in problems):
            raise UserError("model", "A model that several machines share cannot read pictures; run it on one.")
        return [None for _ in problems]

    def set_parameters(self, parameters: Any) -> None:
        self.masters = parameters
        self.model.update(self.adapters.parts(parameters))
        # By the thread that has made them: mlx ties graphs to threads, and the next one may be another.
        mx.eval(self.arrays())

    def gather_gradient(self, gradient: Any) -> Any:
        return self.adapters.gather_gradient(gradient, self.add_up)

    def broadcast_from_rank0(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """Rank 0's values of 32-bit arrays of one shape; exact, since bits are added to zeros."""
        bits = mx.stack([array.view(mx.int32) for array in arrays])
        # A product, not zeros: those depend on nothing, and this sum would begin before those of the forward pass.
        bits = mx.distributed.all_sum(bits * int(self.group.rank() == 0), group=self.group)
        return [bits[i].view(array.dtype) for i, array in enumerate(arrays)]


def load_sharded_policy(
    config: ModelSettings, group: mx.distributed.Group, add_up: Sum, note: Callable[[str], None] = lambda sentence: None
) -> ShardedPolicy:
    """This rank's part of `load_policy`; all ranks of `group` call it together, after a barrier. `add_up`: of
    gradients. Raises UserError on every rank if the model cannot be sharded."""
    model, tokenizer, model_config = open_configured(config)
    if sentence := cpu.check_compiler():
        note(sentence)
    cast(model, config.dtype)
    # The whole model's adapters, for which no weights are read: the same arrays as on one machine, from the same seed.
    adapted = copy_sharing_arrays(model)
    keys = attach_adapters(adapted, config, note)
    with _refusals(config, group.size()):
        shares = shard(model, group)
        reference = copy_sharing_arrays(model).freeze().eval() if config.needs_reference else None
        of_group = install_adapters(model, adapted, shares, group.rank(), group.size())
    arrays: Any = tree_flatten(adapted.trainable_parameters())
    whole = tree_unflatten(arrays)  # without the empty parts of layers that `model` has another class of
    model.update(of_group.parts(whole))
    del adapted  # it holds the arrays of whole layers
    with loading(config.model, "model"):
        for _, array in tree_flatten(model.parameters()):
            mx.eval(array)  # one at a time, so that one at most is whole in memory
        mx.eval(reference.parameters() if reference else [], whole)
    check_runs(model, config.model, "model")
    check_computes(model, config)
    check_can_learn(model, config.model)
    return ShardedPolicy(
        model, tokenizer, model_config, reference, {}, whole, keys, adapters=of_group, group=group, add_up=add_up
    )


def check_divides(model: nn.Module, config: ModelSettings, size: int) -> None:
    """Raise `load_sharded_policy`'s UserError without the weights of `model`, which is unusable afterwards."""
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: size)  # without other ranks, so that it cannot compute
    adapted = copy_sharing_arrays(model)
    attach_adapters(adapted, config)
    with _refusals(config, size):
        install_adapters(model, adapted, shard(model, group), 0, size)


@contextmanager
def _refusals(config: ModelSettings, size: int) -> Iterator[None]:
    try:
        yield
    except CannotShardError as error:
        name = quote(Path(config.model), 50)
        sentence = f"The model {name} cannot be divided among {size} machines: {quote(error, 90)}."
        raise UserError("parallelism", sentence) from error


WITHOUT_GRADIENT = {  # architectures whose sharded gradient is wrong → reason, as part of a message
    "deepseek_v2": "of its rotated keys each machine's gradient stays its own",
    "longcat_flash": "the gradient of its experts that compute nothing is summed over machines once too often",
    "longcat_flash_ngram": "the gradient of its experts that compute nothing is summed over machines once too often",
    "minimax": "of the norms across its heads each machine's gradient stays its own",
}


def sharding_refusal(config: Mapping[str, Any]) -> str:
    """Reason why this model cannot be trained sharded, or ""."""
    kind, module = quote(model_type(config), 40), module_of(config)
    try:
        can_divide = hasattr(importlib.import_module(f"mlx_lm.models.{module}").Model, "shard")
    except SystemExit:  # a package that its code needs is not installed
        can_divide = False
    if not can_divide:
        advice = "each machine needs all of it: choose Prompts"
        return f"mlx-lm has no code that divides a model of the kind {kind}; {advice}."
    if reason := WITHOUT_GRADIENT.get(module):
        return f"A model of the kind {kind} cannot be trained divided by mlx-lm's code: {reason}."
    return ""
