"""Adapters in peft's files: read and imported as an mlx-lm adapter folder, verified by logits, and written. Settings
follow `peft.LoraConfig` (peft 0.21); the arrays determine the adapted layers. Unpickles nothing."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import mlx.core as mx
import mlx.nn as nn
import regex
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from backend.config.other_programs.peft import kind_sentence
from backend.export import originals
from backend.export.exports import Progress, silent
from backend.export.originals import Fetch, LowRank, OriginalFiles, RowRun, Trace, by_original, find_original, trace
from backend.export.trained_weights import AdapterFiles, TrainedWeights, open_model
from backend.export.verify import SAMPLES, TOLERANCE, Verification, compare, make_reference
from backend.export.writer import save_arrays, write_safetensors
from backend.models.adapters import adaptable_layers, adapter_about, array_names, whole_modules
from backend.models.model_folder import LARGEST_RANK, PATH, header_of, read_object
from backend.models.tokenizers import load_tokenizer
from backend.utils.disk import whole_folder
from backend.utils.errors import UserError
from backend.utils.files import is_file
from backend.utils.hub_cache import local_folder, split_revision
from backend.utils.safetensors import StoredArray
from backend.utils.text import about_path, excess, quote, shown_path

SETTING = "file"
PREFIX = "base_model.model."  # peft's layer name prefix
ARRAYS, CONFIG, PICKLE = "adapter_model.safetensors", "adapter_config.json", "adapter_model.bin"
NAME = 90  # characters of a layer's name in a message
PATTERN_S = 0.2  # seconds per pattern and name, since `(a|aa)+$` can backtrack for years
FLOATS = ("F32", "F16", "BF16", "F64")
STARTS_FROM_LORA = (True, False, "gaussian", "eva", "orthogonal")  # `init_lora_weights` that leaves the base as it is
OTHER_KINDS = {  # unsupported peft settings → description
    "use_qalora": "groups its inputs (QA-LoRA)",
    "layer_replication": "repeats layers of the model",
    "trainable_token_indices": "trains single rows of the embedding",
    "alora_invocation_tokens": "works only after certain tokens (aLoRA)",
    "lora_bias": "has a bias in B",
    "target_parameters": "adapts parameters that are no layers",
    "arrow_config": "routes between adapters (Arrow)",
    "kasa_config": "changes the base's weights (KaSA)",
    "monteclora_config": "draws its weights at random (MonteCLoRA)",
    "use_bdlora": "has matrices in blocks (BD-LoRA)",
}
_LORA = re.compile(r"(?P<layer>.+)\.lora_(?P<part>A\.weight|B\.weight|magnitude_vector(?:\.weight)?)")


Rank = Annotated[int, Field(ge=1, le=LARGEST_RANK)]
Number = Annotated[float, Field(allow_inf_nan=False)]
_or_empty = BeforeValidator(lambda value: value or {})


class PeftSettings(BaseModel):
    """Settings of an adapter_config.json. Pattern keys match a layer's name or its end."""

    model_config = ConfigDict(strict=True, frozen=True)

    base: str | None = Field("", alias="base_model_name_or_path")
    rank: Rank = Field(8, alias="r")
    alpha: Number = Field(8.0, alias="lora_alpha")
    rank_pattern: Annotated[dict[str, Rank], _or_empty] = {}
    alpha_pattern: Annotated[dict[str, Number], _or_empty] = {}
    uses_rslora: bool | None = Field(False, alias="use_rslora")
    uses_dora: bool | None = Field(False, alias="use_dora")
    dropout: Annotated[Number, AfterValidator(lambda x: min(max(x, 0.0), 0.99))] = Field(0.0, alias="lora_dropout")
    ties_weights: bool | None = Field(False, alias="ensure_weight_tying")  # a trained embedding is the output layer too


def tidy(number: float) -> float:
    """Round to 12 digits if that is only a rounding error away."""
    short = float(f"{number:.12g}")
    return short if math.isclose(short, number, rel_tol=1e-15) else number


def _matching(patterns: Mapping[str, float], layer: str, usual: float) -> float:
    if layer in patterns:
        return patterns[layer]
    for pattern, value in patterns.items():
        if sentence := excess(pattern):
            raise UserError(SETTING, f"The pattern {sentence}")
        try:
            if regex.match(rf"(.*\.)?({pattern})$", layer, timeout=PATTERN_S):
                return value
        except (regex.error, TimeoutError, RecursionError, MemoryError):
            unusable = f"The pattern {quote(pattern, 60)} in adapter_config.json cannot be used."
            raise UserError(SETTING, unusable) from None
    return usual


def read_settings(file: Path) -> PeftSettings:
    """Raises UserError for a file that is not peft's or an unsupported adapter."""
    raw, where = read_object(file, SETTING), quote(file, PATH)
    kind = raw.get("peft_type")
    if kind is None:
        raise UserError(SETTING, f"{where} is no file of peft: it has no peft_type.")
    if kind != "LORA":
        raise UserError(SETTING, about_path(file, f" {kind_sentence(str(kind))}"))
    nothing = "which mlx-lm has nothing for"
    for key, what in OTHER_KINDS.items():
        if raw.get(key):
            raise UserError(SETTING, f"The adapter {what}, {nothing} ({key} in adapter_config.json).")
    if raw.get("bias") not in (None, False, "none"):
        biases = f"The adapter has trained biases of layers, {nothing} (bias {quote(raw['bias'], 30)})."
        raise UserError(SETTING, biases)
    start = raw.get("init_lora_weights", True)
    if start not in STARTS_FROM_LORA:
        began = f"The adapter began with {quote(start, 30)}, which changed the base's weights too"
        raise UserError(SETTING, f"{began}; convert it to LoRA with peft (path_initial_model_for_weight_conversion).")

    try:
        return PeftSettings.model_validate(raw)
    except ValidationError as error:
        wrong = error.errors(include_context=False)[0]
        raise UserError(SETTING, f"{where} has {quote(wrong['loc'][0], 40)} {quote(wrong['input'], 40)}.") from None


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """`layers` by original name; `whole`: original tensors that replace the base's. Lazy float32. `based_on`: weights
    under the adapters, as stored."""

    settings: PeftSettings
    layers: Mapping[str, LowRank]
    whole: Mapping[str, mx.array]
    based_on: Mapping[str, mx.array]


def read_peft_adapter(folder: Path) -> PeftAdapter:
    """Raises UserError naming the file or layer for an incomplete adapter."""
    if not is_file(folder / ARRAYS):
        if is_file(folder / PICKLE):
            pickle = f"{quote(folder / PICKLE, PATH)} is a pickle, which can run code when it is opened"
            raise UserError(SETTING, f"{pickle}; save the adapter as safetensors with peft.")
        raise UserError(SETTING, f"{quote(folder, PATH)} is no adapter of peft: it has no {ARRAYS}.")
    settings = read_settings(folder / CONFIG)
    header = header_of(folder / ARRAYS, SETTING)
    parts, whole = _sorted_by_layer(header)
    arrays: Any = mx.load(str(folder / ARRAYS))
    read = {name: array.astype(mx.float32) for name, array in arrays.items()}
    layers: dict[str, LowRank] = {}
    for layer, found in parts.items():
        adapter = f"The adapter of {quote(layer, NAME)}"
        wanted = ["A", "B", *(["magnitude"] if settings.uses_dora else [])]
        if missing := [part for part in wanted if part not in found]:
            raise UserError(SETTING, f"{adapter} is not whole: its {missing[0]} is missing.")
        if "magnitude" in found and not settings.uses_dora:
            raise UserError(SETTING, f"{adapter} has a magnitude, and adapter_config.json says that it is no DoRA.")
        a, b = header[found["A"]].shape, header[found["B"]].shape
        rank = int(_matching(settings.rank_pattern, layer, settings.rank))
        if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
            raise UserError(SETTING, f"{adapter} is A {list(a)} and B {list(b)}, and its rank is {rank}.")
        if settings.uses_dora and (length := header[found["magnitude"]].shape) != (b[0],):
            raise UserError(SETTING, f"The magnitude of {quote(layer, NAME)} is {list(length)}, and B has {b[0]} rows.")
        alpha = _matching(settings.alpha_pattern, layer, settings.alpha)
        scale = tidy(alpha / (math.sqrt(rank) if settings.uses_rslora else rank))
        magnitude = read[found["magnitude"]] if settings.uses_dora else None
        layers[layer] = LowRank(read[found["A"]][None], read[found["B"]], magnitude, scale)
    based_on = {f"{layer}.weight": arrays[found["base"]] for layer, found in parts.items() if "base" in found}
    return PeftAdapter(settings, layers, {name: read[stored] for name, stored in whole.items()}, based_on)


def merged_model(adapter: PeftAdapter, original: OriginalFiles) -> nn.Module:
    """The original model with merged adapters: base + scale · B A, with DoRA's magnitudes."""
    arrays = original.arrays()
    for name, layer in adapter.layers.items():
        arrays[f"{name}.weight"] = layer.merged(arrays[f"{name}.weight"].astype(mx.float32))
    # A module trained as a whole has the type of the model that it is loaded into.
    arrays |= {name: array.astype(arrays[name].dtype) for name, array in adapter.whole.items() if name in arrays}
    return original.open_with(arrays)


def _sorted_by_layer(header: Mapping[str, StoredArray]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    layers: dict[str, dict[str, str]] = {}
    whole: dict[str, str] = {}
    # peft saves the weight of an adapted embedding or output layer too: its adapter comes first here.
    for stored, about in sorted(header.items(), key=lambda item: ".lora_" not in item[0]):
        if not stored.startswith(PREFIX):
            raise UserError(SETTING, f"{ARRAYS} holds {quote(stored, NAME)}, which does not begin with {PREFIX}.")
        if about.dtype not in FLOATS:
            raise UserError(SETTING, f"{ARRAYS} stores {quote(stored, NAME)} as {about.dtype}, which is no float.")
        name = stored.removeprefix(PREFIX)
        if found := _LORA.fullmatch(name):
            part = found["part"].partition("_")[0].removesuffix(".weight")
            layers.setdefault(found["layer"], {})[part] = stored
        elif "lora_" in name:
            kind = f"is of a kind that mlx-lm has nothing for ({quote(name.rpartition('.lora_')[2], 30)})"
            raise UserError(SETTING, f"The adapter of {quote(name.partition('.lora_')[0], NAME)} {kind}.")
        elif (layer := name.removesuffix(".base_layer.weight")) in layers:
            layers[layer]["base"] = stored
        elif ".base_layer." in name:
            bias = "was trained beside the adapters (peft's bias), which mlx-lm has nothing for"
            raise UserError(SETTING, f"{quote(name.replace('.base_layer', ''), NAME)} {bias}.")
        else:
            whole[name.replace(".modules_to_save", "")] = stored
    if not layers and not whole:
        raise UserError(SETTING, f"{ARRAYS} holds no adapter.")
    return layers, whole


@dataclass(frozen=True, slots=True)
class Origin:
    """Original `shapes`, the trace, and local files if any. `is_tied`: the output layer is the embedding."""

    shapes: Mapping[str, tuple[int, ...]]
    traced: Trace
    files: OriginalFiles | None
    is_tied: bool

    def tensor(self, name: str) -> mx.array:
        """An original tensor, float32. Raises UserError without the files."""
        if self.files is None:
            needed = f"The original weights are needed for {quote(name, 90)}, and are not on this disk"
            raise UserError(SETTING, f"{needed}; give --fetch.")
        return self.files.arrays()[name].astype(mx.float32)


def origin_of(
    base: Path, name: str, model: nn.Module, config: Mapping[str, Any], layers: Iterable[str], fetch: Fetch | None
) -> Origin:
    """`layers`: of the adapter; `fetch` downloads original weights. Raises UserError if the origin is unknown."""
    files = None
    try:
        files = find_original(base, name, fetch)
    except UserError:
        # Without the originals, the adapter's names may be those of the model's own layers.
        arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
        shapes = {name: array.shape for name, array in arrays.items() if array.ndim}
        for name, module in model.named_modules():
            if isinstance(module, nn.QuantizedLinear):
                rows, packed = module.weight.shape
                shapes[f"{name}.weight"] = (rows, packed * 32 // module.bits)
        if fetch is not None or any(f"{layer}.weight" not in shapes for layer in layers):
            raise
        traced = {name: [RowRun(name, 0, name, 0, math.prod(shape[:-1] or shape))] for name, shape in shapes.items()}
    else:
        shapes, traced = files.shapes, trace(files)
    return Origin(shapes, traced, files, is_tied(config, traced))


def is_tied(config: Mapping[str, Any], traced: Trace) -> bool:
    """True if the output layer is the embedding, transformers' default."""
    text: Mapping[str, Any] = config.get("text_config") or config
    has_head = any(name.endswith("lm_head.weight") for name in traced)
    return bool(text.get("tie_word_embeddings", True)) and not has_head


LINEAR, EXPERTS = (nn.Linear, nn.QuantizedLinear), (SwitchLinear, QuantizedSwitchLinear)
EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)


@dataclass(frozen=True, slots=True)
class ImportedAdapter:
    """The new folder, its difference from peft's merged model, None without the original weights, and messages."""

    path: Path
    verification: Verification | None
    sentences: list[str]


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
    if to.exists() and not is_file(to / "adapters.safetensors"):
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
    with whole_folder(to) as draft:
        files, verification = AdapterFiles.within(draft), None
        save_arrays(files.arrays, carried.arrays())
        files.config.write_text(json.dumps(about, indent=2), encoding="utf-8")
        progress("Loading it back and comparing.")
        TrainedWeights(base, str(base), base, files).open()
        if (original := origin.files) is not None:
            trained = TrainedWeights(original.folder, original.name, base, files, untrained=original.folder)
            reference = make_reference(trained, load_tokenizer(base), SAMPLES, TOLERANCE["float32"])
            verification = compare(draft, reference, lambda: merged_model(adapter, original))
    return ImportedAdapter(to, verification, list(_sentences(adapter, carried, origin, name, verification)))


def _sentences(
    adapter: PeftAdapter, carried: CarriedAdapter, origin: Origin, name: str, verification: Verification | None
) -> Iterator[str]:
    compared = ""
    if verification is not None:
        differ = "the model's logits differ from those of what peft merges by"
        compared = f"; {differ} {verification.max_error:.1g} at most"
    yield f"{len(carried.layers)} layers have adapters{compared}."
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
    tensors = {f"{name}.weight": layer.scaled(scale) for name, layer in adapter.layers.items()}
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
    for name, array in adapter.based_on.items():
        if not mx.array_equal(array, origin.tensor(name).astype(array.dtype)):
            raise UserError(SETTING, f"The adapter was trained on another {quote(name, NAME)} than the model's.")


def _carried(runs: list[RowRun], tensors: Mapping[str, LowRank], origin: Origin, experts: int, scale: float) -> LowRank:
    rows = sum(run.count for run in runs) // (experts or 1)
    parts: list[tuple[mx.array, mx.array]] = []
    for first in range(0, rows * (experts or 1), rows):  # every expert is an original: no run reaches over two of them
        own = [run for run in runs if first <= run.start < first + rows and run.original in tensors]
        parts.append(LowRank.joined([(run.start - first, tensors[run.original], run.source) for run in own], rows))
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
    modules = whole_modules(model, list(dict.fromkeys(array.rpartition(".")[0] for array in carried.whole)))
    if lost := sorted(array_names(model, modules) - carried.whole.keys()):
        raise UserError(SETTING, f"{quote(lost[0], 90)} is missing, and the rest of its module was trained as a whole.")
    trained: Any = SimpleNamespace(rank=carried.rank, scale=carried.scale, lora_alpha=None, dropout=settings.dropout)
    trained.train_type, trained.use_rslora = "dora" if settings.uses_dora else "lora", settings.uses_rslora
    # mlx-lm's `num_layers` and `keys`, [] for all; full names if layers differ
    adapted = set(carried.layers)
    layers: list[nn.Module] = model.layers  # pyright: ignore
    full = {id(module): f"{name}." for name, module in model.named_modules()}
    prefixes = [full[id(layer)] for layer in layers]
    within = [{name.removeprefix(prefix) for name in adapted if name.startswith(prefix)} for prefix in prefixes]
    outside = sorted(name for name in adapted if not name.startswith(tuple(prefixes)))
    keys = set[str]().union(*within)
    count = next((len(layers) - at for at, names in enumerate(within) if names), len(layers))
    first = len(layers) - count
    last = [(names, set(adaptable_layers(layer))) for names, layer in zip(within, layers, strict=True)][first:]
    named = [*sorted(keys), *outside]
    if any(names != keys & adaptable for names, adaptable in last):
        count, named = len(layers), sorted(adapted)
    elif not outside and all(names == adaptable for names, adaptable in last):
        named = []
    return adapter_about(trained, name, count, named, [*modules])


# Writing

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"  # transformers' names of the embedding and output layer
MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")  # of whose layers peft refuses out_proj
MERGE_INSTEAD = "choose another format, which merges the adapter into the weights"


def write_peft_adapter(trained: TrainedWeights, original: OriginalFiles, to: Path) -> None:
    """Write the adapters and a README into a new folder. Raises UserError for a layer that peft does not support."""
    assert trained.adapters is not None
    learned, traced = originals.trained_rows(trained), trace(original)
    _check_names(original, learned.adapters, traced)
    weights, shapes = original.arrays(), original.shapes
    layers = {
        name.removesuffix(".weight"): _layer(runs, learned.adapters, shapes[name], weights[name])
        for name, runs in by_original(run for array in learned.adapters for run in traced[array]).items()
    }
    to.mkdir(parents=True)
    arrays: dict[str, mx.array] = {}
    for name, layer in layers.items():
        arrays[f"{PREFIX}{name}.lora_A.weight"] = layer.a[0].astype(mx.float32)
        arrays[f"{PREFIX}{name}.lora_B.weight"] = layer.b.astype(mx.float32)
        if layer.magnitude is not None:
            arrays[f"{PREFIX}{name}.lora_magnitude_vector"] = layer.magnitude.astype(mx.float32)
    if lost := sorted(learned.arrays.keys() - traced.keys()):
        unknown = f"Which of the original weights {lost[0]} comes from could not be found out"
        raise UserError("format", f"{unknown}; {MERGE_INSTEAD}.")
    runs = by_original(run for array in learned.arrays for run in traced[array])
    whole = {name: originals.merged(weights[name].astype(mx.float32), own, learned) for name, own in runs.items()}
    if is_tied(original.config, traced) and (inputs := [name for name in whole if name.endswith(EMBEDDING)]):
        # peft unties a module that is trained as a whole: the output layer would stay the base's.
        whole[HEAD] = whole[inputs[0]]
    arrays |= {f"{PREFIX}{name}": tensor for name, tensor in whole.items()}
    write_safetensors(to / ARRAYS, arrays, metadata={"format": "pt"})
    config = _config(original.name, layers, trained.adapters.about())
    config["modules_to_save"] = sorted({name.rpartition(".")[0] for name in whole}) or None
    (to / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (base, revision), kind = split_revision(original.name), "DoRA" if config["use_dora"] else "LoRA"
    of_base = f'"{base}"' + (f', revision="{revision}"' if revision else "")
    class_ = "AutoModelForImageTextToText" if "vision_config" in original.config else "AutoModelForCausalLM"
    (to / "README.md").write_text(
        f"---\nbase_model: {base}\nlibrary_name: peft\n---\n\n"
        f"{kind} adapters for {original.name}, trained with GRPO Studio.\n\n"
        f"```python\nfrom peft import PeftModel\nfrom transformers import {class_}\n\n"
        f'model = PeftModel.from_pretrained({class_}.from_pretrained({of_base}), ".")\n```\n',
        encoding="utf-8",
    )


def _check_names(original: OriginalFiles, adapters: Mapping[str, LowRank], traced: Trace) -> None:
    for array, adapter in sorted(adapters.items()):
        layer = array.removesuffix(".weight")
        if array not in traced:
            unknown = f"Which of the original weights {layer} comes from could not be found out"
            raise UserError("format", f"{unknown}; choose mlx-lm's adapter.")
        if not adapter.is_linear:
            odd = f"{layer} is no plain linear layer, and peft's adapters would not do"
            raise UserError("format", f"{odd}; {MERGE_INSTEAD}.")
        for run in traced[array]:
            module = run.original.removesuffix(".weight")
            if module.endswith(".out_proj") and original.config.get("model_type") in MAMBA:
                raise UserError("format", f"peft refuses adapters of Mamba's {module}; {MERGE_INSTEAD}.")
            # transformers 5 holds experts, and the layer that chooses among them, as parameters.
            if any(name.startswith(f"{module.rpartition('.')[0]}.experts.") for name in original.shapes):
                raise UserError("format", f"transformers has no linear layer {module} for an adapter; {MERGE_INSTEAD}.")
            if module.startswith("language_model."):
                raise UserError("format", f"transformers renames {module} when it loads this model; {MERGE_INSTEAD}.")


def _layer(runs: list[RowRun], adapters: Mapping[str, LowRank], shape: tuple[int, ...], weight: mx.array) -> LowRank:
    # One alpha / r for the whole layer, so each adapter is brought to the first one's scale.
    scale = adapters[runs[0].array].scale
    scaled = {array: adapters[array].scaled(scale) for array in dict.fromkeys(run.array for run in runs)}
    taken = [slice(run.start, run.start + run.count) for run in runs]
    parts = [(run.original_start, scaled[run.array], rows) for run, rows in zip(runs, taken, strict=True)]
    a, b = LowRank.joined(parts, shape[0])
    magnitude = None
    if adapters[runs[0].array].magnitude is not None:
        magnitude = mx.linalg.norm(weight.astype(mx.float32), axis=1)  # rows without an adapter keep their length
        for run, rows in zip(runs, taken, strict=True):
            if (learned := scaled[run.array].magnitude) is not None:
                magnitude[run.source] = learned[rows]
    return LowRank(a[None], b, magnitude, scale)


def _config(base: str, layers: Mapping[str, LowRank], about: Mapping[str, Any]) -> dict[str, Any]:
    """`about` is mlx-lm's. alpha is scale · rank, with rsLoRA scale · √rank. Full layer names keep others out."""
    ranks = {name: layer.rank for name, layer in layers.items()}
    usual = min(ranks.values())
    others = {name: rank for name, rank in ranks.items() if rank != usual}
    scale, rslora = next(iter(layers.values())).scale, about.get("use_rslora") is True
    alphas = {rank: tidy(scale * (math.sqrt(rank) if rslora else rank)) for rank in ranks.values()}
    # As an integer where it is one, as peft itself writes alpha.
    alphas = {rank: int(alpha) if alpha == int(alpha) else alpha for rank, alpha in alphas.items()}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": split_revision(base)[0],
        "revision": split_revision(base)[1],
        "inference_mode": True,
        "r": usual,
        "lora_alpha": alphas[usual],
        "bias": "none",
        "lora_dropout": about["lora_parameters"].get("dropout", 0.0),
        "target_modules": sorted(layers),
        "rank_pattern": others,
        "alpha_pattern": {name: alphas[rank] for name, rank in others.items()},
        "use_dora": any(layer.magnitude is not None for layer in layers.values()),
        "use_rslora": rslora,
        "fan_in_fan_out": False,
        **dict.fromkeys(("modules_to_save", "layers_to_transform", "layers_pattern")),
    }
