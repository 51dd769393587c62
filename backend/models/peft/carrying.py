"""peft's adapters put onto the layers of mlx-lm's model: the inverse of `backend.models.peft.writing`, over the same trace of rows.

Where an original layer holds several of mlx-lm's, each gets its rows of B. Where one of mlx-lm's is made of several originals, their A stand
below each other and their B in blocks. All layers have one scale in mlx-lm, so others are multiplied into B.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from backend.models.export.original.row_trace import Rows, by_original
from backend.models.peft.origin import Origin
from backend.models.peft.reading import NAME, PeftAdapter, PeftLayer
from backend.models.peft.settings import SETTING
from backend.spec.faults import Mistake
from backend.spec.user_input.text import shown

LINEAR, EXPERTS = (nn.Linear, nn.QuantizedLinear), (SwitchLinear, QuantizedSwitchLinear)
EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
SAME_LENGTH = 1e-5
"""Relative difference of a row's magnitude from its length in the base up to which training did not move it."""

Columns = dict[tuple[str, str], slice]
"""(mlx-lm's array, original tensor) → the part of the original adapter's rank that the array needs."""


@dataclass(frozen=True, slots=True)
class CarriedLayer:
    """The adapter of one of mlx-lm's layers: `a` [E, r, in], `b` [E, out, r], E = 1 but for experts; `magnitude` [out] under DoRA."""

    a: mx.array
    b: mx.array
    magnitude: mx.array | None
    is_experts: bool

    @property
    def rank(self) -> int:
        return self.a.shape[1]


@dataclass(frozen=True, slots=True)
class CarriedAdapter:
    """Adapters by the names of mlx-lm's layers, at one scale, and mlx-lm's arrays that were trained as a whole, float32."""

    scale: float
    layers: Mapping[str, CarriedLayer]
    whole: Mapping[str, mx.array]


def carried_adapter(adapter: PeftAdapter, origin: Origin, model: nn.Module) -> CarriedAdapter:
    """`model`: mlx-lm's, without adapters. Raises Mistake, naming the layer, for one that has no place in it."""
    _check_places(adapter, origin)
    scale = Counter(layer.scale for layer in adapter.layers.values()).most_common(1)[0][0] if adapter.layers else 1.0
    tensors = {f"{name}.weight": _at_scale(layer, scale) for name, layer in adapter.layers.items()}
    columns = _columns(tensors, origin)
    modules = dict(model.named_modules())
    carried: dict[str, CarriedLayer] = {}
    for array in sorted({array for array, _ in columns}):
        name, _, kind = array.rpartition(".")
        module = modules.get(name)
        source = shown(origin.traced[array][0].original.removesuffix(".weight"), NAME)
        if kind != "weight" or not isinstance(module, LINEAR + EXPERTS):
            raise Mistake(SETTING, f"{source} is no linear layer in mlx-lm, so its adapter has no place.")
        is_experts = isinstance(module, EXPERTS)
        if is_experts and adapter.settings.uses_dora:
            raise Mistake(SETTING, f"{source} belongs to experts, for which mlx-lm has no DoRA.")
        carried[name] = _carried(array, tensors, columns, origin, module.weight.shape[0] if is_experts else 0)  # pyright: ignore
    return CarriedAdapter(scale, carried, _whole_arrays(adapter, origin, model))


def _at_scale(layer: PeftLayer, scale: float) -> PeftLayer:
    return layer if layer.scale == scale else replace(layer, b=(layer.scale / scale) * layer.b, scale=scale)


# ── places ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _check_places(adapter: PeftAdapter, origin: Origin) -> None:
    """Raises Mistake for a layer that the model has not, or has in another shape, and for one that should have an adapter and has none."""
    sources = by_original(run for runs in origin.traced.values() for run in runs)
    for layer, found in adapter.layers.items():
        tensor, called = f"{layer}.weight", shown(layer, NAME)
        shape, given = origin.shapes.get(tensor), (found.b.shape[0], found.a.shape[1])
        if shape is None:
            raise Mistake(SETTING, f"The model has no layer {called}, and the adapter is for one.")
        if shape != given:
            raise Mistake(SETTING, f"{called} is {list(shape)} in the model, and its adapter is for {list(given)}.")
        if sum(run.count for run in sources.get(tensor, ())) < shape[0]:
            raise Mistake(SETTING, f"{called} has no place in mlx-lm's model as it is, so its adapter has none.")
        if not all(mx.all(mx.isfinite(part)).item() for part in (found.a, found.b)):
            raise Mistake(SETTING, f"The adapter of {called} holds numbers that are not finite.")
    linear = [name for name, shape in origin.shapes.items() if len(shape) == 2 and name.endswith(".weight")]
    for layer in (name.removesuffix(".weight") for name in linear if name in sources):
        if layer not in adapter.layers and adapter.settings.means(layer):
            raise Mistake(SETTING, f"The adapter of {shown(layer, NAME)} is missing, and target_modules names it.")


def _columns(tensors: Mapping[str, PeftLayer], origin: Origin) -> Columns:
    """The arrays that get adapters, by the originals that they come from."""
    columns: Columns = {}
    runs = by_original(run for runs in origin.traced.values() for run in runs if run.original in tensors)
    for tensor, rows in runs.items():
        found = _columns_of(tensor, tensors[tensor], rows, origin)
        columns |= {(array, tensor): part for array, part in found.items()}
    return columns


def _columns_of(tensor: str, layer: PeftLayer, rows: list[Rows], origin: Origin) -> dict[str, slice]:
    """Array → the columns of B that its rows use: all, unless B consists of one block for each array, as `writing` makes it. An array of
    several whose rows the adapter leaves as they are gets none."""
    arrays = list(dict.fromkeys(run.array for run in rows))
    whole = slice(0, layer.b.shape[1])
    if len(arrays) == 1:
        return {arrays[0]: whole}
    of_array = {array: [run for run in rows if run.array == array] for array in arrays}
    changed = [array for array in arrays if _changes(tensor, layer, of_array[array], origin)] or arrays
    width, rest = divmod(whole.stop, len(changed))
    blocks = {array: slice(at * width, (at + 1) * width) for at, array in enumerate(changed)}
    if rest or not all(_is_zero_outside(layer.b, of_array[array], block) for array, block in blocks.items()):
        return dict.fromkeys(changed, whole)
    return blocks


def _changes(tensor: str, layer: PeftLayer, rows: list[Rows], origin: Origin) -> bool:
    if mx.any(_rows_of(layer.b, rows) != 0).item():
        return True
    if layer.magnitude is None:
        return False
    length = mx.linalg.norm(_rows_of(origin.tensor(tensor), rows), axis=1)
    return not mx.allclose(_rows_of(layer.magnitude, rows), length, rtol=SAME_LENGTH, atol=0).item()


def _is_zero_outside(b: mx.array, rows: list[Rows], block: slice) -> bool:
    part = _rows_of(b, rows)
    return not (mx.any(part[:, : block.start] != 0) | mx.any(part[:, block.stop :] != 0)).item()


def _rows_of(array: mx.array, rows: list[Rows]) -> mx.array:
    return mx.concatenate([array[_source(run)] for run in rows])


def _source(run: Rows) -> slice:
    return slice(run.original_start, run.original_start + run.count)


# ── one layer ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _carried(
    array: str, tensors: Mapping[str, PeftLayer], columns: Columns, origin: Origin, experts: int
) -> CarriedLayer:
    """`experts`: how many lie behind one another in the array; 0 for an ordinary layer."""
    runs = origin.traced[array]
    rows = sum(run.count for run in runs) // (experts or 1)
    # Every expert is an original of its own, so no run reaches over two of them.
    parts = [
        _low_rank([run for run in runs if run.start // rows == expert], tensors, columns)
        for expert in range(experts or 1)
    ]
    rank = max(a.shape[0] for a, _ in parts)
    width = origin.shapes[runs[0].original][-1]
    equal = [wider(a.reshape(-1, width), b, rank) for a, b in parts]
    is_dora = any(layer.magnitude is not None for layer in tensors.values())
    magnitude = _magnitude(runs, tensors, origin) if is_dora else None
    return CarriedLayer(mx.stack([a for a, _ in equal]), mx.stack([b for _, b in equal]), magnitude, experts > 0)


def _low_rank(runs: list[Rows], tensors: Mapping[str, PeftLayer], columns: Columns) -> tuple[mx.array, mx.array]:
    """A [r, in] and B [rows of the runs, r]. Originals with the same A share it; those without an adapter have zeros in B."""
    shared: list[mx.array] = []
    place: dict[str, int] = {}
    for run in runs:
        if (run.array, run.original) in columns and run.original not in place:
            a = tensors[run.original].a[columns[run.array, run.original]]
            same = (at for at, other in enumerate(shared) if mx.array_equal(a, other).item())
            place[run.original] = next(same, len(shared))
            shared += [a] if place[run.original] == len(shared) else []
    starts = [sum(a.shape[0] for a in shared[:at]) for at in range(len(shared) + 1)]
    b = mx.zeros((sum(run.count for run in runs), starts[-1]))
    for run in runs:
        if run.original in place:
            here, at = slice(run.start - runs[0].start, run.start - runs[0].start + run.count), place[run.original]
            part = tensors[run.original].b[_source(run), columns[run.array, run.original]]
            b[here, starts[at] : starts[at + 1]] = part
    return mx.concatenate(shared) if shared else mx.zeros((0, 0)), b


def wider(a: mx.array, b: mx.array, rank: int) -> tuple[mx.array, mx.array]:
    """A [.., r, in] and B [.., out, r] with a rank of `rank`, which computes the same: new columns of B are zero, and new rows of A as LoRA
    begins with them, so that they can learn."""
    missing = rank - a.shape[-2]
    if not missing:
        return a, b
    bound = a.shape[-1] ** -0.5
    new = mx.random.uniform(-bound, bound, (*a.shape[:-2], missing, a.shape[-1]), key=mx.random.key(0))
    return mx.concatenate([a, new], axis=-2), mx.concatenate([b, mx.zeros((*b.shape[:-1], missing))], axis=-1)


def _magnitude(runs: list[Rows], tensors: Mapping[str, PeftLayer], origin: Origin) -> mx.array:
    """The length of every row. Rows of originals without an adapter keep the one that they have."""
    parts: list[mx.array] = []
    for run in runs:
        learned = tensors[run.original].magnitude if run.original in tensors else None
        whole = mx.linalg.norm(origin.tensor(run.original), axis=1) if learned is None else learned
        parts.append(whole[_source(run)])
    return mx.concatenate(parts)


# ── arrays trained as a whole ────────────────────────────────────────────────────────────────────────────────────────


def _whole_arrays(adapter: PeftAdapter, origin: Origin, model: nn.Module) -> dict[str, mx.array]:
    """Raises Mistake for a tensor without a place in the model."""
    whole = _without_tied_head(adapter, origin, model)
    traced = {run.original for runs in origin.traced.values() for run in runs}
    for tensor, array in whole.items():
        shape, called = origin.shapes.get(tensor), shown(tensor, NAME)
        if shape is None or tensor not in traced:
            raise Mistake(SETTING, f"{called} was trained as a whole, and mlx-lm's model has no such array.")
        if array.shape != shape:
            raise Mistake(SETTING, f"{called} is {list(shape)} in the model and {list(array.shape)} in the adapter.")
    own: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    found: dict[str, mx.array] = {}
    for name, runs in origin.traced.items():
        if any(run.original in whole for run in runs):
            tensors = [whole[run.original] if run.original in whole else origin.tensor(run.original) for run in runs]
            rows = [_as_rows(tensor)[_source(run)] for tensor, run in zip(tensors, runs, strict=True)]
            found[name] = mx.concatenate(rows).reshape(own[name].shape)
    return found


def _without_tied_head(adapter: PeftAdapter, origin: Origin, model: nn.Module) -> Mapping[str, mx.array]:
    """The whole tensors, less an output layer that equals the embedding it is tied to. Raises Mistake where training has made two of the
    one: peft trains a copy of a tied embedding by default."""
    whole = adapter.whole
    if not origin.is_tied:
        return whole
    embeddings = [name for name, module in model.named_modules() if isinstance(module, EMBEDDINGS)]
    tied = {run.original for name in embeddings for run in origin.traced.get(f"{name}.weight", ())}
    inputs = [whole[name] for name in whole if name in tied]
    heads = [name for name in whole if name.endswith("lm_head.weight")]
    are_one = bool(inputs) and all(mx.array_equal(whole[name], inputs[0]).item() for name in heads)
    if (inputs or heads) and not (are_one and (heads or adapter.settings.ties_weights)):
        raise Mistake(SETTING, "The embedding or the output layer was trained as a whole apart from the other, and both are one array in this model; "
                               "train them with ensure_weight_tying.")  # fmt: skip
    return {name: array for name, array in whole.items() if name not in heads}


def _as_rows(tensor: mx.array) -> mx.array:
    return tensor.reshape(-1, tensor.shape[-1] if tensor.ndim > 1 else 1)
