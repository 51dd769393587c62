"""Read a model's config.json and decide whether mlx-lm can load and train it. Imports no mlx."""

import ast
import importlib.util
import math
import pkgutil
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

from backend.config.setting import AdapterSettings, ModelSettings
from backend.utils.errors import ConfigProblem
from backend.utils.text import quote

WEIGHTS = "model*.safetensors"  # weight files that mlx-lm loads
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tiktoken.model")
"""Tokenizer files, one of which is required; *.tiktoken counts too."""
METHODS = ("bitnet", "mxfp4", "mxfp8", "fp8", "compressed-tensors", "modelopt", "awq", "gptq")
"""Quantisation methods that mlx-lm converts (mlx_lm.utils.load_model)."""
PACKED = ("pack-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized")  # supported formats of compressed-tensors
UNTRAINABLE = {  # architectures that cannot be trained, with the reason. `make architectures` tests them again
    "afm7": "mlx-lm cannot open the adapters of its fused layers again",
    "bitnet": "its layers take no adapters, and their Metal kernel has no gradient",
    "deepseek_v41": "its choice of experts and tokens has no gradient in mlx-lm's code",
    "gear": "transformers refuses the kinds of layers in its config.json",
    "muse_spark": "its code is made of Metal kernels that have no gradient",
    "olmo": "its code needs the package ai2-olmo; OLMo 2 and 3 do not",
    "phi3small": "in mlx-lm's code its tokens attend to later ones",
    "prism_hadamard_qwen35": "its packed layers take no adapters",
    "recurrent_gemma": "its code in mlx-lm fails as soon as its weights are read",
}
PREFIX_ATTENTION = ("paligemma",)  # whose text model reads a prompt in both directions, and not as mlx-lm does

_EXPERTS = {"num_experts": "num_local_experts"}
_NAMES = {  # architecture → names that mlx-lm reads → names that transformers 5 writes
    "gpt_neox": {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
    **dict.fromkeys(("mellum", "qwen3_moe", "qwen3_vl_moe_text"), _EXPERTS),
}
_LAYERS = {"granitemoehybrid": {"linear_attention": "mamba", "full_attention": "attention"}}
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def model_type(config: Mapping[str, Any]) -> str:
    """Usual name of the architecture; "" if unknown."""
    name = config.get("model_type")
    return name if isinstance(name, str) else ""


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Language model part of a multimodal config, or {}."""
    return _mapping(config.get("text_config"))


def is_text_part(config: Mapping[str, Any]) -> bool:
    """True for a vision model of a kind that mlx-lm lacks, and whose text model it has."""
    kind, text = model_type(config), language_model(config)
    if "vision_config" not in config or _module(config) in architectures() or kind in PREFIX_ATTENTION:
        return False
    return _module(text) in architectures()


def mlx_lm_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Changes for mlx-lm: transformers 5 writes `rope_parameters`, by type of layer in Gemma 3, and other names."""
    changes: dict[str, Any] = {}
    if text := language_model(config):
        of_whole = {key: config[key] for key in ("tie_word_embeddings",) if key in config and key not in text}
        if nested := of_whole | mlx_lm_settings(text):
            changes["text_config"] = {**text, **nested}
    rope, layers = _mapping(config.get("rope_parameters")), config.get("layer_types")
    every = _mapping(rope.get("full_attention")) or rope
    changes |= {key: every[key] for key in ("rope_theta", "partial_rotary_factor") if key in every}
    if every.get("rope_type", "default") != "default":
        changes["rope_scaling"] = every
    elif every and "rope_scaling" not in config:  # some of mlx-lm's models must be told that there is none
        changes["rope_scaling"] = None
    if "rope_theta" in (local := _mapping(rope.get("sliding_attention"))):
        changes["rope_local_base_freq"] = local["rope_theta"]
        if isinstance(layers, list) and "full_attention" in layers:
            changes["sliding_window_pattern"] = layers.index("full_attention") + 1
    known, kinds = {**config, **changes}, _LAYERS.get(model_type(config))
    names = _NAMES.get(model_type(config), {}).items()
    changes |= {ours: known[theirs] for ours, theirs in names if ours not in config and theirs in known}
    if kinds and isinstance(layers, list):
        changes["layer_types"] = [kinds.get(str(layer), layer) for layer in layers]
    return changes


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Quantisation: bits, group_size, mode and exceptions by layer; {} for floats. mlx-lm's `quantization` wins over
    `quantization_config` of other tools, also inside `text_config`."""
    theirs = config.get("quantization_config") or language_model(config).get("quantization_config")
    return {**_mapping(theirs), **_mapping(config.get("quantization"))}


def quantization_problems(settings: ModelSettings, config: Mapping[str, Any]) -> list[ConfigProblem]:
    """What the settings want of a model that is quantised already, by its config.json."""
    if not isinstance(config.get("quantization"), Mapping):  # by mlx
        return []
    what = f"{settings.model} is quantised already; choose None to train it as it comes."
    if twice := [key for key in ("quantization", "rollout_quantization") if getattr(settings, key) != "none"]:
        return [ConfigProblem(key, what) for key in twice]
    what = f"{settings.model} is quantised, and packed weights cannot learn; choose LoRA or DoRA."
    return [ConfigProblem("train_type", what)] if settings.train_type == "full" else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def precision_of(config: Mapping[str, Any]) -> str:
    """Usual name of the weight type: "4-bit", "mxfp4", "bf16", …; "" if unknown."""
    if quantization := quantization_of(config):
        mode, bits = quantization.get("mode") or "affine", quantization.get("bits")
        if mode != "affine":
            return quote(mode, 20)
        return f"{quote(bits, 20)}-bit" if bits else quote(quantization.get("quant_method") or "", 20)
    parts = (config, language_model(config))
    dtypes = (quote(part.get(key) or "", 20) for part in parts for key in ("dtype", "torch_dtype"))
    dtype = next(filter(None, dtypes), "").removeprefix("torch.")
    return _DTYPES.get(dtype, dtype)


def refusal(config: Mapping[str, Any] | None, names: Collection[str]) -> str:
    """Reason why mlx-lm cannot load this model, or "". `config` is its config.json, `names` the files of its folder."""
    has_gguf = any(name.endswith(".gguf") for name in names)
    if config is None:
        if "adapter_config.json" in names:
            return "It is an adapter without its base: choose the base, and the adapter as reference."
        if has_gguf:
            return "It is a GGUF file, which mlx-lm cannot train: look for the same model in MLX or safetensors form."
        return "It has no config.json."
    if config.get("model_file"):
        return f"It needs code of its own ({quote(config['model_file'], 40)}), which is not run."
    if sentence := architecture_refusal(config):
        return sentence
    theirs = {} if isinstance(config.get("quantization"), Mapping) else quantization_of(config)
    method, format_ = str(theirs.get("quant_method") or "a way of its own"), theirs.get("format")
    if theirs and method not in METHODS:
        return f"It is quantised with {quote(method, 40)}, which mlx-lm cannot read."
    if theirs and method == "compressed-tensors" and format_ not in PACKED:
        return f"It is quantised with {method} in the format {quote(format_, 40)}, which mlx-lm cannot read."
    if not any(Path(name).match(WEIGHTS) and "/" not in name for name in names):
        if has_gguf:
            return "It has GGUF weights only: look for the same model in MLX or safetensors form."
        others = any(name.endswith((".bin", ".pth", ".pt")) for name in names)
        return f"It has no {WEIGHTS}" + (", only PyTorch's pickled weights." if others else ".")
    if not any(name in TOKENIZERS or name.endswith(".tiktoken") for name in names):
        return "It has no tokenizer."
    return ""


def architecture_refusal(config: Mapping[str, Any]) -> str:
    """Reason why this architecture cannot be trained, or ""."""
    kind = model_type(config)
    if not kind:
        return "Its config.json names no model_type."
    if module_of(config) not in architectures():
        return f"This version of mlx-lm knows no model of the kind {quote(kind, 40)}."
    reason = UNTRAINABLE.get(module_of(config))
    return f"A model of the kind {kind} cannot be trained: {reason}." if reason else ""


def is_classifier(config: Mapping[str, Any]) -> bool:
    """True for a sequence classification model, as reward models are."""
    return any(str(each).endswith("ForSequenceClassification") for each in config.get("architectures") or ())


@cache
def architectures() -> frozenset[str]:
    return frozenset(module.name for module in pkgutil.iter_modules([str(_mlx_lm() / "models")]))


def module_of(config: Mapping[str, Any]) -> str:
    """Module of mlx_lm.models for a config; of a vision model that mlx-lm lacks, that of its text model."""
    return _module(language_model(config) if is_text_part(config) else config)


def _module(config: Mapping[str, Any]) -> str:
    # As mlx_lm.utils._get_classes.
    kind, classes = model_type(config), config.get("architectures") or ()
    by_kind, by_architecture = _remapping("MODEL_REMAPPING"), _remapping("MODEL_ARCHITECTURE_REMAPPING")
    for architecture in classes if isinstance(classes, list) else (classes,):
        if isinstance(architecture, str) and (module := by_architecture.get((kind, architecture))):
            return module
    return by_kind.get(kind, kind)


@cache
def _remapping(name: str) -> dict[Any, str]:
    statements = ast.parse((_mlx_lm() / "utils.py").read_text(encoding="utf-8")).body
    tables = {ast.unparse(each.targets[0]): each.value for each in statements if isinstance(each, ast.Assign)}
    return ast.literal_eval(tables.get(name, "{}"))


def _mlx_lm() -> Path:
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None and spec.submodule_search_locations, "mlx-lm is one of our requirements"
    return Path(next(iter(spec.submodule_search_locations)))


ALL_LINEAR = "all-linear"  # peft's name for every linear layer but the output layer


def adapter_scale(config: AdapterSettings) -> float:
    """alpha / rank (arXiv:2106.09685, 4.1), with rsLoRA alpha / √rank (arXiv:2312.03732); `scale` without alpha."""
    if config.lora_alpha is None:
        return config.scale
    return config.lora_alpha / (math.sqrt(config.rank) if config.use_rslora else config.rank)


def is_named(name: str, keys: Iterable[str]) -> bool:
    """True if one of `keys` equals the layer's name or its end after a dot (q_proj: self_attn.q_proj)."""
    return any(name == key or name.endswith(f".{key}") for key in keys)
