"""Plain, LoRA and DoRA layers of one input, as one matrix product. Adapters are merged, or added by two small ones."""

import itertools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear

from backend.engine.cpu import matmul_transposed, sliced, swiglu_forward
from backend.engine.device import on_gpu
from backend.engine.metal import GATE, MOST_RANKS, NOTHING, adapted, added, summed
from backend.engine.patches import swiglu
from backend.engine.shared_weights import SharedWeights

Linear = nn.Linear | nn.QuantizedLinear
PLAIN_LAYERS = (nn.Linear, nn.QuantizedLinear, LoRALinear, DoRALinear)


class FusedProjection(nn.Module):
    """y = gain · (x Wᵀ + (x A) B) + bias, over the outputs of several layers. A, B (adapters), gain (DoRA) and bias are
    absent where there are none."""

    def __init__(self, like: Linear) -> None:
        super().__init__()
        self.quantised = isinstance(like, nn.QuantizedLinear)
        self.stores_transposed = on_gpu()
        if isinstance(like, nn.QuantizedLinear):
            self.group_size, self.bits, self.mode = like.group_size, like.bits, like.mode

    def __call__(self, x: mx.array) -> mx.array:
        y = self._base(x)
        # (x A) B, never x (A B): two thin products of the ranks' size, and no dense [in, out] matrix.
        if "a" in self:
            y = mx.addmm(y, self._thin(x), self["b"])
        if "gain" in self:
            y = y * self["gain"]
        return y + self["bias"] if "bias" in self else y

    def step(self, x: mx.array, *, is_gate: bool = False, with_kernel: bool = False) -> mx.array:
        """For one token a row [B, 1, in], on a CPU [1, B, in] too; with `is_gate` silu(first half) · second half of the
        outputs. `with_kernel`: in one Metal kernel."""
        if with_kernel and self._fits_kernel():
            after = GATE if is_gate else NOTHING
            return adapted(self._base(x)[:, 0], x[:, 0], self["a"], self["b"], after)[:, None]
        if not is_gate:
            return self(x)
        if (slices := self._slices(x)) is None or len(slices) % 2:
            return swiglu(*mx.split(self(x), 2, axis=-1), ours=swiglu_forward)
        return swiglu(*mx.split(slices, 2), ours=swiglu_forward).swapaxes(0, 1).reshape(*x.shape[:-1], -1)

    def heads(self, x: mx.array, size: int) -> mx.array:
        """The outputs of one token a row as heads [B, out / size, 1, size]."""
        slices = self._slices(x)
        if slices is None or slices.shape[-1] != size:
            y = self(x)
            return y.reshape(-1, y.shape[-1] // size, 1, size)
        return slices.swapaxes(0, 1)[:, :, None]

    def _slices(self, x: mx.array) -> mx.array | None:
        """The outputs of one token a row as `sliced` weights give them, [out / width, B, width]."""
        weight = self["weight"]
        return None if weight.ndim == 2 or "bias" in self else x.reshape(1, x.size // x.shape[-1], x.shape[-1]) @ weight

    def added_step(self, x: mx.array, stream: mx.array, *, with_kernel: bool = False) -> mx.array:
        """stream + y for one token a row [B, 1, out], in the type of x."""
        # The product itself can add the stream. Not in 16 bits: the learner adds it to a rounded product.
        weight = self["weight"]
        if not {"gain", "bias", "a"} & set(self) and weight.ndim == 2 and weight.dtype == mx.float32:
            return mx.addmm(stream, x, weight.T)
        return stream + self.step(x, with_kernel=with_kernel)

    def stream_step(self, x: mx.array, stream: mx.array, *, with_kernel: bool = False) -> tuple[mx.array, mx.array]:
        """stream + y for one token a row of 16 bits: in float32, and rounded to the type of x."""
        if with_kernel and self._fits_kernel():
            total, rounded = added(stream[:, 0], self._base(x)[:, 0], x[:, 0], self["a"], self["b"])
            return total[:, None], rounded[:, None]
        return stream_sum(stream, self(x), with_kernel=with_kernel)

    def _fits_kernel(self) -> bool:
        return "a" in self and not {"gain", "bias"} & set(self) and len(self["a"]) <= MOST_RANKS

    def _thin(self, x: mx.array) -> mx.array:
        a = self["a"]
        if not self.stores_transposed:
            return x @ a
        if x.ndim != 3 or x.shape[1] > 1:
            return x @ a.T
        return (a @ x.reshape(len(x), -1, 1)).reshape(len(x), 1, -1)

    def _base(self, x: mx.array) -> mx.array:
        if not self.quantised:
            return matmul_transposed(x, self["weight"])
        how = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
        return mx.quantized_matmul(x, self["weight"], self["scales"], self.get("biases"), transpose=True, **how)


def stream_sum(stream: mx.array, y: mx.array, *, with_kernel: bool) -> tuple[mx.array, mx.array]:
    """stream + y in float32, and rounded to the type of y."""
    if with_kernel:
        return summed(stream, y)
    stream = stream.astype(mx.float32) + y
    return stream, stream.astype(y.dtype)


class FusedOutput:
    """The output of a `FusedProjection`, split among its layers: the first branch called with an input computes the
    product, the others take slices. Not an nn.Module: its arrays would be counted once for each branch."""

    def __init__(self, projection: FusedProjection, sizes: list[int]) -> None:
        self.projection, self.count, self.sizes = projection, len(sizes), sizes
        self.edges = list(itertools.accumulate(sizes))[:-1]
        self.input: mx.array | None = None
        self.slices: dict[int, mx.array] = {}

    def slice_of(self, index: int, x: mx.array) -> mx.array:
        if self.count == 1:
            return self.projection(x)
        # By identity: comparing values would evaluate the graph. A slice that is read twice is computed again.
        if x is not self.input or index not in self.slices:
            self.input, self.slices = x, dict(enumerate(mx.split(self.projection(x), self.edges, axis=-1)))
        output = self.slices.pop(index)
        if not self.slices:
            self.input = None  # keep nothing of a step beyond it
        return output


class LinearBranch(nn.Module):
    """Replaces one of the fused layers in the module tree."""

    def __init__(self, output: FusedOutput, index: int) -> None:
        super().__init__()
        self.output, self.index = output, index
        if index == 0:
            self.projection = output.projection  # in the tree once, so that its arrays are inputs of a compiled step

    def __call__(self, x: mx.array) -> mx.array:
        return self.output.slice_of(self.index, x)


@dataclass
class FusedLinear:
    """Layers that read the same input, and their projection. Merged: float weights with adapters in a temporary array.
    Else packed: frozen weights in one lasting array, adapters separate."""

    members: list[Any]
    dtype: mx.Dtype  # of the recorded input
    is_merged: bool

    def __post_init__(self) -> None:
        self.bases = [base_of(member) for member in self.members]
        self.projection = FusedProjection(self.bases[0])
        self.packed: dict[str, mx.array] = {}

    def branches(self) -> list[tuple[nn.Module, LinearBranch]]:
        """(layer, the branch that replaces it)."""
        output = FusedOutput(self.projection, [base.weight.shape[0] for base in self.bases])
        return [(member, LinearBranch(output, index)) for index, member in enumerate(self.members)]

    def pack(self, trees: list[nn.Module], shared: SharedWeights | None = None) -> None:
        """Concatenate frozen weights for good and make the layers' own arrays views of the result, in every tree; so
        packing costs no memory. What another policy has packed (`shared`) is reused."""
        if self.is_merged:
            return
        views: dict[int, mx.array] = {}
        for name in [name for name in ("weight", "scales", "biases") if self.bases[0].get(name) is not None]:
            arrays = [base[name] for base in self.bases]
            if shared is not None and (packed := shared.packed(arrays)) is not None:
                self.packed[name] = packed
                continue
            self.packed[name] = arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)
            edges = list(itertools.accumulate(len(array) for array in arrays))[:-1]
            if edges:
                parts: list[mx.array] = list(mx.split(self.packed[name], edges))  # pyright: ignore[reportArgumentType]
                views |= {id(a): v for a, v in zip(arrays, parts, strict=True)}
                if shared is not None:
                    shared.add(parts, self.packed[name])
        # Evaluated here, or the lazy views would keep the separate arrays alive, and the memory would be taken twice.
        mx.eval(self.packed, list(views.values()))
        for module in (module for tree in trees for module in tree.modules()):
            module.update({name: views[id(array)] for name, array in module.items() if id(array) in views})

    def refresh(self) -> None:
        """Compute the projection's arrays from the present weights."""
        arrays = self.packed
        if self.is_merged:
            arrays = {"weight": sliced(mx.concatenate([_merged_weight(member) for member in self.members]))}
        elif any(has_adapter(member) for member in self.members):
            # A [in, sum of ranks], B [sum of ranks, sum of outputs], block-diagonal.
            adapted = [has_adapter(member) for member in self.members]
            a = mx.concatenate([m.lora_a for m, has in zip(self.members, adapted, strict=True) if has], axis=1)
            sizes, blocks = [base.weight.shape[0] for base in self.bases], []
            for i, member in enumerate(self.members):
                if adapted[i]:
                    # The scale goes into B, where it costs nothing per token.
                    blocks.append(mx.pad(member.scale * member.lora_b, [(0, 0), (sum(sizes[:i]), sum(sizes[i + 1 :]))]))
            if self.projection.stores_transposed:
                a = mx.contiguous(a.T)
            # In the input's type: float32 adapters would make mlx run the products, and all that follows, in float32.
            arrays = arrays | {"a": a.astype(self.dtype), "b": mx.concatenate(blocks).astype(self.dtype)}
            if any(isinstance(member, DoRALinear) for member in self.members):
                arrays["gain"] = mx.concatenate([_dora_gain(member) for member in self.members]).astype(self.dtype)
        if any("bias" in base for base in self.bases):
            # Never packed: they are so small that a temporary copy costs nothing.
            arrays = arrays | {"bias": mx.concatenate([base.bias for base in self.bases])}
        mx.eval(arrays)
        # Not Module.update, which refuses names that the module does not have yet.
        dict.update(self.projection, arrays)


def is_plain(module: Any) -> bool:
    """True if this module can compute the layer."""
    return type(module) in PLAIN_LAYERS[:2] or (has_adapter(module) and is_plain(module.linear))


def has_adapter(module: nn.Module) -> bool:
    return type(module) in PLAIN_LAYERS[2:]


def base_of(member: Any) -> Any:
    """The layer without its adapter."""
    return member.linear if has_adapter(member) else member


def fusion_key(member: nn.Module) -> tuple[Any, ...]:
    """Layers with one input and equal keys can be one product."""
    base = base_of(member)
    how = (base.group_size, base.bits, base.mode) if isinstance(base, nn.QuantizedLinear) else ()
    return (type(base), *how, base.weight.dtype, "bias" in base)


def _merged_weight(member: Any) -> mx.array:
    if not has_adapter(member):
        return member.weight
    # Added in the adapter's type, float32 as a rule, and rounded once at the end.
    weight = _adapted_weight(member)
    if isinstance(member, DoRALinear):
        weight = (member.m / mx.linalg.norm(weight, axis=1))[:, None] * weight
    return weight.astype(member.linear.weight.dtype)


def _adapted_weight(member: Any) -> mx.array:
    base = member.linear
    if isinstance(base, nn.QuantizedLinear):
        weight = mx.dequantize(base.weight, base.scales, base.get("biases"), base.group_size, base.bits, base.mode)
    else:
        weight = base.weight
    return mx.addmm(weight, member.scale * member.lora_b.T, member.lora_a.T)


def _dora_gain(member: Any) -> mx.array:
    if not isinstance(member, DoRALinear):
        return mx.ones(base_of(member).weight.shape[0])
    gain = member.m / mx.linalg.norm(_adapted_weight(member), axis=1)
    mx.eval(gain)  # so that one dense weight at a time is in memory
    return gain
