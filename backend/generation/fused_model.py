"""A policy's decoding face: the same function as the policy, by fewer and larger products. It never learns.

Decoding is bound by the number of products, not by their size. Linear layers that read the very same input (q|k|v,
gate|up) become one product, and an adapter is either folded into a temporary weight or rides along as two small products
for the whole bundle. Which layers share an input is seen in a trial run, so no architecture is named here; what is not a
plain linear layer stays the policy's own module. The face is compared with the policy before it is used, and is the
policy itself where the two differ.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from backend.engine.model_probe import split
from backend.engine.split_model import SplitModel
from backend.generation.fused_linear import FusedLinear, base_of, has_adapter, is_plain, kind_of

PROBE = mx.array([[1, 2, 3, 2]])
"""Tokens of the trial run."""


class FusedModel:
    """The policy as decoding sees it. `merge` allows temporary weights: adapters folded in, learning weights side by side;
    they are made by `refresh`, hold as much memory as the weights they stand for, and are dropped by `release`.

    `model` is a module tree that shares every module that needs no change with the policy, so it follows what is learnt.
    Frozen weights that are packed for good *become* the storage: the policy's own arrays, and those of `others`, which
    share them, are made views of it.
    """

    def __init__(
        self, model: nn.Module, split_model: SplitModel, *, merge: bool = True, others: Iterable[nn.Module] = ()
    ) -> None:
        self.policy, self.model, self.split_model = model, model, split_model
        self.bundles: list[FusedLinear] = []
        was_training = model.training
        model.eval()
        self._build([model, *others], merge)
        model.train(was_training)

    @property
    def modules(self) -> list[nn.Module]:
        return [*self.policy.modules(), *self.model.modules()]

    def refresh(self) -> None:
        """Follow the policy's weights as they are now."""
        self.model.eval()
        for bundle in self.bundles:
            bundle.refresh()
        for original, twin in self._twins:
            twin.update({name: value for name, value in original.items() if isinstance(value, mx.array)})

    def release(self) -> None:
        """Drop what `refresh` made."""
        for bundle in self.bundles:
            bundle.product.clear()

    def _build(self, trees: list[nn.Module], merge: bool) -> None:
        self._twins: list[tuple[nn.Module, nn.Module]] = []
        try:
            bundles = _bundles(self.policy, merge)
        except Exception:  # a model that reads its layers' weights itself, or treats its layers as no others do
            return
        if not bundles:
            return
        self.bundles = bundles
        for bundle in bundles:
            bundle.store(trees)
        parts: dict[int, nn.Module] = {id(member): part for bundle in bundles for member, part in bundle.parts()}
        self.model = _replaced(self.policy, parts, self._twins)
        if not self._agrees():
            self.model, self.bundles, self._twins = self.policy, [], []
            return
        self.refresh()
        self.split_model = split(self.model)
        self.release()

    def _agrees(self) -> bool:
        """The logits of the two, with adapters that matter: fresh ones are zero, and would hide any mistake."""
        fresh: list[Any] = [
            (member, member.lora_b) for bundle in self.bundles for member in bundle.members if has_adapter(member)
        ]
        for i, (member, lora_b) in enumerate(fresh):
            member.lora_b = lora_b + 0.01 * mx.random.normal(lora_b.shape, key=mx.random.key(i))
        try:
            self.refresh()
            wanted, found = self.policy(PROBE).astype(mx.float32), self.model(PROBE)  # pyright: ignore
            allowed = (
                1e-4 if found.dtype == mx.float32 else 0.25
            )  # of mistakes it is near 1, of 16 bits' rounding below 0.1
            distance = mx.linalg.norm(found.astype(mx.float32) - wanted) / mx.linalg.norm(wanted)
            return float(distance.item()) < allowed  # pyright: ignore
        except Exception:
            return False
        finally:
            for member, lora_b in fresh:
                member.lora_b = lora_b
            self.release()


def _replaced(module: Any, new: Mapping[int, nn.Module], twins: list[tuple[nn.Module, nn.Module]]) -> Any:
    """The tree with other modules in place of some. A module with nothing to replace inside is shared; the others are
    copied, and noted in `twins` with their originals."""
    if id(module) in new:
        return new[id(module)]
    if isinstance(module, (list, tuple)):
        items = [_replaced(item, new, twins) for item in module]
        return module if all(a is b for a, b in zip(items, module, strict=True)) else type(module)(items)
    if not isinstance(module, dict):
        return module
    items = {name: _replaced(item, new, twins) for name, item in module.items()}
    if all(items[name] is module[name] for name in items):
        return module
    twin: Any = copy.copy(module)
    dict.update(twin, items)
    if isinstance(module, nn.Module):
        twins.append((module, twin))
    return twin


# ── the trial run ───────────────────────────────────────────────────────────────────────────────────────────────────────


class InputRecorder(nn.Module):
    """Stands for a layer in the trial run and notes what it is given."""

    def __init__(self, layer: nn.Module, seen: list[tuple[nn.Module, mx.array]]) -> None:
        super().__init__()
        self.call, self.seen = layer.__call__, seen.append
        self.layer = lambda: layer

    def __call__(self, x: mx.array) -> mx.array:
        self.seen((self.layer(), x))
        return self.call(x)


def _bundles(model: nn.Module, merge: bool) -> list[FusedLinear]:
    """What can be made one product: layers that were given the same array, as far as they are of one kind."""
    groups: dict[tuple[Any, ...], list[nn.Module]] = {}
    seen = _inputs(model)
    calls = [id(member) for member, _ in seen]
    for member, x in seen:
        shared = id(x) if calls.count(id(member)) == 1 else id(member)  # a layer that is used twice stands alone
        groups.setdefault((shared, x.dtype, *kind_of(member)), []).append(member)
    bundles: list[FusedLinear] = []
    for (_, dtype, *_), members in groups.items():
        unique = list({id(member): member for member in members}.values())
        if plan := _plan(unique, merge):
            bundles.append(FusedLinear(unique, dtype, plan == "fold"))
    return bundles


def _plan(members: list[nn.Module], merge: bool) -> str:
    """How a bundle is made; "" where it gains nothing, or is not allowed the memory."""
    adapted = any(has_adapter(member) for member in members)
    learns = any(tree_flatten(base_of(member).trainable_parameters()) for member in members)
    if len(members) == 1 and not adapted:
        return ""
    if learns:
        return "fold" if merge else ""
    return "fold" if merge and adapted and isinstance(base_of(members[0]), nn.Linear) else "store"


def _inputs(model: nn.Module) -> list[tuple[nn.Module, mx.array]]:
    """Every plain linear layer that the trial run calls, with the very array it was given, in order."""
    layers = [module for module in model.modules() if is_plain(module)]
    inside = {id(layer.linear) for layer in layers if has_adapter(layer)}
    seen: list[tuple[nn.Module, mx.array]] = []
    witnesses: dict[int, nn.Module] = {
        id(layer): InputRecorder(layer, seen) for layer in layers if id(layer) not in inside
    }
    _replaced(model, witnesses, [])(PROBE)
    return seen
