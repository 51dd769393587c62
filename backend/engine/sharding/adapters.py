"""Adapters of a model that is dealt out: whole arrays on every rank, and this rank's parts of them in its layers.

The optimizer has the whole adapters, on every rank alike: they are a thousandth of the model, any optimizer and any clipping work on them
as on one machine, and what a checkpoint holds is what one machine's holds, for any number of ranks to go on from. A rank's layers have
the parts that stand beside its weights. So a gradient has three kinds of arrays:

    a part        of an array that is dealt out (B of columns, A of rows): the whole one is the ranks' parts side by side
    a share       of an array that is whole beside a layer that is dealt out: the whole one is the sum of the ranks'
    the gradient  itself, of an adapter of a layer that every rank has: all ranks have computed it, and the first one's counts

`Adapters.gather_gradient` makes all of them whole by one sum over the ranks, of one vector, after which every rank has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

from backend.engine.sharding.sharded_lora import LAYERS, ShardedLoRALinear
from backend.engine.sharding.tensor import COLUMNS, Division, LayerShare, Unshardable, weight_division

Sum = Callable[[mx.array], mx.array]
"""Adds up one vector of float32 over all ranks."""


class Whole(Enum):
    """How the gradient of an array that every rank has whole comes about."""

    SUMMED = "each rank has its share of it"
    EQUAL = "every rank has computed it"


Kind = Division | Whole


@dataclass(frozen=True, slots=True)
class Adapters:
    """The kind of each array of the adapters, by name, and this rank's place in the group."""

    kinds: Mapping[str, Kind]
    rank: int
    size: int

    def parts(self, whole: Any) -> Any:
        """The tree of whole arrays → that of this rank's."""

        def part(name: str, x: mx.array) -> mx.array:
            kind = self.kinds[name]
            return kind.part(x, self.rank, self.size) if isinstance(kind, Division) else x

        return tree_map_with_path(part, whole)

    def gather_gradient(self, gradient: Any, add_up: Sum) -> Any:
        """The gradient in the whole arrays, from this rank's in its parts. All ranks must call it together."""
        mx.eval(
            gradient
        )  # all of it on every rank: the backward pass has sums of its own, which must be those of all ranks
        names, own = zip(*tree_flatten(gradient), strict=True)
        placed = [self._placed(name, x.astype(mx.float32)) for name, x in zip(names, own, strict=True)]
        edges = [0]
        for x in placed:
            edges.append(edges[-1] + x.size)
        flat_N = add_up(mx.concatenate([x.reshape(-1) for x in placed]))
        arrays = [flat_N[a:b].reshape(x.shape) for a, b, x in zip(edges, edges[1:], placed, strict=False)]
        return tree_unflatten(list(zip(names, arrays, strict=True)))

    def _placed(self, name: str, x: mx.array) -> mx.array:
        kind = self.kinds[name]
        if isinstance(kind, Division):
            return kind.placed(x, self.rank, self.size)
        return x if kind is Whole.SUMMED or self.rank == 0 else mx.zeros_like(x)


def install(model: nn.Module, adapted: nn.Module, shares: Mapping[str, LayerShare], rank: int, size: int) -> Adapters:
    """Put the adapters of `adapted`, the same model whole (its weights need not be read), beside the parts that `model` has. Raises
    Unshardable for a layer whose part the adapter cannot stand beside."""
    summed = _summing_blocks(model)
    own: dict[str, Any] = dict(model.named_modules())
    kinds: dict[str, Kind] = {}
    new: list[tuple[str, nn.Module]] = []
    for name, adapter in adapted.named_modules():
        if "lora_a" not in adapter:
            continue
        of_layer = _kinds(adapter, own[name], shares.get(name), any(name.startswith(f"{block}.") for block in summed))
        if of_layer is None:
            raise Unshardable(f"no adapter can follow how {'.'.join(name.split('.')[-2:])} is divided")
        kinds |= {f"{name}.{array}": kind for array, kind in of_layer.items()}
        new.append((name, _beside(adapter, own[name])))
    model.update_modules(tree_unflatten(new))
    model.freeze()
    for _, module in new:
        module.unfreeze(keys=["lora_a", "lora_b"], recurse=False)
    return Adapters(kinds, rank, size)


def _summing_blocks(model: nn.Module) -> list[str]:
    """The names of the blocks whose own code sums over the ranks: inside, every gradient is a rank's share."""
    return [name for name, module in model.named_modules() if getattr(module, "sharding_group", None) and name]


def _kinds(adapter: Any, own: Any, share: LayerShare | None, is_summed: bool) -> dict[str, Kind] | None:
    """The kinds of `lora_a` and `lora_b`; None where this rank's layer is not what its share says."""
    base = adapter.linear if "linear" in adapter else adapter.embedding
    before, after = base.weight.shape, own.weight.shape
    if share is None:
        whole = Whole.SUMMED if is_summed else Whole.EQUAL
        return {"lora_a": whole, "lora_b": whole} if before == after else None
    division = weight_division(base.weight, share)
    expected = list(before)
    if before[division.axis] == after[division.axis] or not isinstance(adapter, (LoRALinear, LoRASwitchLinear)):
        return None
    expected[division.axis] = after[division.axis]
    if list(after) != expected:
        return None
    # LoRALinear has A [in, rank] and B [rank, out]; of experts they are A [experts, rank, in] and B [experts, out, rank].
    is_switch = isinstance(adapter, LoRASwitchLinear)
    if share.kind == COLUMNS:
        return {"lora_a": Whole.SUMMED, "lora_b": division.along(1)}
    return {"lora_a": division.along(2 if is_switch else 0), "lora_b": Whole.SUMMED}


def _beside(adapter: Any, own: Any) -> nn.Module:
    """The adapter beside this rank's layer; its arrays are still the whole ones."""
    if isinstance(own, LAYERS):
        return ShardedLoRALinear(own, adapter.lora_a, adapter.lora_b, adapter.scale)
    adapter["linear" if "linear" in adapter else "embedding"] = own
    return adapter
