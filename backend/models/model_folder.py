"""Check a model or adapter folder before opening it.

Only `model*.safetensors` weights are opened, and models with their own code are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from backend.utils import documents
from backend.utils.documents import fits_a_float
from backend.utils.errors import UserError
from backend.utils.files import read_text
from backend.utils.safetensors import BrokenFile, StoredArray, read_header
from backend.utils.text import quote

CONFIG_LIMIT = 16 * 2**20
"""Maximum bytes of config.json and the weight index."""
PATH = 70
"""Characters of a path in a message."""
LARGEST_RANK = 2**16
_COUNT = re.compile(r"^(num|n)_.*(layer|block|expert|head|codebook|loop)|_layers$|^depth$|^n_(layer|head)s?$")
"""Config keys that are counts."""


def read_object(file: Path, setting: str) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError naming the file."""
    text = read_text(file, setting, CONFIG_LIMIT)
    try:
        value = documents.parse_loose_json(text)
    except documents.BrokenJson as error:
        line = f" at line {error.line}" if error.line else ""
        raise UserError(setting, f"The JSON in {quote(file, PATH)} is broken{line}: {error.why}.") from None
    if not isinstance(value, dict):
        raise UserError(setting, f"{quote(file, PATH)} must hold a JSON object.")
    return cast("dict[str, Any]", value)


def check_kinds(folder: Path, setting: str) -> None:
    """Raise UserError for a pipe or device in the folder."""
    for file in sorted(folder.iterdir()):
        # A link to nothing counts as missing.
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise UserError(setting, f"{quote(file, PATH)} is no file, but a pipe, a socket or a device.")


def check_config(file: Path, name: str, setting: str) -> dict[str, Any]:
    """Content of config.json. Raises UserError for a broken file or a model with its own code."""
    config = read_object(file, setting)
    if config.get("model_file"):
        code = f"needs code of its own ({quote(config['model_file'], 40)}), which is not run"
        raise UserError(setting, f"The model {quote(Path(name), 50)} {code}.")
    return config


def check_arrays(folder: Path, config: Mapping[str, Any], setting: str) -> None:
    """Raise UserError if weights are incomplete or much smaller than config.json implies."""
    arrays: dict[str, tuple[str, StoredArray]] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        header = header_of(file, setting)
        if twice := next((name for name in header if name in arrays), None):
            both = f"{quote(arrays[twice][0], 40)} and {quote(file.name, 40)}"
            raise UserError(setting, f"{quote(folder, 50)} has {quote(twice, 40)} in both {both}.")
        arrays |= {name: (file.name, array) for name, array in header.items()}
    if not arrays:
        missing = "holds no weights: model*.safetensors is missing or empty"
        raise UserError(setting, f"The folder {quote(folder, PATH)} {missing}.")
    _check_shards(folder, setting)
    # mlx-lm builds as many layers as config.json says before it looks at the weights.
    for key, count in _counts(config):
        if count > 1000 + 10 * len(arrays):
            where = f"{quote(folder / 'config.json', PATH)} has {quote(key, 30)} {quote(count, 40)}"
            raise UserError(setting, f"{where}, and the weights are {len(arrays):,} arrays.")


def header_of(file: Path, setting: str) -> dict[str, StoredArray]:
    """Header of a safetensors file. Raises UserError naming the file."""
    try:
        return read_header(file)
    except BrokenFile as error:
        raise UserError(setting, f"{quote(file, PATH)} {error}.") from None


def _counts(config: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in config.items():
        if isinstance(value, (int, float)) and _COUNT.search(key):
            yield key, value
        elif isinstance(value, Mapping) and key not in ("vision_config", "audio_config"):
            yield from _counts(cast("Mapping[str, Any]", value))


def _check_shards(folder: Path, setting: str) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    named = read_object(index, setting).get("weight_map")
    if not isinstance(named, dict):
        raise UserError(setting, f"{quote(index, PATH)} names no weights.")
    there = {file.name for file in folder.glob("model*.safetensors")}
    files = dict.fromkeys(quote(name, 40) for name in cast("dict[str, Any]", named).values())
    if missing := [name for name in files if name not in there]:
        what = f"{len(missing):,} weight files that are missing, {missing[0]} among them"
        raise UserError(setting, f"{quote(index, PATH)} names {what}.")


def check_adapter(folder: Path, setting: str) -> None:
    """Raise UserError if mlx-lm cannot load the adapter."""
    check_adapter_config(folder / "adapter_config.json", setting)
    header_of(folder / "adapters.safetensors", setting)


def check_adapter_config(file: Path, setting: str) -> None:
    """Raise UserError for wrong types in adapter_config.json."""
    if wrong := _wrong_setting(read_object(file, setting)):
        raise UserError(setting, f"{quote(file, PATH)} is not mlx-lm's: {wrong}.")


def _wrong_setting(config: dict[str, Any]) -> str:
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora", "full"):
        return f"fine_tune_type is {quote(kind, 40)}"
    if kind == "full":
        return ""
    layers, parameters = config.get("num_layers"), config.get("lora_parameters")
    if type(layers) is not int:
        return f"num_layers is {quote(layers, 40)}, not a whole number"
    if not isinstance(parameters, dict):
        return "lora_parameters are missing"
    parameters = cast("dict[str, Any]", parameters)
    defaults = (("rank", 8), ("scale", 1.0), ("dropout", 0.0))
    rank, scale, dropout = (parameters.get(key, default) for key, default in defaults)
    if type(rank) is not int or not 1 <= rank <= LARGEST_RANK:
        return f"the rank is {quote(rank, 40)}"
    if not is_number(scale):
        return f"the scale is {quote(scale, 40)}"
    if not is_number(dropout) or not 0 <= dropout < 1:
        return f"the dropout is {quote(dropout, 40)}"
    keys: Any = parameters.get("keys")
    if keys is not None and not (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
        return "the keys are no list of names"
    return ""


def is_number(value: Any) -> bool:
    """True for a finite int or float, not bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and fits_a_float(value)
