"""Read a peft adapter and match its layers with mlx-lm's model. Settings follow `peft.LoraConfig` (peft 0.21); the
arrays determine the adapted layers. Unpickles nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import mlx.nn as nn
import regex
from mlx.utils import tree_flatten
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from backend.config.other_programs.peft import kind_sentence
from backend.export.original_files import Fetch, OriginalFiles, find_original
from backend.export.original_rows import LowRank, RowRun, Trace, trace
from backend.models.architectures import is_named
from backend.models.model_folder import LARGEST_RANK, PATH, header_of, read_object
from backend.utils.errors import UserError
from backend.utils.files import is_file
from backend.utils.safetensors import StoredArray
from backend.utils.text import about_path, excess, quote

SETTING = "file"
PREFIX = "base_model.model."
"""peft's layer name prefix."""
ARRAYS, CONFIG, PICKLE = "adapter_model.safetensors", "adapter_config.json", "adapter_model.bin"
NAME = 90
"""Characters of a layer's name in a message."""
PATTERN_S = 0.2
"""Seconds per pattern and name, since `(a|aa)+$` can backtrack for years."""
FLOATS = ("F32", "F16", "BF16", "F64")
STARTS_FROM_LORA = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that do not change the base."""
OTHER_KINDS = {
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
"""Unsupported peft settings → description."""
_LORA = re.compile(r"(?P<layer>.+)\.lora_(?P<part>A\.weight|B\.weight|magnitude_vector(?:\.weight)?)")


Rank = Annotated[int, Field(ge=1, le=LARGEST_RANK)]
Number = Annotated[float, Field(allow_inf_nan=False)]
_or_empty_list, _or_empty_dict = BeforeValidator(lambda value: value or []), BeforeValidator(lambda value: value or {})
Names = Annotated[list[str] | str, _or_empty_list]
"""Names, or a pattern."""


class PeftSettings(BaseModel):
    """Settings of an adapter_config.json. Pattern keys match a layer's name or its end."""

    model_config = ConfigDict(strict=True, frozen=True)

    base: str | None = Field("", alias="base_model_name_or_path")
    rank: Rank = Field(8, alias="r")
    alpha: Number = Field(8.0, alias="lora_alpha")
    rank_pattern: Annotated[dict[str, Rank], _or_empty_dict] = {}
    alpha_pattern: Annotated[dict[str, Number], _or_empty_dict] = {}
    uses_rslora: bool | None = Field(False, alias="use_rslora")
    uses_dora: bool | None = Field(False, alias="use_dora")
    dropout: Annotated[Number, AfterValidator(lambda x: min(max(x, 0.0), 0.99))] = Field(0.0, alias="lora_dropout")
    targets: Names = Field([], alias="target_modules")
    excluded: Names = Field([], alias="exclude_modules")
    layers: int | list[int] | None = Field(None, alias="layers_to_transform")
    modules_to_save: Annotated[list[str], _or_empty_list] = []
    ties_weights: bool | None = Field(False, alias="ensure_weight_tying")
    """A trained embedding is also the output layer if tied."""

    def rank_of(self, layer: str) -> int:
        return int(_matching(self.rank_pattern, layer, self.rank))

    def scale_of(self, layer: str) -> float:
        """alpha / rank, with rsLoRA alpha / √rank, of one layer."""
        rank, alpha = self.rank_of(layer), _matching(self.alpha_pattern, layer, self.alpha)
        return tidy(alpha / (math.sqrt(rank) if self.uses_rslora else rank))

    def means(self, layer: str) -> bool:
        """True if `target_modules` names this layer; False for patterns."""
        if isinstance(self.targets, str) or isinstance(self.excluded, str):
            return False
        parts = layer.split(".")
        parents = (".".join(parts[: end + 1]) for end in range(len(parts)))
        if not is_named(layer, self.targets) or is_named(layer, self.excluded):
            return False
        if any(is_named(parent, self.modules_to_save) for parent in parents):
            return False
        number = next((int(part) for part in parts if part.isdigit()), None)
        return not self.layers or number in ([self.layers] if isinstance(self.layers, int) else self.layers)


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
    """`layers` by original name; `whole`: original tensors that replace the base's. Lazy float32."""

    settings: PeftSettings
    layers: Mapping[str, LowRank]
    whole: Mapping[str, mx.array]


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
    for layer, found in parts.items():
        adapter = f"The adapter of {quote(layer, NAME)}"
        wanted = ["A", "B", *(["magnitude"] if settings.uses_dora else [])]
        if missing := [part for part in wanted if part not in found]:
            raise UserError(SETTING, f"{adapter} is not whole: its {missing[0]} is missing.")
        if "magnitude" in found and not settings.uses_dora:
            raise UserError(SETTING, f"{adapter} has a magnitude, and adapter_config.json says that it is no DoRA.")
        a, b, rank = header[found["A"]].shape, header[found["B"]].shape, settings.rank_of(layer)
        if len(a) != 2 or len(b) != 2 or a[0] != rank or b[1] != rank:
            raise UserError(SETTING, f"{adapter} is A {list(a)} and B {list(b)}, and its rank is {rank}.")
        if "magnitude" in found and (magnitude := header[found["magnitude"]].shape) != (b[0],):
            has = f"is {list(magnitude)}, and B has {b[0]} rows"
            raise UserError(SETTING, f"The magnitude of {quote(layer, NAME)} {has}.")
    try:
        arrays: Any = mx.load(str(folder / ARRAYS))
    except RuntimeError as error:
        raise UserError(SETTING, f"{quote(folder / ARRAYS, PATH)} cannot be read: {quote(error, 60)}.") from None
    read = {name: array.astype(mx.float32) for name, array in arrays.items()}
    layers: dict[str, LowRank] = {}
    for layer, found in parts.items():
        magnitude = read[found["magnitude"]] if "magnitude" in found else None
        layers[layer] = LowRank(read[found["A"]][None], read[found["B"]], magnitude, settings.scale_of(layer))
    return PeftAdapter(settings, layers, {name: read[stored] for name, stored in whole.items()})


def merged_model(adapter: PeftAdapter, original: OriginalFiles) -> nn.Module:
    """The original model with merged adapters: base + scale · B A, with DoRA's magnitudes."""
    arrays = original.arrays()
    for name, layer in adapter.layers.items():
        arrays[f"{name}.weight"] = layer.merged(arrays[f"{name}.weight"].astype(mx.float32))
    arrays |= {name: array for name, array in adapter.whole.items() if name in arrays}
    return original.open_with(arrays)


def _sorted_by_layer(header: Mapping[str, StoredArray]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    layers: dict[str, dict[str, str]] = {}
    whole: dict[str, str] = {}
    for stored, about in header.items():
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
    """Origin of mlx-lm's arrays: original `shapes`, the trace `traced`, and local files if any. `is_tied`: the output
    layer is the embedding."""

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
    """Origin of the arrays of `model`, from folder `base`, called `name`; `layers` are those in the adapter. `fetch`
    downloads missing original weights. Raises UserError if the origin is unknown."""
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
        return Origin(shapes, traced, None, is_tied(config, traced))
    traced = trace(files)
    return Origin(files.shapes, traced, files, is_tied(config, traced))


def is_tied(config: Mapping[str, Any], traced: Trace) -> bool:
    """True if the output layer is the embedding, transformers' default."""
    text: Mapping[str, Any] = config.get("text_config") or config
    has_head = any(name.endswith("lm_head.weight") for name in traced)
    return bool(text.get("tie_word_embeddings", True)) and not has_head
