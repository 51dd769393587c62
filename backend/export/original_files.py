"""Find the original Hugging Face weights of a base model that mlx converted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import ModelCard
from mlx_lm import utils as mlx_lm_utils

from backend.export.exports import Progress
from backend.export.trained_weights import TrainedWeights
from backend.export.writer import SAFETENSORS_TYPES
from backend.models import hub
from backend.models.inventory import is_incomplete
from backend.models.loading import loading
from backend.models.model_folder import header_of
from backend.utils.errors import UserError
from backend.utils.hub_cache import local_folder

FURTHEST = 3
"""Model cards to follow to the original."""

Fetch = Callable[[str], Path]
"""Downloads a repository; returns its folder."""


@dataclass(frozen=True, slots=True)
class OriginalFiles:
    """A folder of original weights: its Hugging Face id or folder name, and tensor shapes by file."""

    folder: Path
    name: str
    files: Mapping[str, Mapping[str, tuple[int, ...]]]
    """File → tensor → shape, in byte order."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for tensors in self.files.values() for name, shape in tensors.items()}

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.folder / "config.json").read_text(encoding="utf-8"))

    def arrays(self) -> dict[str, mx.array]:
        """All tensors by original name, lazily."""
        arrays: dict[str, mx.array] = {}
        for file in self.files:
            loaded: Any = mx.load(str(self.folder / file))
            arrays |= loaded
        return arrays

    def empty_model(self) -> nn.Module:
        """A lazy model with random weights. Call `sanitize` only once on each."""
        config = mlx_lm_utils.load_config(self.folder)
        with loading(self.name, "model"):
            model_class, arguments = mlx_lm_utils._get_classes(config=config)  # as load_model does
            return model_class(arguments.from_dict(config))

    def open_with(self, arrays: Mapping[str, mx.array]) -> nn.Module:
        """Load original `arrays` into a model as mlx-lm does."""
        model: Any = self.empty_model()
        named = dict(arrays)
        model.load_weights(list((model.sanitize(named) if hasattr(model, "sanitize") else named).items()))
        model.eval()
        return model


def find_original(base: Path, name: str, fetch: Fetch | None = None) -> OriginalFiles:
    """Original weights of the model in `base`: its own files, or those that its card names.

    `fetch` downloads them. Raises UserError if they are unknown, missing, or of unsupported types.
    """
    folder, called = base, name
    for _ in range(FURTHEST):
        if not _is_converted(folder):
            return read_original(folder, called)
        called = _named_by_card(folder, called)
        found = local_folder(called)
        if found is not None and (found / "config.json").is_file() and not is_incomplete(found):
            folder = found
        elif fetch is not None:
            folder = fetch(called)
        else:
            missing = f"The original weights are those of {called}, which is not on this disk"
            raise UserError("model", f"{missing}; download that model first, or give --fetch.")
    raise UserError("model", f"The cards of {name} and of the models that it comes from lead to no original weights.")


def converted_from(base: Path, name: str) -> tuple[str | None, int]:
    """(repository that an mlx model was converted from, or None; bits of packed weights, 0 for floats).

    Follows cards on this disk only. Raises UserError if the card names no repository.
    """
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
    """The same training applied to the original of its base. Raises as `find_original`."""
    if trained.untrained is None:
        gone = f"The base model {trained.name} is not on this disk any more"
        raise UserError("model", f"{gone}, and its weights are needed.")
    original = find_original(trained.untrained, trained.name, fetch)
    if trained.adapters is None:
        return replace(trained, untrained=original.folder, name=original.name)
    folder = original.folder
    return TrainedWeights(folder, original.name, folder, adapters=trained.adapters, untrained=folder)


def original_of(trained: TrainedWeights) -> OriginalFiles:
    """The original behind weights from `trained_on_original`."""
    assert trained.untrained is not None
    return read_original(trained.untrained, trained.name)


def read_original(folder: Path, name: str) -> OriginalFiles:
    """Read headers of original weights. Raises UserError for unsupported types or mlx-lm names."""
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    odd: list[str] = []
    for file in sorted(folder.glob("model*.safetensors")):
        tensors = sorted(header_of(file, "model").items(), key=lambda item: item[1].begin)
        files[file.name] = {tensor: array.shape for tensor, array in tensors}
        odd += [f"{tensor} ({array.dtype})" for tensor, array in tensors if array.dtype not in _WRITABLE]
    original = OriginalFiles(folder, name, files)
    if odd or "quantization_config" in original.config:
        packed = f"packed{f', {odd[0]} among them' if odd else ''}"
        raise UserError("model", f"The original weights of {name} are {packed}, so nothing can be merged into them.")
    if stacked := [tensor for tensor in original.shapes if ".switch_" in tensor]:
        renamed = f"have mlx-lm's names ({stacked[0]}), and no card names their original"
        raise UserError("model", f"The weights of {name} {renamed}.")
    return original


_WRITABLE = frozenset(SAFETENSORS_TYPES.values())


def _is_converted(folder: Path) -> bool:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return "quantization" in config or (_card(folder).get("library_name") == "mlx" and bool(_base_models(folder)))


def _named_by_card(folder: Path, name: str) -> str:
    if models := _base_models(folder):
        return models[0]
    unknown = f"{name} was quantised by mlx, and its card names no base_model: the original weights are unknown"
    raise UserError("model", f"{unknown}, so train on them, or export for mlx.")


def _base_models(folder: Path) -> list[str]:
    named = _card(folder).get("base_model") or []
    return [named] if isinstance(named, str) else [str(model) for model in named]


def _card(folder: Path) -> dict[str, Any]:
    try:
        return ModelCard.load(folder / "README.md", ignore_metadata_errors=True).data.to_dict()
    except (OSError, ValueError):
        return {}


def fetch_original(name: str, progress: Progress) -> Path:
    """Download a model; a later call resumes it. Raises UserError."""
    return hub.download(name, "model", _ReportFetching(f"Downloading the original weights, {name}.", progress))


class _ReportFetching:
    def __init__(self, sentence: str, progress: Progress) -> None:
        self._sentence, self._progress = sentence, progress

    def report(self, state: dict[str, Any]) -> None:
        self._progress(self._sentence, state["done"] / state["total"] if state["total"] else None)

    def check(self) -> None: ...

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
