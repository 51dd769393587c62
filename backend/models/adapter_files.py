"""Whether the files of an adapter in mlx-lm's format can be loaded: adapter_config.json and adapters.safetensors. No array is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from backend.models.model_folder import PATH, read_object
from backend.spec.faults import Mistake
from backend.spec.safetensors import BrokenFile, read_header
from backend.spec.user_input.numbers import fits_a_float
from backend.spec.user_input.text import shown

LARGEST_RANK = 2**16


def check_adapter(folder: Path, setting: str) -> None:
    """Raises Mistake where mlx-lm cannot load the adapter: its settings are of the wrong kind, or its arrays are not whole."""
    check_adapter_config(folder / "adapter_config.json", setting)
    try:
        read_header(folder / "adapters.safetensors")
    except BrokenFile as error:
        raise Mistake(setting, f"{shown(folder / 'adapters.safetensors', PATH)} {error}.") from None


def check_adapter_config(file: Path, setting: str) -> None:
    """Raises Mistake where an adapter_config.json has settings of the wrong kind."""
    if wrong := _wrong_setting(read_object(file, setting)):
        raise Mistake(setting, f"{shown(file, PATH)} is not mlx-lm's: {wrong}.")


def _wrong_setting(config: dict[str, Any]) -> str:
    """What is wrong, as part of a sentence; "" for nothing."""
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora", "full"):
        return f"fine_tune_type is {shown(kind, 40)}"
    if kind == "full":
        return ""
    layers, parameters = config.get("num_layers"), config.get("lora_parameters")
    if type(layers) is not int:
        return f"num_layers is {shown(layers, 40)}, not a whole number"
    if not isinstance(parameters, dict):
        return "lora_parameters are missing"
    parameters = cast("dict[str, Any]", parameters)
    rank, scale, dropout = (
        parameters.get(key, default) for key, default in (("rank", 8), ("scale", 1.0), ("dropout", 0.0))
    )
    if type(rank) is not int or not 1 <= rank <= LARGEST_RANK:
        return f"the rank is {shown(rank, 40)}"
    if not _is_number(scale):
        return f"the scale is {shown(scale, 40)}"
    if not _is_number(dropout) or not 0 <= dropout < 1:
        return f"the dropout is {shown(dropout, 40)}"
    keys = parameters.get("keys")
    if keys is not None and not (
        isinstance(keys, list) and all(isinstance(key, str) for key in cast("list[Any]", keys))
    ):
        return "the keys are no list of names"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and fits_a_float(value)
