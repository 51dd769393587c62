"""Import a peft adapter as an mlx-lm adapter folder, verified by logits: the inverse of
`backend.export.peft_export`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from backend.export.exports import Progress, silent
from backend.export.original_files import Fetch
from backend.export.original_rows import LowRank, RowRun, by_original
from backend.export.trained_weights import AdapterFiles, TrainedWeights, open_model
from backend.export.verify import SAMPLES, TOLERANCE, Verification, compare, make_reference
from backend.models.adapters import adaptable_layers, array_names, whole_modules
from backend.models.peft_files import (
    NAME,
    SETTING,
    Origin,
    PeftAdapter,
    PeftSettings,
    merged_model,
    origin_of,
    read_peft_adapter,
)
from backend.models.saving import save_arrays
from backend.models.tokenizers import load_tokenizer
from backend.utils.disk import whole_folder, writing
from backend.utils.errors import UserError
from backend.utils.files import is_file
from backend.utils.hub_cache import local_folder
from backend.utils.text import quote, shown_path

ARRAYS, CONFIG = "adapters.safetensors", "adapter_config.json"
LINEAR, EXPERTS = (nn.Linear, nn.QuantizedLinear), (SwitchLinear, QuantizedSwitchLinear)
EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)


@dataclass(frozen=True, slots=True)
class ImportedAdapter:
    """The new folder and its difference from peft's merged model; None without the original weights."""

    path: Path
    layers: int
    verification: Verification | None
    notes: tuple[str, ...]

    def sentences(self) -> tuple[str, ...]:
        compared = ""
        if self.verification is not None:
            differ = "the model's logits differ from those of what peft merges by"
            compared = f"; {differ} {self.verification.max_error:.1g} at most"
        return f"{self.layers} layers have adapters{compared}.", *self.notes


def import_adapter(
    folder: Path,
    model_name: str,
    to: Path,
    *,
    overwrite: bool = False,
    fetch: Fetch | None = None,
    progress: Progress = silent,
) -> ImportedAdapter:
    """Import the adapter in `folder` onto `model_name` ("" for its own base) into the folder `to`. Raises UserError
    naming an unsupported layer, RuntimeError if the result differs from peft's model; neither leaves a folder."""
    if to.exists() and not overwrite:
        raise UserError("output", f"{quote(to)} is there already; take another name, or --overwrite.")
    if to.exists() and not is_file(to / ARRAYS):
        raise UserError("output", f"{quote(to)} is no folder of an adapter, so it is not replaced.")
    adapter = read_peft_adapter(folder)
    name = model_name or adapter.settings.base or ""
    base = local_folder(name) if name else None
    if base is None:
        called = shown_path(name, 60) or "of the adapter"
        raise UserError("model", f"The model {called} is not on this disk; name one that is with --model.")
    model, config = open_model(base)
    origin = origin_of(base, name, model, config, adapter.layers, fetch)
    progress("Carrying the adapter onto the model.")
    carried = carried_adapter(adapter, origin, model)
    about = _adapter_config(name, carried, adapter.settings, model)
    with writing(to, also_computes=True), whole_folder(to) as draft:
        save_arrays(draft / ARRAYS, carried.arrays())
        (draft / CONFIG).write_text(json.dumps(about, indent=2), encoding="utf-8")
        progress("Loading it back and comparing.")
        files, verification = AdapterFiles(draft / ARRAYS, draft / CONFIG), None
        TrainedWeights(base, str(base), base, files).open()
        if (original := origin.files) is not None:
            trained = TrainedWeights(original.folder, original.name, base, files, untrained=original.folder)
            reference = make_reference(trained, load_tokenizer(base), SAMPLES, TOLERANCE["float32"])
            verification = compare(draft, reference, lambda: merged_model(adapter, original))
    return ImportedAdapter(to, len(carried.layers), verification, tuple(_notes(adapter, carried, origin, name)))


def _notes(adapter: PeftAdapter, carried: CarriedAdapter, origin: Origin, name: str) -> Iterator[str]:
    base = adapter.settings.base
    if base and base != name:
        yield f"The adapter was trained on {quote(base, 60)}; it is now for {quote(name, 60)}."
    if len(ranks := {layer.rank for layer in carried.layers.values()}) > 1:
        now = f"ranks of {min(ranks)} to {max(ranks)} are now {max(ranks)}, filled up with what changes nothing"
        yield f"mlx-lm has one rank for all layers: {now}."
    if len(scales := {layer.scale for layer in adapter.layers.values()}) > 1:
        now = f"{len(scales)} scales are now {carried.scale:g}, the rest of them in the arrays"
        yield f"mlx-lm has one scale for all layers: {now}."
    if carried.whole:
        who = "which runs and exports of GRPO Studio have and mlx-lm's own programs refuse"
        yield f"It holds whole modules beside the adapters, {who}."
    if origin.files is None:
        taken = "the adapter's names were taken for those of the model's layers, and no logits compared"
        yield f"The original weights of {quote(name, 60)} are not on this disk: {taken}; --fetch does both."


@dataclass(frozen=True, slots=True)
class CarriedAdapter:
    """Adapters by mlx-lm layer at one scale, and wholly trained float32 arrays."""

    scale: float
    layers: Mapping[str, LowRank]
    whole: Mapping[str, mx.array]

    @property
    def rank(self) -> int:
        return max((layer.rank for layer in self.layers.values()), default=1)

    def arrays(self) -> dict[str, mx.array]:
        """By mlx-lm name: A [in, r] and B [r, out], for experts [E, r, in] and [E, out, r]."""
        arrays: dict[str, mx.array] = dict(self.whole)
        for name, layer in self.layers.items():
            a, b = wider(layer.a, layer.b, self.rank)
            arrays[f"{name}.lora_a"] = a[0].T if layer.is_linear else a
            arrays[f"{name}.lora_b"] = b.T if layer.is_linear else b.reshape(len(a), -1, self.rank)
            if layer.magnitude is not None:
                arrays[f"{name}.m"] = layer.magnitude
        return {name: mx.contiguous(array) for name, array in arrays.items()}


def carried_adapter(adapter: PeftAdapter, origin: Origin, model: nn.Module) -> CarriedAdapter:
    """`model` is mlx-lm's, without adapters. Raises UserError naming a layer without a counterpart."""
    _check_places(adapter, origin)
    scale = Counter(layer.scale for layer in adapter.layers.values()).most_common(1)[0][0] if adapter.layers else 1.0
    tensors = {
        f"{name}.weight": layer
        if layer.scale == scale
        else replace(layer, b=(layer.scale / scale) * layer.b, scale=scale)
        for name, layer in adapter.layers.items()
    }
    modules = dict(model.named_modules())
    carried: dict[str, LowRank] = {}
    for array, runs in sorted(origin.traced.items()):
        if not any(run.original in tensors for run in runs):
            continue
        name, _, kind = array.rpartition(".")
        module = modules.get(name)
        source = quote(runs[0].original.removesuffix(".weight"), NAME)
        if kind != "weight" or not isinstance(module, LINEAR + EXPERTS):
            raise UserError(SETTING, f"{source} is no linear layer in mlx-lm, so its adapter has no place.")
        is_experts = isinstance(module, EXPERTS)
        if is_experts and adapter.settings.uses_dora:
            raise UserError(SETTING, f"{source} belongs to experts, for which mlx-lm has no DoRA.")
        experts: int = module.weight.shape[0] if is_experts else 0  # pyright: ignore
        carried[name] = _carried(runs, tensors, origin, experts, scale)
    return CarriedAdapter(scale, carried, _whole_arrays(adapter, origin, model))


def _check_places(adapter: PeftAdapter, origin: Origin) -> None:
    sources = by_original(run for runs in origin.traced.values() for run in runs)
    for layer, found in adapter.layers.items():
        tensor, called = f"{layer}.weight", quote(layer, NAME)
        shape, given = origin.shapes.get(tensor), (found.b.shape[0], found.a.shape[2])
        if shape is None:
            raise UserError(SETTING, f"The model has no layer {called}, and the adapter is for one.")
        if shape != given:
            raise UserError(SETTING, f"{called} is {list(shape)} in the model, and its adapter is for {list(given)}.")
        if sum(run.count for run in sources.get(tensor, ())) < shape[0]:
            raise UserError(SETTING, f"{called} has no place in mlx-lm's model as it is, so its adapter has none.")
        if not all(mx.all(mx.isfinite(part)).item() for part in (found.a, found.b)):
            raise UserError(SETTING, f"The adapter of {called} holds numbers that are not finite.")
    for name, shape in origin.shapes.items():
        layer = name.removesuffix(".weight")
        is_linear = len(shape) == 2 and name.endswith(".weight") and name in sources
        if is_linear and layer not in adapter.layers and adapter.settings.means(layer):
            raise UserError(SETTING, f"The adapter of {quote(layer, NAME)} is missing, and target_modules names it.")


def _carried(runs: list[RowRun], tensors: Mapping[str, LowRank], origin: Origin, experts: int, scale: float) -> LowRank:
    rows = sum(run.count for run in runs) // (experts or 1)
    # Every expert is an original of its own, so no run reaches over two of them.
    parts = [_low_rank([run for run in runs if run.start // rows == part], tensors) for part in range(experts or 1)]
    rank, width = max(a.shape[0] for a, _ in parts), origin.shapes[runs[0].original][-1]
    equal = [wider(a.reshape(-1, width), b, rank) for a, b in parts]
    magnitude = None
    if any(layer.magnitude is not None for layer in tensors.values()):
        # The length of every row; rows of originals without an adapter keep theirs.
        lengths: list[mx.array] = []
        for run in runs:
            learned = tensors[run.original].magnitude if run.original in tensors else None
            length = mx.linalg.norm(origin.tensor(run.original), axis=1) if learned is None else learned
            lengths.append(length[run.source])
        magnitude = mx.concatenate(lengths)
    a, b = mx.stack([a for a, _ in equal]), mx.concatenate([b for _, b in equal])
    return LowRank(a, b, magnitude, scale, is_linear=not experts)


def _low_rank(runs: list[RowRun], tensors: Mapping[str, LowRank]) -> tuple[mx.array, mx.array]:
    """A [r, in] and B [rows, r]. Originals with equal A share it; those without an adapter have zeros in B."""
    shared: list[mx.array] = []
    place: dict[str, int] = {}
    for name in dict.fromkeys(run.original for run in runs if run.original in tensors):
        same = (at for at, other in enumerate(shared) if mx.array_equal(tensors[name].a[0], other).item())
        place[name] = next(same, len(shared))
        shared += [tensors[name].a[0]] if place[name] == len(shared) else []
    starts = [sum(a.shape[0] for a in shared[:at]) for at in range(len(shared) + 1)]
    b = mx.zeros((sum(run.count for run in runs), starts[-1]))
    for run in runs:
        if run.original in place:
            here, at = slice(run.start - runs[0].start, run.start - runs[0].start + run.count), place[run.original]
            b[here, starts[at] : starts[at + 1]] = tensors[run.original].b[run.source]
    return mx.concatenate(shared) if shared else mx.zeros((0, 0)), b


def wider(a: mx.array, b: mx.array, rank: int) -> tuple[mx.array, mx.array]:
    """Widen A [.., r, in] and B [.., out, r] to `rank` without changing B A: new columns of B are zero."""
    missing = rank - a.shape[-2]
    if not missing:
        return a, b
    bound = a.shape[-1] ** -0.5
    new = mx.random.uniform(-bound, bound, (*a.shape[:-2], missing, a.shape[-1]), key=mx.random.key(0))
    return mx.concatenate([a, new], axis=-2), mx.concatenate([b, mx.zeros((*b.shape[:-1], missing))], axis=-1)


def _whole_arrays(adapter: PeftAdapter, origin: Origin, model: nn.Module) -> dict[str, mx.array]:
    whole = dict(adapter.whole)
    if origin.is_tied:  # by default peft trains a copy of a tied embedding
        embeddings = [name for name, module in model.named_modules() if isinstance(module, EMBEDDINGS)]
        tied = {run.original for name in embeddings for run in origin.traced.get(f"{name}.weight", ())}
        inputs = [array for name, array in whole.items() if name in tied]
        heads = [whole.pop(name) for name in list(whole) if name.endswith("lm_head.weight")]
        are_one = bool(inputs) and all(mx.array_equal(head, inputs[0]).item() for head in heads)
        if (inputs or heads) and not (are_one and (heads or adapter.settings.ties_weights)):
            apart = "The embedding or the output layer was trained as a whole apart from the other"
            one = "both are one array in this model; train them with ensure_weight_tying"
            raise UserError(SETTING, f"{apart}, and {one}.")
    traced = {run.original for runs in origin.traced.values() for run in runs}
    for tensor, array in whole.items():
        shape, called = origin.shapes.get(tensor), quote(tensor, NAME)
        if shape is None or tensor not in traced:
            raise UserError(SETTING, f"{called} was trained as a whole, and mlx-lm's model has no such array.")
        if array.shape != shape:
            raise UserError(SETTING, f"{called} is {list(shape)} in the model and {list(array.shape)} in the adapter.")
    own: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    found: dict[str, mx.array] = {}
    for name, runs in origin.traced.items():
        if any(run.original in whole for run in runs):
            rows: list[mx.array] = []
            for run in runs:
                tensor = whole[run.original] if run.original in whole else origin.tensor(run.original)
                rows.append(tensor.reshape(-1, tensor.shape[-1] if tensor.ndim > 1 else 1)[run.source])
            found[name] = mx.concatenate(rows).reshape(own[name].shape)
    return found


def _adapter_config(name: str, carried: CarriedAdapter, settings: PeftSettings, model: nn.Module) -> dict[str, Any]:
    count, keys = _layers_and_keys(model, set(carried.layers))
    parameters = {"rank": carried.rank, "scale": carried.scale, "dropout": settings.dropout}
    about: dict[str, Any] = {
        "fine_tune_type": "dora" if settings.uses_dora else "lora",
        "model": name,
        "num_layers": count,
        "lora_parameters": parameters | ({"keys": keys} if keys else {}),
    }
    if settings.uses_rslora:
        about["use_rslora"] = True
    if carried.whole:
        modules = whole_modules(model, list(dict.fromkeys(array.rpartition(".")[0] for array in carried.whole)))
        if lost := sorted(array_names(model, modules) - carried.whole.keys()):
            missing = f"{quote(lost[0], 90)} is missing, and the rest of its module was trained as a whole."
            raise UserError(SETTING, missing)
        about["modules_to_save"] = list(modules)
    return about


def _layers_and_keys(model: nn.Module, adapted: set[str]) -> tuple[int, list[str]]:
    """mlx-lm's `num_layers` and `keys` for exactly these layers; [] for all. Full names if layers are adapted
    differently."""
    layers: list[nn.Module] = model.layers  # pyright: ignore
    full = {id(module): f"{name}." for name, module in model.named_modules()}
    prefixes = [full[id(layer)] for layer in layers]
    within = [{name.removeprefix(prefix) for name in adapted if name.startswith(prefix)} for prefix in prefixes]
    outside = sorted(name for name in adapted if not name.startswith(tuple(prefixes)))
    keys = set[str]().union(*within)
    count = next((len(layers) - at for at, names in enumerate(within) if names), len(layers))
    first = len(layers) - count
    last = [(names, set(adaptable_layers(layer))) for names, layer in zip(within, layers, strict=True)][first:]
    if any(names != keys & adaptable for names, adaptable in last):
        return len(layers), sorted(adapted)
    if not outside and all(names == adaptable for names, adaptable in last):
        return count, []
    return count, [*sorted(keys), *outside]
