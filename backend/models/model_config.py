"""Facts that a model's config.json states about the model. Reads a mapping; opens no file and no weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast


def model_type(config: Mapping[str, Any]) -> str:
    """The usual name of the architecture; "" where config.json does not say."""
    name = config.get("model_type")
    return name if isinstance(name, str) else ""


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config that describes several models; {} where there is only one."""
    return _mapping(config.get("text_config"))


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """How the weights are quantised: bits, group_size, mode and exceptions by layer name; {} where they are floats.

    mlx-lm writes `quantization` (and a copy as `quantization_config`); other tools write `quantization_config`, with a
    `quant_method`, sometimes inside `text_config`. What mlx-lm wrote counts first.
    """
    theirs = config.get("quantization_config") or language_model(config).get("quantization_config")
    return {**_mapping(theirs), **_mapping(config.get("quantization"))}


def is_quantized_by_mlx(config: Mapping[str, Any]) -> bool:
    return isinstance(config.get("quantization"), Mapping)


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
