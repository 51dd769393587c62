"""Check a model or adapter folder before opening it: only `model*.safetensors` are opened, and code is refused."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from backend.utils.documents import BrokenJson, parse_loose_json
from backend.utils.errors import UserError
from backend.utils.files import read_text
from backend.utils.safetensors import BrokenFile, StoredArray, read_header
from backend.utils.text import quote

PATH = 70  # characters of a path in a message
LARGEST_RANK = 2**16


def read_object(file: Path, setting: str) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError naming the file."""
    try:
        value: Any = parse_loose_json(read_text(file, setting))
    except BrokenJson as error:
        line = f" at line {error.line}" if error.line else ""
        raise UserError(setting, f"The JSON in {quote(file, PATH)} is broken{line}: {error.why}.") from None
    if not isinstance(value, dict):
        raise UserError(setting, f"{quote(file, PATH)} must hold a JSON object.")
    return value


def object_or_empty(file: Path) -> dict[str, Any]:
    """The JSON object in a file; {} without one."""
    try:
        return read_object(file, file.name)
    except UserError:
        return {}


def check_config(file: Path, name: str, setting: str) -> dict[str, Any]:
    """Content of config.json. Raises UserError for a broken file or a model with its own code."""
    config = read_object(file, setting)
    if config.get("model_file"):
        code = f"needs code of its own ({quote(config['model_file'], 40)}), which is not run"
        raise UserError(setting, f"The model {quote(Path(name), 50)} {code}.")
    return config


def check_arrays(folder: Path, setting: str) -> None:
    """Raise UserError if weights are incomplete."""
    there = {file.name for file in sorted(folder.glob("model*.safetensors")) if header_of(file, setting)}
    if not there:
        missing = "holds no weights: model*.safetensors is missing or empty"
        raise UserError(setting, f"The folder {quote(folder, PATH)} {missing}.")
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    named = read_object(index, setting).get("weight_map")
    if not isinstance(named, dict):
        raise UserError(setting, f"{quote(index, PATH)} names no weights.")
    files = dict.fromkeys(quote(name, 40) for name in named.values())
    if missing := [name for name in files if name not in there]:
        what = f"{len(missing):,} weight files that are missing, {missing[0]} among them"
        raise UserError(setting, f"{quote(index, PATH)} names {what}.")


def header_of(file: Path, setting: str) -> dict[str, StoredArray]:
    """Header of a safetensors file. Raises UserError naming the file."""
    try:
        return read_header(file)
    except BrokenFile as error:
        raise UserError(setting, f"{quote(file, PATH)} {error}.") from None


def check_adapter(folder: Path, setting: str) -> None:
    """Raise UserError if mlx-lm cannot load the adapter."""
    check_adapter_config(folder / "adapter_config.json", setting)
    header_of(folder / "adapters.safetensors", setting)


class _LoraParameters(BaseModel):
    rank: Annotated[int, Field(ge=1, le=LARGEST_RANK)] = 8
    scale: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    keys: list[str] | None = None


class _AdapterConfig(BaseModel):
    model_config = ConfigDict(strict=True)

    fine_tune_type: Literal["lora", "dora"] = "lora"
    num_layers: int
    lora_parameters: _LoraParameters


def check_adapter_config(file: Path, setting: str) -> None:
    """Raise UserError for wrong types in adapter_config.json."""
    config = read_object(file, setting)
    if config.get("fine_tune_type") == "full":
        return
    try:
        _AdapterConfig.model_validate(config, strict=True)
    except ValidationError as error:
        wrong = error.errors(include_context=False)[0]
        name = ".".join(map(str, wrong["loc"]))
        what = "is missing" if wrong["type"] == "missing" else f"is {quote(wrong['input'], 40)}"
        raise UserError(setting, f"{quote(file, PATH)} is not mlx-lm's: {name} {what}.") from None
