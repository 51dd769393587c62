"""Find the original Hugging Face weights of a base model that mlx converted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
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
from backend.models.loading import loading, model_classes
from backend.models.model_folder import header_of
from backend.utils.errors import UserError
from backend.utils.hub_cache import local_folder

FURTHEST = 3  # model cards to follow to the original

Fetch = Callable[[str], Path]  # downloads a repository; returns its folder


@dataclass(frozen=True, slots=True)
class OriginalFiles:
    """A folder of original weights: its Hugging Face id or folder name, and tensor shapes by file."""

    folder: Path
    name: str
    files: Mapping[str, Mapping[str, tuple[int, ...]]]  # file → tensor → shape, in byte order

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for tensors in self.files.values() for name, shape in tensors.items()}

    @property
    def config(self) -> dict[str, Any]:
        return _config(self.folder)

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
            model_class, arguments = model_classes(config)
            return model_class(arguments.from_dict(config))

    def open_with(self, arrays: Mapping[str, mx.array]) -> nn.Module:
        """Load original `arrays` into a model as mlx-lm does."""
        model: Any = self.empty_model()
        named = dict(arrays)
        model.load_weights(list((model.sanitize(named) if hasattr(model, "sanitize") else named).items()))
        model.eval()
        return model


def find_original(base: Path, name: str, fetch: Fetch | None = None) -> OriginalFiles:
    """The model's own files, or those that its card names; `fetch` downloads them. Raises UserError."""
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
    """(repository that it was converted from, by cards on this disk, or None; bits, 0 for floats). Raises UserError."""
    folder: Path | None = base
    called, tries = name, FURTHEST
    while folder is not None and _is_converted(folder) and tries:
        called, tries = _named_by_card(folder, called), tries - 1
        folder = local_folder(called)
    packed = _config(base).get("quantization") or {}
    return (None if called == name else called), int(packed.get("bits", 0))


def trained_on_original(trained: TrainedWeights, fetch: Fetch | None = None) -> tuple[TrainedWeights, OriginalFiles]:
    """(the same training applied to the original of its base, the original). Raises as `find_original`."""
    if trained.untrained is None:
        gone = f"The base model {trained.name} is not on this disk any more"
        raise UserError("model", f"{gone}, and its weights are needed.")
    original = find_original(trained.untrained, trained.name, fetch)
    if trained.adapters is None:
        return replace(trained, untrained=original.folder, name=original.name), original
    folder = original.folder
    return TrainedWeights(folder, original.name, folder, adapters=trained.adapters, untrained=folder), original


def read_original(folder: Path, name: str) -> OriginalFiles:
    """Read headers of original weights. Raises UserError for unsupported types or mlx-lm names."""
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    odd: list[str] = []
    for file in sorted(folder.glob("model*.safetensors")):
        tensors = header_of(file, "model").items()
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


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def _is_converted(folder: Path) -> bool:
    card = card_of(folder)
    return "quantization" in _config(folder) or bool(card.get("library_name") == "mlx" and card.get("base_model"))


def _named_by_card(folder: Path, name: str) -> str:
    named = card_of(folder).get("base_model") or []
    if models := [named] if isinstance(named, str) else named:
        return str(models[0])
    unknown = f"{name} was quantised by mlx, and its card names no base_model: the original weights are unknown"
    raise UserError("model", f"{unknown}, so train on them, or export for mlx.")


def card_of(folder: Path) -> dict[str, Any]:
    """Metadata of the model card in a folder; {} without one."""
    try:
        return ModelCard.load(folder / "README.md", ignore_metadata_errors=True).data.to_dict()
    except (OSError, ValueError):
        return {}


def fetch_original(name: str, progress: Progress) -> Path:
    """Download a model; a later call resumes it. Raises UserError."""

    def report(state: dict[str, Any]) -> None:
        share = state["done"] / state["total"] if state["total"] else None
        progress(f"Downloading the original weights, {name}.", share)

    listener: Any = SimpleNamespace(report=report, check=lambda: None, sleep=time.sleep)
    return hub.download(name, "model", listener)
