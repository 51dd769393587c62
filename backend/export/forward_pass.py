"""A forward pass for comparing weights: one layer in memory at a time, in float32, with logits only where they are asked for.

In float32 because then two models differ by their weights alone, not by how activations were rounded; on a CPU it is also many times
faster than products in 16 bits or few. Quantised layers are unpacked for the pass, which is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm import utils as mlx_lm_utils

HEAD_ROWS = 1 << 14
"""Rows of the vocabulary that are unpacked together."""

OpenModel = Callable[[], nn.Module]
"""Opens a model whose arrays are not read yet. Every call returns another one."""


def logits_at(open_: OpenModel, rows: list[list[int]], positions: list[list[int]]) -> Iterator[mx.array]:
    """For each row of token ids its logits [P, V], float32, at its positions. All rows go through a layer together, and each layer's
    weights are freed before the next one's are read."""
    longest, most = max(map(len, rows)), max(map(len, positions))
    # Padded on the right, where no earlier token sees it.
    tokens_BL = mx.array([ids + [0] * (longest - len(ids)) for ids in rows])
    wanted = _Wanted(mx.array([at + at[-1:] * (most - len(at)) for at in positions]))
    model = open_()
    layers = list(getattr(model, "layers", ()))
    for index, layer in enumerate(layers):
        _free_after_use(layer, lambda index=index: open_().layers[index])  # pyright: ignore
    _narrow_heads(model, wanted)
    logits: mx.array = model(tokens_BL)  # pyright: ignore
    for row, at in enumerate(positions):
        yield (logits[row, : len(at)] if wanted.is_met else logits[row, mx.array(at)]).astype(mx.float32)


# ── layers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _free_after_use(layer: nn.Module, reopened: Callable[[], nn.Module]) -> None:
    """Have the layer compute in float32 and drop its weights. A model that calls a layer twice has it read again."""
    kind, is_freed = type(layer), False

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_freed
        if is_freed:
            self.update(in_float32(reopened()).parameters())
        else:
            in_float32(self)
        result = kind.__call__(self, *tree_map(_widened, args), **tree_map(_widened, kwargs))  # pyright: ignore
        mx.eval([array for _, array in tree_flatten(result) if isinstance(array, mx.array)])
        self.update(tree_map(lambda _: mx.array([]), self.parameters()))
        is_freed = True
        return result

    _replace_method(layer, "__call__", call)


def _replace_method(module: nn.Module, name: str, method: Callable[..., Any]) -> None:
    # Python looks `__call__` up on the class, and modules of one class differ here: each gets a class of its own. Code that asks for a
    # module's class still finds it among its bases.
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {name: method})


def _widened(argument: Any) -> Any:
    is_float = isinstance(argument, mx.array) and mx.issubdtype(argument.dtype, mx.floating)
    return argument.astype(mx.float32) if is_float else argument


def in_float32(module: nn.Module) -> nn.Module:
    """The module itself, its weights unpacked and cast, lazily."""
    module.set_dtype(mx.float32)  # scales and biases, so that affine weights unpack exactly
    mlx_lm_utils.dequantize_model(module)
    module.set_dtype(mx.float32)  # mx and nv formats unpack to bfloat16, which holds them exactly
    return module


# ── output layer ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Wanted:
    """The positions [B, P] whose logits are asked for, and whether an output layer has computed these alone."""

    position_BP: mx.array
    is_met: bool = False

    def of(self, hidden_BLH: mx.array) -> mx.array:
        self.is_met = True
        return mx.take_along_axis(hidden_BLH, self.position_BP[..., None], axis=1)


def _narrow_heads(model: nn.Module, wanted: _Wanted) -> None:
    """Have the output layer compute the wanted positions alone, and unpack its vocabulary piece by piece. An output layer that is not
    known computes every position: more memory and time, the same logits."""
    for name, module in model.named_modules():
        if type(module) in (nn.Embedding, nn.QuantizedEmbedding):
            _replace_method(module, "as_linear", lambda self, hidden: _products(self, wanted.of(hidden)))
        elif type(module) in (nn.Linear, nn.QuantizedLinear) and name.rpartition(".")[2] == "lm_head":
            _replace_method(module, "__call__", lambda self, hidden: _products(self, wanted.of(hidden)))


def _products(head: Any, hidden: mx.array) -> mx.array:
    """hidden Wᵀ + b in float32, `HEAD_ROWS` rows of W at a time."""
    hidden, parts = hidden.astype(mx.float32), []
    for start in range(0, head.weight.shape[0], HEAD_ROWS):
        rows = slice(start, start + HEAD_ROWS)
        if "scales" in head:
            biases = head.biases[rows].astype(mx.float32) if head.get("biases") is not None else None
            scales = head.scales[rows]
            scales = scales.astype(mx.float32) if mx.issubdtype(scales.dtype, mx.floating) else scales
            weight = mx.dequantize(head.weight[rows], scales, biases, head.group_size, head.bits, head.mode)
        else:
            weight = head.weight[rows]
        parts.append(hidden @ weight.astype(mx.float32).T)
        mx.eval(parts[-1])
    logits = mx.concatenate(parts, axis=-1)
    return logits + head.bias if "bias" in head else logits
