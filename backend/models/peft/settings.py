"""adapter_config.json of peft: which settings are read, and which kinds of adapter have no counterpart in mlx-lm.

The names are those of `peft.LoraConfig` (peft 0.21). Which layers have adapters is read from the arrays, not from `target_modules`, which
may be names, a pattern, or "all-linear": peft has resolved it already when it writes them. A list of names is held against the arrays all the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import mlx.core as mx
import mlx.nn as nn
import regex
from mlx.utils import tree_flatten

from backend.config.other_programs.peft import kind_sentence
from backend.export.original.original_files import Fetch, OriginalFiles, find_original
from backend.export.original.row_trace import Rows, Trace, trace
from backend.models.model_folder import LARGEST_RANK, PATH, read_object
from backend.utils.documents import fits_a_float
from backend.utils.errors import UserError
from backend.utils.text import about_path, excess, quote

SETTING = "file"
PATTERN_S = 0.2
"""Seconds that one pattern of somebody else's may search one name: `(a|aa)+$` can backtrack for years."""

STARTS_FROM_LORA = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base as it is. The others subtract the first adapter from its weights."""

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
"""Settings of peft that make another function than base + scale · B A → what it does, as part of a sentence."""


@dataclass(frozen=True, slots=True)
class PeftSettings:
    """What an adapter_config.json says. `rank_pattern` and `alpha_pattern`: a name of a layer, its end, or a pattern for either → value."""

    base: str
    rank: int
    alpha: float
    rank_pattern: Mapping[str, float]
    alpha_pattern: Mapping[str, float]
    uses_rslora: bool
    uses_dora: bool
    dropout: float
    targets: tuple[str, ...]
    """`target_modules` where they and `excluded` are names, else ()."""
    excluded: tuple[str, ...]
    layers: tuple[int, ...] | None
    """`layers_to_transform`; None means every layer."""
    modules_to_save: tuple[str, ...]
    ties_weights: bool
    """`ensure_weight_tying`: an embedding that was trained is the output layer too, where the base's is."""

    def rank_of(self, layer: str) -> int:
        return int(_matching(self.rank_pattern, layer, self.rank))

    def scale_of(self, layer: str) -> float:
        """alpha / rank, under rsLoRA alpha / √rank, of one layer."""
        rank, alpha = self.rank_of(layer), _matching(self.alpha_pattern, layer, self.alpha)
        return tidy(alpha / (math.sqrt(rank) if self.uses_rslora else rank))

    def means(self, layer: str) -> bool:
        """Whether the names in `target_modules` mean this layer."""
        if not _is_one_of(layer, self.targets) or _is_one_of(layer, self.excluded):
            return False
        if any(_is_one_of(part, self.modules_to_save) for part in _with_parents(layer)):
            return False
        number = next((int(part) for part in layer.split(".") if part.isdigit()), None)
        return self.layers is None or number in self.layers


def tidy(number: float) -> float:
    """The number with 12 digits where that is a rounding error away: alpha / rank · rank need not be alpha to the last bit."""
    short = float(f"{number:.12g}")
    return short if math.isclose(short, number, rel_tol=1e-15) else number


def _with_parents(layer: str) -> Iterable[str]:
    parts = layer.split(".")
    return (".".join(parts[: end + 1]) for end in range(len(parts)))


def _is_one_of(layer: str, names: Iterable[str]) -> bool:
    return any(layer == name or layer.endswith(f".{name}") for name in names)


def _matching(patterns: Mapping[str, float], layer: str, usual: float) -> float:
    """The value of the first pattern that fits the layer's name or its end, as in `peft.utils.other.get_pattern_key`. Raises UserError."""
    if layer in patterns:
        return patterns[layer]
    for pattern, value in patterns.items():
        if sentence := excess(pattern):
            raise UserError(SETTING, f"The pattern {sentence}")
        try:
            if regex.match(rf"(.*\.)?({pattern})$", layer, timeout=PATTERN_S):
                return value
        except (regex.error, TimeoutError, RecursionError, MemoryError):
            raise UserError(
                SETTING, f"The pattern {quote(pattern, 60)} in adapter_config.json cannot be used."
            ) from None
    return usual


# ── reading the file ─────────────────────────────────────────────────────────────────────────────────────────────────


def read_settings(file: Path) -> PeftSettings:
    """Raises UserError for a file that is none of peft's, and for an adapter that mlx-lm has no counterpart for."""
    raw = read_object(file, SETTING)
    where = quote(file, PATH)
    kind = raw.get("peft_type")
    if kind is None:
        raise UserError(SETTING, f"{where} is no file of peft: it has no peft_type.")
    if kind != "LORA":
        raise UserError(SETTING, about_path(file, f" {kind_sentence(str(kind))}"))
    for key, what in OTHER_KINDS.items():
        if raw.get(key):
            raise UserError(
                SETTING, f"The adapter {what}, which mlx-lm has nothing for ({key} in adapter_config.json)."
            )
    if raw.get("bias") not in (None, False, "none"):
        raise UserError(
            SETTING,
            f"The adapter has trained biases of layers, which mlx-lm has nothing for (bias {quote(raw['bias'], 30)}).",
        )
    start = raw.get("init_lora_weights", True)
    if start not in STARTS_FROM_LORA:
        raise UserError(SETTING, f"The adapter began with {quote(start, 30)}, which changed the base's weights too; convert it to "
                               "LoRA with peft (path_initial_model_for_weight_conversion).")  # fmt: skip
    read = _Fields(raw, where)
    is_pattern = any(isinstance(raw.get(key), str) for key in ("target_modules", "exclude_modules"))
    return PeftSettings(
        base=str(raw.get("base_model_name_or_path") or ""),
        rank=read.checked_rank("r", raw.get("r", 8)),
        alpha=read.number("lora_alpha", 8),
        rank_pattern={name: read.checked_rank(name, value) for name, value in read.numbers("rank_pattern").items()},
        alpha_pattern=read.numbers("alpha_pattern"),
        uses_rslora=raw.get("use_rslora") is True,
        uses_dora=raw.get("use_dora") is True,
        dropout=min(max(read.number("lora_dropout", 0.0), 0.0), 0.99),
        targets=() if is_pattern else read.names("target_modules"),
        excluded=() if is_pattern else read.names("exclude_modules"),
        layers=read.layers(),
        modules_to_save=read.names("modules_to_save"),
        ties_weights=raw.get("ensure_weight_tying") is True,
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """Values of adapter_config.json, each of the kind that is asked for. Raises UserError for others."""

    raw: Mapping[str, Any]
    where: str

    def number(self, key: str, default: float) -> float:
        return self._number(key, self.raw.get(key, default))

    def checked_rank(self, key: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= LARGEST_RANK:
            self._refuse(key, value)
        return value

    def numbers(self, key: str) -> dict[str, float]:
        value: Any = self.raw.get(key) or {}
        if not isinstance(value, dict):
            self._refuse(key, value)
        return {str(name): self._number(key, each) for name, each in cast("dict[Any, Any]", value).items()}

    def names(self, key: str) -> tuple[str, ...]:
        value: Any = self.raw.get(key) or []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in cast("list[Any]", value)):
            self._refuse(key, value)
        return tuple(value)

    def layers(self) -> tuple[int, ...] | None:
        value: Any = self.raw.get("layers_to_transform")
        value = [value] if type(value) is int else value
        if not value:
            return None
        if not isinstance(value, list) or not all(type(number) is int for number in cast("list[Any]", value)):
            self._refuse("layers_to_transform", value)
        return tuple(value)

    def _number(self, key: str, value: Any) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not fits_a_float(value):
            self._refuse(key, value)
        return value

    def _refuse(self, key: str, value: Any) -> NoReturn:
        raise UserError(SETTING, f"{self.where} has {quote(key, 40)} {quote(value, 40)}.")


# ── origin ───────────────────────────────────────────────────────────────────────────────────────────────────────────

# The original weights of the model that an adapter is carried onto: their names and shapes, and which rows of mlx-
# lm's arrays they are.


@dataclass(frozen=True, slots=True)
class Origin:
    """`shapes` of the original tensors, where mlx-lm's arrays come from (`traced`), and the files that hold them, where those are here.
    `is_tied`: the output layer is the embedding."""

    shapes: Mapping[str, tuple[int, ...]]
    traced: Trace
    files: OriginalFiles | None
    is_tied: bool

    def tensor(self, name: str) -> mx.array:
        """An original tensor, float32. Raises UserError where the files are not here."""
        if self.files is None:
            raise UserError(
                SETTING,
                f"The original weights are needed for {quote(name, 90)}, and are not on this disk; give --fetch.",
            )
        return self.files.arrays()[name].astype(mx.float32)


def origin_of(
    base: Path, name: str, model: nn.Module, config: Mapping[str, Any], layers: Iterable[str], fetch: Fetch | None
) -> Origin:
    """Where the arrays of `model`, from the folder `base` and called `name`, come from. `config`: its config.json. `layers`: those that the
    adapter names. `fetch` downloads the original weights where they are not on this disk. Raises UserError where it cannot be known."""
    try:
        files = find_original(base, name, fetch)
    except UserError:
        shapes = _own_shapes(model)
        if fetch is not None or any(f"{layer}.weight" not in shapes for layer in layers):
            raise
        traced = {name: [Rows(name, 0, name, 0, math.prod(shape[:-1] or shape))] for name, shape in shapes.items()}
        return Origin(shapes, traced, None, is_tied(config, traced))
    traced = trace(files)
    return Origin(files.shapes, traced, files, is_tied(config, traced))


def is_tied(config: Mapping[str, Any], traced: Trace) -> bool:
    """Whether the output layer of a model is its embedding. transformers takes a config.json that does not say as yes."""
    text: Mapping[str, Any] = config.get("text_config") or config
    has_head = any(name.endswith("lm_head.weight") for name in traced)
    return bool(text.get("tie_word_embeddings", True)) and not has_head


def _own_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of mlx-lm's arrays, of a quantised layer those of the weights that it stands for."""
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    packed = {
        f"{name}.weight": (module.weight.shape[0], module.weight.shape[1] * 32 // module.bits)
        for name, module in model.named_modules()
        if isinstance(module, nn.QuantizedLinear)
    }
    return {name: array.shape for name, array in arrays.items() if array.ndim} | packed
