"""Linear layers that read the same input, made one product, with their adapters folded in or beside it.

Plain, LoRA and DoRA layers over float or quantised weights, with or without a bias. Knows single layers; which of a model's
layers share an input is found elsewhere.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear

from backend.engine.cpu.small_matmul import matmul_transposed

Linear = nn.Linear | nn.QuantizedLinear


# ── modules that stand for layers ──────────────────────────────────────────────────────────────────────────────────────────────


class Product(nn.Module):
    """y = gain · (x Wᵀ + (x A) B) + bias, over the rows of several layers. A and B are there where adapters ride along."""

    def __init__(self, like: Linear) -> None:
        super().__init__()
        self.quantised = isinstance(like, nn.QuantizedLinear)
        if isinstance(like, nn.QuantizedLinear):
            self.group_size, self.bits, self.mode = like.group_size, like.bits, like.mode

    def __call__(self, x: mx.array) -> mx.array:
        y = self._base(x)
        if "a" in self:
            y = mx.addmm(y, x @ self["a"], self["b"])
        if "gain" in self:
            y = y * self["gain"]
        return y + self["bias"] if "bias" in self else y

    def _base(self, x: mx.array) -> mx.array:
        if not self.quantised:
            return matmul_transposed(x, self["weight"])
        how = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
        return mx.quantized_matmul(x, self["weight"], self["scales"], self.get("biases"), transpose=True, **how)


class Shared:
    """What the parts of a bundle have in common: the first of them to be called works the product out for all. Outside the
    module tree, where its arrays would be counted once for each part."""

    def __init__(self, product: Product, sizes: list[int]) -> None:
        self.product, self.count = product, len(sizes)
        self.edges = list(itertools.accumulate(sizes))[:-1]
        self.input: mx.array | None = None
        self.slices: dict[int, mx.array] = {}

    def take(self, place: int, x: mx.array) -> mx.array:
        if self.count == 1:
            return self.product(x)
        if x is not self.input or place not in self.slices:
            self.input, self.slices = x, dict(enumerate(mx.split(self.product(x), self.edges, axis=-1)))
        taken = self.slices.pop(place)
        if not self.slices:
            self.input = None  # nothing of a step is kept beyond it
        return taken


class LinearBranch(nn.Module):
    """Stands where one of a bundle's layers stood."""

    def __init__(self, shared: Shared, place: int) -> None:
        super().__init__()
        self.shared, self.place = shared, place
        if place == 0:
            self.product = shared.product  # the one place where the tree holds it

    def __call__(self, x: mx.array) -> mx.array:
        return self.shared.take(self.place, x)


# ── bundles ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class FusedLinear:
    """Layers that read the same input, and the product that stands for them.

    Folded: float weights with their adapters in one temporary array. Otherwise frozen weights in one lasting array, with
    adapters beside it.
    """

    members: list[Any]
    dtype: mx.Dtype
    """Of the input that was seen."""
    folded: bool

    def __post_init__(self) -> None:
        self.bases = [base_of(member) for member in self.members]
        self.product = Product(self.bases[0])
        self.stored: dict[str, mx.array] = {}

    def parts(self) -> list[tuple[nn.Module, LinearBranch]]:
        shared = Shared(self.product, [base.weight.shape[0] for base in self.bases])
        return [(member, LinearBranch(shared, place)) for place, member in enumerate(self.members)]

    def store(self, trees: list[nn.Module]) -> None:
        """Put frozen weights side by side for good and make the layers' own arrays views of them, in every tree."""
        if self.folded:
            return
        views: dict[int, mx.array] = {}
        for name in [name for name in ("weight", "scales", "biases") if self.bases[0].get(name) is not None]:
            arrays = [base[name] for base in self.bases]
            self.stored[name] = arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)
            edges = list(itertools.accumulate(len(array) for array in arrays))[:-1]
            if edges:
                views |= {id(a): v for a, v in zip(arrays, mx.split(self.stored[name], edges), strict=True)}
        mx.eval(self.stored, list(views.values()))
        for module in (module for tree in trees for module in tree.modules()):
            module.update({name: views[id(array)] for name, array in module.items() if id(array) in views})

    def refresh(self) -> None:
        """Work out what the product needs from the weights as they are now."""
        arrays = (
            {"weight": mx.concatenate([_folded(member) for member in self.members])} if self.folded else self.stored
        )
        if not self.folded and any(has_adapter(member) for member in self.members):
            arrays = arrays | self._beside()
        if any("bias" in base for base in self.bases):
            arrays = arrays | {"bias": mx.concatenate([base.bias for base in self.bases])}
        mx.eval(arrays)
        dict.update(self.product, arrays)

    def _beside(self) -> dict[str, mx.array]:
        """A, B and DoRA's gain: each member's adapter writes into its own rows only."""
        adapted = [has_adapter(member) for member in self.members]
        a = mx.concatenate([m.lora_a for m, has in zip(self.members, adapted, strict=True) if has], axis=1)
        sizes, blocks = [base.weight.shape[0] for base in self.bases], []
        for i, member in enumerate(self.members):
            if adapted[i]:
                row = mx.pad(member.scale * member.lora_b, [(0, 0), (sum(sizes[:i]), sum(sizes[i + 1 :]))])
                blocks.append(row)
        made = {"a": a.astype(self.dtype), "b": mx.concatenate(blocks).astype(self.dtype)}
        if any(isinstance(member, DoRALinear) for member in self.members):
            made["gain"] = mx.concatenate([_gain(member) for member in self.members]).astype(self.dtype)
        return made


# ── single layers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def is_plain(module: Any) -> bool:
    return type(module) in (nn.Linear, nn.QuantizedLinear) or (has_adapter(module) and is_plain(module.linear))


def has_adapter(module: nn.Module) -> bool:
    return type(module) in (LoRALinear, DoRALinear)


def base_of(member: Any) -> Any:
    return member.linear if has_adapter(member) else member


def kind_of(member: nn.Module) -> tuple[Any, ...]:
    """Layers of one kind can be one product."""
    base = base_of(member)
    how = (base.group_size, base.bits, base.mode) if isinstance(base, nn.QuantizedLinear) else ()
    return (type(base), *how, base.weight.dtype, "bias" in base)


def _dense(base: Any) -> mx.array:
    """The layer's weight as numbers, [out, in]."""
    if not isinstance(base, nn.QuantizedLinear):
        return base.weight
    return mx.dequantize(base.weight, base.scales, base.get("biases"), base.group_size, base.bits, base.mode)


def _folded(member: Any) -> mx.array:
    """The weight with its adapter inside it."""
    if not has_adapter(member):
        return member.weight
    weight = _with_delta(member)
    if isinstance(member, DoRALinear):
        weight = (member.m / mx.linalg.norm(weight, axis=1))[:, None] * weight
    return weight.astype(member.linear.weight.dtype)


def _with_delta(member: Any) -> mx.array:
    return _dense(member.linear) + (member.scale * member.lora_b.T) @ member.lora_a.T


def _gain(member: Any) -> mx.array:
    """DoRA's learnt magnitude over the adapted weight's own, row by row (arXiv:2402.09353, equation 5)."""
    if not isinstance(member, DoRALinear):
        return mx.ones(base_of(member).weight.shape[0])
    gain = member.m / mx.linalg.norm(_with_delta(member), axis=1)
    mx.eval(gain)  # one dense weight at a time
    return gain
