"""Check a model folder against the rules of LM Studio and mlx-lm, from headers only."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backend.models.model_folder import object_or_empty
from backend.utils import places
from backend.utils.errors import ConfigProblem
from backend.utils.files import resolved
from backend.utils.safetensors import BrokenFile, read_header_and_metadata

INDEX = "model.safetensors.index.json"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "*.tiktoken")
"""Any of these defines the tokens."""
SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")


def faults(folder: Path) -> list[ConfigProblem]:
    """Problems that keep the model from loading or working, by file."""
    if not folder.is_dir():
        return [ConfigProblem(str(folder), "This is no folder.")]
    if (gguf := next(folder.glob("*.gguf"), None)) and not any(folder.glob("*.safetensors")):
        return [ConfigProblem(gguf.name, "These rules are for MLX's folders; a GGUF file is complete by itself.")]
    return [ConfigProblem(where, sentence) for where, sentence in _found(folder)]


def warnings(folder: Path) -> list[ConfigProblem]:
    if not any(folder.glob("*.safetensors")):
        return []
    if any(folder.glob("chat_template.*")) or object_or_empty(folder / "tokenizer_config.json").get("chat_template"):
        return []
    missing = "The model has no chat template, so LM Studio guesses how a question is put to it."
    return [ConfigProblem("chat_template", missing)]


def _found(folder: Path) -> Iterator[tuple[str, str]]:
    root, place = resolved(places.lm_studio_models()), resolved(folder)
    if place.is_relative_to(root):
        parts = place.relative_to(root).parts
        if len(parts) != 2:
            yield str(place), f"LM Studio reads {root}/<publisher>/<model>, and this folder is {len(parts)} below it."
        if any(part.startswith(".") for part in parts):
            yield str(place), "LM Studio does not look into hidden folders."
    config = object_or_empty(folder / "config.json")
    if not config:
        yield "config.json", "The file is missing, or holds no JSON object."
    elif not isinstance(config.get("model_type"), str):
        yield "config.json", "It does not name a model_type."
    if not object_or_empty(folder / "tokenizer_config.json"):
        yield "tokenizer_config.json", "The file is missing, or holds no JSON object."
    if not any(any(folder.glob(pattern)) for pattern in VOCABULARIES):
        yield "tokenizer.json", "There is no vocabulary: neither tokenizer.json nor an older form of it."
    yield from _weights(folder, config)
    for file in sorted(folder.iterdir()):
        is_known_weight = file.name == "model.safetensors" or SHARD.fullmatch(file.name)
        if file.is_dir():
            yield file.name, "A folder is no part of a model."
        elif file.name.startswith(".") and file.name != ".DS_Store":
            yield file.name, "A hidden file is no part of a model; some programs take ._ files for weights."
        elif file.name.startswith("adapter"):
            yield file.name, "Adapters are no part of a complete model; LM Studio does not load them."
        elif file.suffix == ".safetensors" and not is_known_weight:
            yield file.name, "A weight file is called model.safetensors, or model-00001-of-00002.safetensors."


def _weights(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    files = sorted(file for file in folder.glob("model*.safetensors") if file.is_file())
    if not files:
        yield "model.safetensors", "There are no weights."
        return
    arrays: dict[str, str] = {}
    for file in files:
        try:
            header, metadata = read_header_and_metadata(file)
        except BrokenFile as error:
            yield file.name, f"The file {error}."
            continue
        if metadata is None:
            yield file.name, "Its header has no metadata object, and LM Studio refuses such a file."
        arrays |= dict.fromkeys(header, file.name)
    # Shards are numbered without gaps, and their index names every array and its file.
    numbered = [match for file in files if (match := SHARD.fullmatch(file.name))]
    if numbered:
        counts = {int(match[2]) for match in numbered}
        if counts != {len(files)} or {int(match[1]) for match in numbered} != set(range(1, len(files) + 1)):
            yield files[0].name, f"Of {max(counts)} shards {len(files)} are here."
        if object_or_empty(folder / INDEX).get("weight_map") != arrays:
            yield INDEX, "The index of the shards is missing, or does not say where each array is."
    elif len(files) > 1:
        yield files[1].name, "There is more than one weight file, and they are not numbered as shards."
    inner = config.get("text_config")
    is_quantised = "quantization" in config or "quantization_config" in config
    is_within = isinstance(inner, dict) and "quantization_config" in inner
    if any(name.endswith(".scales") for name in arrays) != is_quantised and not is_within:
        says = "says" if is_quantised else "does not say"
        yield "config.json", f"It {says} that the weights are quantised, and the weight files differ."
