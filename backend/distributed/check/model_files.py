"""The files of a model on a disk, and a digest that tells whether two machines have the same ones without reading weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from backend.utils.hub_cache import local_folder

MOST_FILES = 10_000


@dataclass(frozen=True, slots=True)
class ModelFile:
    name: str
    """Relative to the model's folder, with / between its parts."""
    size: int


def model_files(model: str) -> list[ModelFile]:
    """The files of a model, a folder or an id of the Hub, hidden ones left out; none where it is not on this machine."""
    folder = local_folder(model)
    if folder is None:
        return []
    found: list[ModelFile] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(place, name)
            if not name.startswith(".") and path.is_file():
                found.append(ModelFile(path.relative_to(folder).as_posix(), path.stat().st_size))
        if len(found) > MOST_FILES:
            return []
    is_model = any(file.name.endswith(".safetensors") for file in found) and (folder / "config.json").is_file()
    return found if is_model else []


def digest_of(model: str) -> str:
    """Of the names and sizes of weights and tokenizer, and of the contents of config.json; "" where the model is not here. Which other files
    were downloaded says nothing about the model."""
    files, folder = model_files(model), local_folder(model)
    if not files or folder is None:
        return ""
    told = [
        file for file in files if file.name.endswith(".safetensors") or file.name in ("config.json", "tokenizer.json")
    ]
    digest = sha256(repr([(file.name, file.size) for file in told]).encode() + (folder / "config.json").read_bytes())
    return digest.hexdigest()[:16]
