"""Linear layers of which each rank has a part, with LoRA beside them.

    columns   a rank has some of the outputs:  y_r = x W_rᵀ + s · (x A) B_r          A whole, B dealt out
    rows      a rank has some of the inputs:   y   = Σ_r (x_r W_rᵀ + s · (x_r A_r) B)   A dealt out, B whole

The sum over ranks that mlx's layer of rows makes anyway takes the adapter's product with it, so that adapters cost no collective in the
forward pass. In the backward pass the gradient in x of the columns is summed over the ranks (`sum_gradients`), base and adapter together.

    before heads  every rank has the layer, and each reads its output for its own heads (the latent keys and values of MLA)

mlx-lm's code leaves the gradient of the last kind at each rank's share, since it was written for inference; `LinearBeforeHeads` sums it.

The gradient in the array that is whole (A of columns, B of rows) is this rank's share of it; `backend.engine.sharding.adapters` adds them up.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers import distributed

from backend.engine.adapter_product import add_adapter

ROWS = (distributed.ShardedToAllLinear, distributed.QuantizedShardedToAllLinear)
COLUMNS = (distributed.AllToShardedLinear, distributed.QuantizedAllToShardedLinear)
"""mlx's layers of which each rank has a part."""


class LinearBeforeHeads(nn.Module):
    """A linear layer that every rank has, of whose output each rank's own heads read: its gradient is the sum of the ranks'."""

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
    """`linear` is one of mlx's sharded layers; `lora_a` [in, rank] and `lora_b` [rank, out] are this rank's part of the adapter."""

    def __init__(self, linear: Any, lora_a: mx.array, lora_b: mx.array, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, scale
        self.lora_a, self.lora_b = lora_a, lora_b

    def __call__(self, x: mx.array) -> mx.array:
        linear = self.linear
        if isinstance(linear, COLUMNS):
            x = _with_summed_gradient(x, linear.group)
        y = self._with_adapter(_product(linear, x), x)
        if isinstance(linear, ROWS):
            y = mx.distributed.all_sum(y, group=linear.group)
        elif isinstance(linear, LinearBeforeHeads):
            y = _with_summed_gradient(y, linear.group)
        return y + linear["bias"] if "bias" in linear else y

    def _with_adapter(self, y: mx.array, x: mx.array) -> mx.array:
        if x.dtype != mx.float32:  # as `adapter_product` computes it beside a whole layer
            return add_adapter(y, x, self.lora_a, self.scale * self.lora_b)
        return y + self.scale * ((x @ self.lora_a) @ self.lora_b)


def _with_summed_gradient(x: mx.array, group: mx.distributed.Group) -> mx.array:
    """x, whose gradient is the sum of the ranks'."""
    identity: Any = distributed.sum_gradients(group)
    return identity(x)


def _product(linear: Any, x: mx.array) -> mx.array:
    """x Wᵀ with this rank's part of the weight, without bias and without communication."""
    if "scales" not in linear:
        return x @ linear["weight"].T
    how = {"group_size": linear.group_size, "bits": linear.bits, "mode": linear.mode}
    return mx.quantized_matmul(x, linear["weight"], linear["scales"], linear.get("biases"), transpose=True, **how)


LAYERS = (*COLUMNS, *ROWS, LinearBeforeHeads)
"""What `ShardedLoRALinear` stands beside."""
