"""The original of a base model: the Hugging Face files that its weights come from, and a model opened from such weights.

A model that mlx converted holds renamed or packed weights; its card names the repository that they came from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import ModelCard
from mlx_lm import utils as mlx_lm_utils

from backend.export.model_files import SAFETENSORS_TYPES
from backend.export.trained_weights import TrainedWeights
from backend.models.inventory import is_incomplete
from backend.models.loading import loading
from backend.utils.errors import UserError
from backend.utils.hub_cache import local_folder
from backend.utils.safetensors import BrokenFile, read_header
from backend.utils.text import quote

FURTHEST = 3
"""How many cards are followed from a converted model to its original."""

READABLE_TYPES = frozenset(SAFETENSORS_TYPES.values())

Fetch = Callable[[str], Path]
"""Downloads a repository; → its folder."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as the header of its file has it."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OriginalFiles:
    """A folder of original weights. `name` is its id on Hugging Face, or the folder's own name; `files` are the tensors of each weight
    file, in the order of their bytes."""

    folder: Path
    name: str
    files: Mapping[str, Mapping[str, Tensor]]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for tensors in self.files.values() for name, tensor in tensors.items()}

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.folder / "config.json").read_text(encoding="utf-8"))

    def arrays(self) -> dict[str, mx.array]:
        """Every tensor by its original name, not read yet."""
        arrays: dict[str, mx.array] = {}
        for file in self.files:
            loaded: Any = mx.load(str(self.folder / file))
            arrays |= loaded
        return arrays


def find_original(base: Path, name: str, fetch: Fetch | None = None) -> OriginalFiles:
    """The original weights of the model in `base`, called `name`: its own files, or those of the repository that its card names.

    `fetch` downloads that repository where it is not on this disk. Raises UserError where the original is unknown, missing, or stored in
    types that mlx cannot write.
    """
    folder, called = base, name
    for _ in range(FURTHEST):
        if not _is_converted(folder):
            return read_original(folder, called)
        called = _named_by_card(folder, called)
        folder = _on_this_disk(called, fetch)
    raise UserError("model", f"The cards of {name} and of the models that it comes from lead to no original weights.")


def converted_from(base: Path, name: str) -> tuple[str | None, int]:
    """(the repository that a model converted by mlx comes from, None for one that is no such model; the bits of its packed weights, 0 for
    floats). Nothing is fetched: of a chain of cards the last on this disk counts. Raises UserError where the card names none."""
    folder: Path | None = base
    called = name
    packed = json.loads((base / "config.json").read_text(encoding="utf-8")).get("quantization") or {}
    for _ in range(FURTHEST):
        if folder is None or not _is_converted(folder):
            break
        called = _named_by_card(folder, called)
        folder = local_folder(called)
    return (None if called == name else called), int(packed.get("bits", 0))


def trained_on_original(trained: TrainedWeights, fetch: Fetch | None = None) -> TrainedWeights:
    """The same training on the original of its base, which is then `untrained`. Adapters that were trained on quantised weights are another
    model on these. Raises as `find_original`."""
    if trained.untrained is None:
        raise UserError(
            "model", f"The base model {trained.name} is not on this disk any more, and its weights are needed."
        )
    original = find_original(trained.untrained, trained.name, fetch)
    if trained.adapters is None:
        return replace(trained, untrained=original.folder, name=original.name)
    return TrainedWeights(
        original.folder, original.name, tokenizer=original.folder, adapters=trained.adapters, untrained=original.folder
    )


def original_of(trained: TrainedWeights) -> OriginalFiles:
    """The original under weights that `trained_on_original` returned."""
    assert trained.untrained is not None
    return read_original(trained.untrained, trained.name)


def open_with(original: OriginalFiles, arrays: Mapping[str, mx.array]) -> nn.Module:
    """The model whose weights under their original names are `arrays`, opened as mlx-lm opens a folder."""
    model = empty_model(original)
    named = dict(arrays)
    model.load_weights(list((model.sanitize(named) if hasattr(model, "sanitize") else named).items()))  # pyright: ignore
    model.eval()
    return model


def empty_model(original: OriginalFiles) -> nn.Module:
    """A new model of the original's family and sizes, its weights random and not computed. `sanitize` may change a model, so it is called
    once on each."""
    config = mlx_lm_utils.load_config(original.folder)
    with loading(original.name, "model"):
        model_class, arguments = mlx_lm_utils._get_classes(config=config)  # as load_model does
        return model_class(arguments.from_dict(config))


# ── finding it ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _is_converted(folder: Path) -> bool:
    """Whether mlx packed the weights, or the card says that they were converted for mlx."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return "quantization" in config or (_card(folder).get("library_name") == "mlx" and bool(_base_models(folder)))


def _named_by_card(folder: Path, name: str) -> str:
    models = _base_models(folder)
    if not models:
        raise UserError(
            "model",
            f"{name} was quantised by mlx, and its card names no base_model: the original weights are unknown, so train on "
            "them, or export for mlx.",
        )
    return models[0]


def _on_this_disk(name: str, fetch: Fetch | None) -> Path:
    folder = local_folder(name)
    if folder is not None and (folder / "config.json").is_file() and not is_incomplete(folder):
        return folder
    if fetch is None:
        raise UserError(
            "model",
            f"The original weights are those of {name}, which is not on this disk; download that model first, or give --fetch.",
        )
    return fetch(name)


def _base_models(folder: Path) -> list[str]:
    named = _card(folder).get("base_model") or []
    return [named] if isinstance(named, str) else [str(model) for model in named]


def _card(folder: Path) -> dict[str, Any]:
    """The metadata of the model's card; {} without one."""
    try:
        return ModelCard.load(folder / "README.md", ignore_metadata_errors=True).data.to_dict()
    except (OSError, ValueError):
        return {}


# ── reading headers ──────────────────────────────────────────────────────────────────────────────────────────────────


def read_original(folder: Path, name: str) -> OriginalFiles:
    """Read the headers of the original weights in `folder`. Raises UserError for types that mlx cannot write, or names that are mlx-lm's."""
    original = OriginalFiles(
        folder, name, {file.name: dict(_header(file)) for file in sorted(folder.glob("model*.safetensors"))}
    )
    odd = [
        f"{tensor} ({about.dtype})"
        for tensors in original.files.values()
        for tensor, about in tensors.items()
        if about.dtype not in READABLE_TYPES
    ]
    if odd or "quantization_config" in original.config:
        example = f", {odd[0]} among them" if odd else ""
        raise UserError(
            "model", f"The original weights of {name} are packed{example}, so nothing can be merged into them."
        )
    if stacked := [tensor for tensor in original.shapes if ".switch_" in tensor]:
        raise UserError(
            "model", f"The weights of {name} have mlx-lm's names ({stacked[0]}), and no card names their original."
        )
    return original


def _header(file: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a safetensors file in the order of their bytes."""
    try:
        header = read_header(file)
    except BrokenFile as error:
        raise UserError("model", f"{quote(file, 70)} {error}.") from None
    for name, array in sorted(header.items(), key=lambda item: item[1].begin):
        yield name, Tensor(array.dtype, array.shape)
