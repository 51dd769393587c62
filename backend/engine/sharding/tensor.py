"""Tensor parallelism by mlx-lm's own `model.shard(group)`, watched: which layer was dealt out, and how, is what adapters need to know.

`shard` works on a model whose weights are not read yet. Its layers then read an array, keep this rank's part and let go of the rest, so
that a rank never holds more than its share and one whole array (`read_weights`).
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers import distributed
from mlx.utils import tree_flatten

from backend.engine import patches
from backend.engine.sharding.sharded_lora import LinearBeforeHeads

# How an array is dealt out to the ranks of a group, as mlx's sharded layers deal out their weights.

Segments = int | tuple[int, ...] | tuple[float, ...]
"""mlx's `segments`: a number of equal ones, or the edges between them, as indices or as shares of the axis."""


@dataclass(frozen=True, slots=True)
class Division:
    """The `axis` that is dealt out, counted from the front, and its segments."""

    axis: int
    segments: Segments = 1

    def along(self, axis: int) -> Division:
        """The same segments along another axis, of an array that belongs to the same outputs or inputs."""
        return replace(self, axis=axis)

    def part(self, whole: mx.array, rank: int, size: int) -> mx.array:
        """What `rank` of `size` has of an array. Raises ValueError where a segment cannot be divided evenly."""
        segments = mx.split(whole, self._edges(whole.shape[self.axis]), axis=self.axis)
        return mx.contiguous(
            mx.concatenate([mx.split(x, size, axis=self.axis)[rank] for x in segments], axis=self.axis)
        )

    def placed(self, part: mx.array, rank: int, size: int) -> mx.array:
        """An array of the whole one's shape, zero but for this rank's part: those of all ranks add up to the whole."""
        length = part.shape[self.axis]
        edges = [edge // size for edge in self._edges(length * size)]
        segments: list[mx.array] = []
        for x in mx.split(part, edges, axis=self.axis):
            width = [(0, 0)] * x.ndim
            width[self.axis] = (rank * x.shape[self.axis], (size - 1 - rank) * x.shape[self.axis])
            segments.append(mx.pad(x, width))
        return mx.concatenate(segments, axis=self.axis)

    def _edges(self, length: int) -> list[int]:
        """Where the segments of an axis of this length meet."""
        if isinstance(self.segments, int):
            return list(itertools.accumulate([length // self.segments] * (self.segments - 1)))
        return [int(edge * length) if isinstance(edge, float) else edge for edge in self.segments]


def segments_of(given: int | Sequence[int] | Sequence[float]) -> Segments:
    """mlx's argument as a value of `Segments`."""
    return given if isinstance(given, int) else tuple(given)  # pyright: ignore[reportReturnType]: of one kind


# ── tensor ───────────────────────────────────────────────────────────────────────────────────────────────────────────

COLUMNS, ROWS = "all-to-sharded", "sharded-to-all"
"""mlx's names: a rank has some of the outputs, or some of the inputs."""


class Unshardable(Exception):
    """The model cannot be dealt out to this group; the message is the reason, as part of a sentence."""


@dataclass(frozen=True, slots=True)
class LayerShare:
    """How a layer was dealt out: `kind` is COLUMNS or ROWS."""

    kind: str
    segments: Segments


def shard(model: nn.Module, group: mx.distributed.Group) -> dict[str, LayerShare]:
    """Deal the model out to the group, in place. → for each layer that was dealt out, by its name, how. Raises Unshardable, and leaves
    a model that is of no use."""
    of_model = getattr(model, "shard", None)
    if of_model is None:
        raise Unshardable("mlx-lm has no code that divides it")
    counts = _whole_numbers(model)
    with _recording() as shares:
        try:
            of_model(group)
        except (ValueError, AssertionError, ZeroDivisionError) as error:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise Unshardable(f"its layers do not divide by {group.size()} ({line})") from error
    _check_counts(model, counts, group.size())
    _sum_latent_gradients(model, group)
    return {name: shares[id(module)] for name, module in model.named_modules() if id(module) in shares}


def read_weights(model: nn.Module) -> None:
    """Evaluate the model's arrays one at a time, so that no more than one of them is whole in memory."""
    for _, array in tree_flatten(model.parameters()):
        mx.eval(array)


def weight_division(weight: mx.array, share: LayerShare) -> Division:
    """How this weight of a layer was dealt out: [out, in], or [experts, out, in]."""
    return Division(max(weight.ndim - 2, 0) if share.kind == COLUMNS else weight.ndim - 1, share.segments)


LATENT = "kv_a_proj_with_mqa"
"""The layer of multi-head latent attention (arXiv:2405.04434) whose output, keys and values of all heads, every rank computes."""


def _sum_latent_gradients(model: nn.Module, group: mx.distributed.Group) -> None:
    """Make the layers before the heads of latent attention sum their gradient, where nothing behind them does."""
    for module in model.modules():
        # `kv_b_proj`, which some models have instead of `embed_q`, is one of mlx's layers that sum the gradient in their input.
        if LATENT in module and "embed_q" in module:
            module[LATENT] = LinearBeforeHeads(module[LATENT], group)


# ── what was dealt out ───────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _recording() -> Iterator[dict[int, LayerShare]]:
    """Inside, calls of `shard_linear` and `shard_inplace` by mlx-lm's models are noted, under the id of the layer that results."""
    shares: dict[int, LayerShare] = {}
    replaced: list[patches.Replacement] = []

    def linear(module: nn.Module, sharding: str, *, segments: Any = 1, group: Any = None) -> nn.Module:
        result = distributed.shard_linear(module, sharding, segments=segments, group=group)
        shares[id(result)] = LayerShare(sharding, segments_of(segments))
        return result

    def in_place(module: nn.Module, sharding: Any, *, segments: Any = 1, group: Any = None) -> None:
        distributed.shard_inplace(module, sharding, segments=segments, group=group)
        if isinstance(
            sharding, str
        ):  # else a function of the array's name: of layers that take no adapter, such as convolutions
            shares.update((id(part), LayerShare(sharding, segments_of(segments))) for part in module.modules())

    ours: tuple[tuple[str, Callable[..., Any]], ...] = (("shard_linear", linear), ("shard_inplace", in_place))
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models."):
            replaced += [
                patches.replace(module, attribute, own) for attribute, own in ours if hasattr(module, attribute)
            ]
    try:
        yield shares
    finally:
        for replacement in reversed(replaced):
            patches.restore(replacement)


def _whole_numbers(model: nn.Module) -> dict[str, dict[str, int]]:
    """The plain numbers that each module keeps, such as its count of heads."""
    return {
        name: {key: value for key, value in vars(module).items() if type(value) is int}
        for name, module in model.named_modules()
    }


def _check_counts(model: nn.Module, before: dict[str, dict[str, int]], size: int) -> None:
    """Raise Unshardable where a count was divided by the ranks with a remainder: models' code does it with `//=`, and a layer with other
    heads would compute other numbers without an error."""
    for name, after in _whole_numbers(model).items():
        for key, value in after.items():
            was = before.get(name, {}).get(key, value)
            if value != was and value == was // size and was % size:
                raise Unshardable(f"its {key} of {was} does not divide by {size}")
