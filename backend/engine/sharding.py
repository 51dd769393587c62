"""One model over several machines (tensor parallelism): each rank has a part of every layer and of its LoRA
adapters.

    columns   a rank has some of the outputs:  y_r = x W_rᵀ + s · (x A) B_r             A whole, B sharded
    rows      a rank has some of the inputs:   y   = Σ_r (x_r W_rᵀ + s · (x_r A_r) B)   A sharded, B whole

mlx-lm's `model.shard(group)` shards the layers of a model whose weights are not read yet, and each call is recorded.
Adapters add no collective to the forward pass. The optimizer has the whole adapters on every rank, so checkpoints
are the same as on one machine.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers import distributed
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

from backend.engine import patches
from backend.engine.layers import add_adapter

ROW_LAYERS = (distributed.ShardedToAllLinear, distributed.QuantizedShardedToAllLinear)
COLUMN_LAYERS = (distributed.AllToShardedLinear, distributed.QuantizedAllToShardedLinear)  # mlx's sharded layers
COLUMNS, ROWS = "all-to-sharded", "sharded-to-all"  # mlx's names: a rank has some of the outputs, or of the inputs
LATENT = "kv_a_proj_with_mqa"  # multi-head latent attention (arXiv:2405.04434): every rank computes its output

Segments = int | tuple[int | float, ...]  # mlx's `segments`: a number of equal ones, or edges as indices or shares
Sum = Callable[[Sequence[mx.array]], list[mx.array]]  # adds up float32 arrays over all ranks


class CannotShardError(Exception):
    """The message is the reason, as part of a sentence."""


@dataclass(frozen=True, slots=True)
class Division:
    """How an array is sharded: `axis`, from the front, and its segments."""

    axis: int
    segments: Segments = 1

    def part(self, whole: mx.array, rank: int, size: int) -> mx.array:
        """The part of `rank`. Raises ValueError where a segment does not divide evenly."""
        segments = mx.split(whole, self._edges(whole.shape[self.axis]), axis=self.axis)
        parts = [mx.split(x, size, axis=self.axis)[rank] for x in segments]
        return mx.contiguous(mx.concatenate(parts, axis=self.axis))

    def placed(self, part: mx.array, rank: int, size: int) -> mx.array:
        """Zeros of the whole array's shape with this rank's part in place."""
        edges = [edge // size for edge in self._edges(part.shape[self.axis] * size)]
        segments: list[mx.array] = []
        for x in mx.split(part, edges, axis=self.axis):
            width = [(0, 0)] * x.ndim
            width[self.axis] = (rank * x.shape[self.axis], (size - 1 - rank) * x.shape[self.axis])
            segments.append(mx.pad(x, width))
        return mx.concatenate(segments, axis=self.axis)

    def _edges(self, length: int) -> list[int]:
        if isinstance(self.segments, int):
            return list(itertools.accumulate([length // self.segments] * (self.segments - 1)))
        return [int(edge * length) if isinstance(edge, float) else edge for edge in self.segments]


@dataclass(frozen=True, slots=True)
class LayerShare:
    """How a layer was sharded: `kind` is COLUMNS or ROWS."""

    kind: str
    segments: Segments


def shard(model: nn.Module, group: mx.distributed.Group) -> dict[str, LayerShare]:
    """Shard a model over a group in place. Returns how by layer name. Raises CannotShardError and leaves it useless."""
    of_model = getattr(model, "shard", None)
    if of_model is None:
        raise CannotShardError("mlx-lm has no code that divides it")
    counts = _whole_numbers(model)
    with _recording() as shares:
        try:
            of_model(group)
        except (ValueError, AssertionError, ZeroDivisionError) as error:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise CannotShardError(f"its layers do not divide by {group.size()} ({line})") from error
    # Models' code divides counts with `//=`, and a layer with other heads would compute other numbers without an error.
    for (name, key), value in _whole_numbers(model).items():
        was = counts.get((name, key), value)
        if value != was and value == was // group.size() and was % group.size():
            raise CannotShardError(f"its {key} of {was} does not divide by {group.size()}")
    for module in model.modules():
        # `kv_b_proj`, which some models have instead of `embed_q`, is a layer of mlx that sums its input's gradient.
        if LATENT in module and "embed_q" in module:
            module[LATENT] = LinearBeforeHeads(module[LATENT], group)
    return {name: shares[id(module)] for name, module in model.named_modules() if id(module) in shares}


@contextlib.contextmanager
def _recording() -> Iterator[dict[int, LayerShare]]:
    shares: dict[int, LayerShare] = {}

    def share(sharding: str, segments: Any) -> LayerShare:
        return LayerShare(sharding, segments if isinstance(segments, int) else tuple(segments))

    def linear(module: nn.Module, sharding: str, *, segments: Any = 1, group: Any = None) -> nn.Module:
        result = distributed.shard_linear(module, sharding, segments=segments, group=group)
        shares[id(result)] = share(sharding, segments)
        return result

    def in_place(module: nn.Module, sharding: Any, *, segments: Any = 1, group: Any = None) -> None:
        distributed.shard_inplace(module, sharding, segments=segments, group=group)
        if isinstance(sharding, str):  # else a function of the array's name: of layers that take no adapter
            shares.update((id(part), share(sharding, segments)) for part in module.modules())

    of_models = [module for name, module in sys.modules.items() if name.startswith("mlx_lm.models.")]
    own = (("shard_linear", linear), ("shard_inplace", in_place))
    with patches.replaced((module, name, new) for module in of_models for name, new in own if hasattr(module, name)):
        yield shares


def _whole_numbers(model: nn.Module) -> dict[tuple[str, str], int]:
    return {
        (name, key): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) is int
    }


class LinearBeforeHeads(nn.Module):
    """A linear layer that every rank has whole, read by its own heads: its gradient is the sum of the ranks'."""

    def __init__(self, linear: nn.Module, group: mx.distributed.Group) -> None:
        super().__init__()
        self.group = group
        dict.update(self, linear)  # its arrays, by their names
        if isinstance(linear, nn.QuantizedLinear):
            self.group_size, self.bits, self.mode = linear.group_size, linear.bits, linear.mode

    def __call__(self, x: mx.array) -> mx.array:
        y = _product(self, x)
        return _with_summed_gradient(y + self["bias"] if "bias" in self else y, self.group)


class ShardedLoRALinear(nn.Module):
    """`linear`: one of mlx's sharded layers; `lora_a` [in, rank] and `lora_b` [rank, out]: this rank's part."""

    def __init__(self, linear: Any, lora_a: mx.array, lora_b: mx.array, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, scale
        self.lora_a, self.lora_b = lora_a, lora_b

    def __call__(self, x: mx.array) -> mx.array:
        linear = self.linear
        if isinstance(linear, COLUMN_LAYERS):
            x = _with_summed_gradient(x, linear.group)
        y = _product(linear, x)
        if x.dtype != mx.float32:  # as `layers.lora_linear` computes it for a whole layer
            y = add_adapter(y, x, self.lora_a, self.scale * self.lora_b)
        else:
            y = y + self.scale * ((x @ self.lora_a) @ self.lora_b)
        if isinstance(linear, ROW_LAYERS):
            y = mx.distributed.all_sum(y, group=linear.group)
        elif isinstance(linear, LinearBeforeHeads):
            y = _with_summed_gradient(y, linear.group)
        return y + linear["bias"] if "bias" in linear else y


def _with_summed_gradient(x: mx.array, group: mx.distributed.Group) -> mx.array:
    identity: Any = distributed.sum_gradients(group)
    return identity(x)


def _product(linear: Any, x: mx.array) -> mx.array:
    if "scales" not in linear:
        return x @ linear["weight"].T
    how = {"group_size": linear.group_size, "bits": linear.bits, "mode": linear.mode}
    return mx.quantized_matmul(x, linear["weight"], linear["scales"], linear.get("biases"), transpose=True, **how)


class Whole(Enum):
    """The gradient of an array that every rank has whole."""

    SUMMED = "each rank has its share of it"
    EQUAL = "every rank has computed it"


Kind = Division | Whole


@dataclass(frozen=True, slots=True)
class Adapters:
    """The kind of each adapter array, by name, and this rank's place."""

    kinds: Mapping[str, Kind]
    rank: int
    size: int

    def parts(self, whole: Any) -> Any:
        """Tree of whole arrays → tree of this rank's parts."""

        def part(name: str, x: mx.array) -> mx.array:
            kind = self.kinds[name]
            return kind.part(x, self.rank, self.size) if isinstance(kind, Division) else x

        return tree_map_with_path(part, whole)

    def gather_gradient(self, gradient: Any, add_up: Sum) -> Any:
        """Gradient in the whole arrays from this rank's parts, the same bits on all ranks, which call it together."""
        # Evaluated on every rank: the backward pass has sums over the ranks, which all must join.
        mx.eval(gradient)
        names, own = zip(*tree_flatten(gradient), strict=True)
        placed: list[mx.array] = []
        for kind, x in zip((self.kinds[name] for name in names), own, strict=True):
            x = x.astype(mx.float32)
            if isinstance(kind, Division):
                placed.append(kind.placed(x, self.rank, self.size))
            else:
                placed.append(x if kind is Whole.SUMMED or self.rank == 0 else mx.zeros_like(x))
        return tree_unflatten(list(zip(names, add_up(placed), strict=True)))


def install_adapters(
    model: nn.Module, adapted: nn.Module, shares: Mapping[str, LayerShare], rank: int, size: int
) -> Adapters:
    """Add the adapters of `adapted`, the whole model, to the sharded `model`. Raises CannotShardError."""
    # Blocks whose own code sums over the ranks: inside, every gradient is a rank's share.
    summed = tuple(
        f"{name}." for name, module in model.named_modules() if getattr(module, "sharding_group", None) and name
    )
    own: dict[str, Any] = dict(model.named_modules())
    kinds: dict[str, Kind] = {}
    new: list[tuple[str, nn.Module]] = []
    for name, adapter in adapted.named_modules():
        if "lora_a" not in adapter:
            continue
        of_layer = _kinds(adapter, own[name], shares.get(name), name.startswith(summed))
        if of_layer is None:
            raise CannotShardError(f"no adapter can follow how {'.'.join(name.split('.')[-2:])} is divided")
        kinds |= {f"{name}.{array}": kind for array, kind in of_layer.items()}
        if isinstance(own[name], (*COLUMN_LAYERS, *ROW_LAYERS, LinearBeforeHeads)):
            adapter = ShardedLoRALinear(own[name], adapter.lora_a, adapter.lora_b, adapter.scale)
        else:  # its arrays are still the whole ones
            adapter["linear" if "linear" in adapter else "embedding"] = own[name]
        new.append((name, adapter))
    model.update_modules(tree_unflatten(new))
    model.freeze()
    for _, module in new:
        module.unfreeze(keys=["lora_a", "lora_b"], recurse=False)
    return Adapters(kinds, rank, size)


def _kinds(adapter: Any, own: Any, share: LayerShare | None, is_summed: bool) -> dict[str, Kind] | None:
    base = adapter.linear if "linear" in adapter else adapter.embedding
    before, after = base.weight.shape, own.weight.shape
    if share is None:
        whole = Whole.SUMMED if is_summed else Whole.EQUAL
        return {"lora_a": whole, "lora_b": whole} if before == after else None
    # Of the weight [out, in] or [experts, out, in].
    division = Division(max(len(before) - 2, 0) if share.kind == COLUMNS else len(before) - 1, share.segments)
    expected = list(before)
    expected[division.axis] = after[division.axis]
    is_lora = isinstance(adapter, (LoRALinear, LoRASwitchLinear))
    if before[division.axis] == after[division.axis] or list(after) != expected or not is_lora:
        return None
    # LoRALinear has A [in, rank] and B [rank, out]; for experts, A [experts, rank, in] and B [experts, out, rank].
    if share.kind == COLUMNS:
        return {"lora_a": Whole.SUMMED, "lora_b": replace(division, axis=1)}
    is_switch = isinstance(adapter, LoRASwitchLinear)
    return {"lora_a": replace(division, axis=2 if is_switch else 0), "lora_b": Whole.SUMMED}
