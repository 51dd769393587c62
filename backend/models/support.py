"""Whether mlx-lm can load a model, and what the model is, from its config.json and the names of its files.

No weights are read, and mlx is not imported: which architectures mlx-lm knows is read from the names of its files.
"""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

WEIGHTS = "model*.safetensors"
"""What mlx-lm loads as a model's weights."""

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tiktoken.model")
"""A model with none of these cannot read or write text; *.tiktoken counts too."""

METHODS = ("bitnet", "mxfp4", "mxfp8", "fp8", "compressed-tensors", "modelopt", "awq", "gptq")
"""Other people's ways of quantising that mlx-lm turns into its own (mlx_lm.utils.load_model)."""

PACKED = ("pack-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized")
"""The formats of compressed-tensors among them."""

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_REMAPPING, _BY_ARCHITECTURE = "MODEL_REMAPPING", "MODEL_ARCHITECTURE_REMAPPING"


def kind_of(config: Mapping[str, Any]) -> str:
    """The architecture as people name it: config.json's model_type."""
    kind = config.get("model_type")
    return kind if isinstance(kind, str) else ""


def precision_of(config: Mapping[str, Any]) -> str:
    """How the weights are kept: "4-bit", "mxfp4", "bf16", …; "" where config.json does not say."""
    inner = _inner(config)
    ours = config.get("quantization")
    if isinstance(ours, Mapping):
        mode, bits = ours.get("mode", "affine"), ours.get("bits")
        return str(mode) if mode not in ("affine", None) else f"{bits}-bit" if bits else ""
    theirs = _quantised_by(config)
    if theirs:
        bits = theirs.get("bits")
        return f"{bits}-bit" if isinstance(bits, int) else str(theirs.get("quant_method") or "")
    named = str(
        config.get("dtype") or config.get("torch_dtype") or inner.get("dtype") or inner.get("torch_dtype") or ""
    )
    return _DTYPES.get(named.removeprefix("torch."), named)


def refusal(config: Mapping[str, Any] | None, names: Collection[str]) -> str:
    """Why mlx-lm cannot load this model, in one sentence; "" where nothing speaks against it.

    `config` is None where there is no config.json, `names` are the files of its folder.
    """
    if config is None:
        return _without_config(names)
    if config.get("model_file"):
        return f"It needs code of its own ({config['model_file']}), which is not run."
    return _unknown_kind(config) or _strange_weights(config) or _missing_files(names)


def _without_config(names: Collection[str]) -> str:
    if "adapter_config.json" in names:
        return "It is an adapter without its base: choose the base, and the adapter as reference."
    if any(name.endswith(".gguf") for name in names):
        return "It is a GGUF file, which mlx-lm cannot train: look for the same model in MLX or safetensors form."
    return "It has no config.json."


def _unknown_kind(config: Mapping[str, Any]) -> str:
    kind = kind_of(config)
    if not kind:
        return "Its config.json names no model_type."
    return "" if module_of(config) in architectures() else f"This version of mlx-lm knows no model of the kind {kind}."


def _strange_weights(config: Mapping[str, Any]) -> str:
    theirs = None if isinstance(config.get("quantization"), Mapping) else _quantised_by(config)
    if not theirs:
        return ""
    method = str(theirs.get("quant_method") or "a way of its own")
    if method not in METHODS:
        return f"It is quantised with {method}, which mlx-lm cannot read."
    format_ = theirs.get("format")
    if method == "compressed-tensors" and format_ not in PACKED:
        return f"It is quantised with {method} in the format {format_}, which mlx-lm cannot read."
    return ""


def _missing_files(names: Collection[str]) -> str:
    if not any(Path(name).match(WEIGHTS) and "/" not in name for name in names):
        if any(name.endswith(".gguf") for name in names):
            return "It has GGUF weights only: look for the same model in MLX or safetensors form."
        others = any(name.endswith((".bin", ".pth", ".pt")) for name in names)
        return f"It has no {WEIGHTS}" + (", only PyTorch's pickled weights." if others else ".")
    if not any(name in TOKENIZERS or name.endswith(".tiktoken") for name in names):
        return "It has no tokenizer."
    return ""


# ── what mlx-lm knows ────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def architectures() -> frozenset[str]:
    """Names of the modules in mlx_lm.models."""
    return frozenset(module.name for module in pkgutil.iter_modules([str(_mlx_lm() / "models")]))


def module_of(config: Mapping[str, Any]) -> str:
    """The module of mlx_lm.models that a config leads to, as mlx_lm.utils._get_classes finds it."""
    kind, named = kind_of(config), config.get("architectures") or ()
    by_kind, by_architecture = _remappings()
    for architecture in (named,) if isinstance(named, str) else named:
        if found := by_architecture.get((kind, architecture)):
            return found
    return by_kind.get(kind, kind)


@cache
def _remappings() -> tuple[dict[str, str], dict[tuple[str, str], str]]:
    """mlx-lm's second names for architectures: read from its source text, or asked of it where there is none."""
    try:
        tree = ast.parse((_mlx_lm() / "utils.py").read_text(encoding="utf-8"))
    except OSError:  # a bundled app has compiled modules only
        from mlx_lm import utils

        return getattr(utils, _REMAPPING), getattr(utils, _BY_ARCHITECTURE, {})
    tables = {
        target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in (_REMAPPING, _BY_ARCHITECTURE)
    }
    return tables.get(_REMAPPING, {}), tables.get(_BY_ARCHITECTURE, {})


def _mlx_lm() -> Path:
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None and spec.submodule_search_locations, "mlx-lm is one of our requirements"
    return Path(next(iter(spec.submodule_search_locations)))


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config that has several."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else {}


def _quantised_by(config: Mapping[str, Any]) -> Mapping[str, Any]:
    theirs = config.get("quantization_config") or _inner(config).get("quantization_config")
    return theirs if isinstance(theirs, Mapping) else {}
