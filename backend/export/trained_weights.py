"""Trained weights on disk. Arrays are read when evaluated: each pass opens the model again, and frees them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from backend.models import policy
from backend.models.adapters import ADAPTER_ENDS, array_names
from backend.models.loading import open_weights
from backend.models.tokenizers import load_tokenizer, with_end_tokens
from backend.utils.errors import UserError


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """Adapters in mlx-lm's format; the two files may lie in different folders."""

    arrays: Path
    config: Path

    @classmethod
    def within(cls, folder: Path) -> AdapterFiles:
        return cls(folder / "adapters.safetensors", folder / "adapter_config.json")

    def about(self) -> dict[str, Any]:
        return json.loads(self.config.read_text(encoding="utf-8"))

    def copied_to(self, folder: Path) -> AdapterFiles:
        folder.mkdir(parents=True, exist_ok=True)
        copies = self.within(folder)
        # copyfile drops extended attributes, which some disks turn into ._ files.
        shutil.copyfile(self.arrays, copies.arrays)
        shutil.copyfile(self.config, copies.config)
        return copies


@dataclass(frozen=True, slots=True)
class TrainedWeights:
    """One state of a run's weights: a local base model and the result of training."""

    base: Path  # folder of the model under the trained arrays
    name: str  # base model as in the settings: an id or a folder
    tokenizer: Path  # folder to copy tokenizer files from
    adapters: AdapterFiles | None = None  # None for full fine-tuning
    arrays: Path | None = None  # of full fine-tuning, in place of the base's; None if `base` is the trained model
    quantization: str = "none"  # quantisation after loading: a key of `policy.QUANTIZATION`, or "none"
    untrained: Path | None = None  # folder of the untrained model; None if not on this disk
    has_own_tokenizer: bool = False  # True if `tokenizer` is not the base's, so config.json must name its end tokens

    def open(self) -> nn.Module:
        """The trained model with adapters. Raises UserError if it does not load or arrays do not fit."""
        return self.open_with_config()[0]

    def open_with_config(self) -> tuple[nn.Module, dict[str, Any]]:
        model, config = open_model(self.base)
        if how := policy.QUANTIZATION.get(self.quantization):
            model, config = policy.quantize(model, config, **how)
        if self.arrays is not None:
            _load(model, self.arrays)
        if self.adapters is not None:
            about = self.adapters.about()
            is_dora = about.get("fine_tune_type") == "dora"
            linear_to_lora_layers(model, about["num_layers"], about["lora_parameters"], use_dora=is_dora)
            parameters: list[tuple[str, mx.array]] = tree_flatten(model.parameters())  # pyright: ignore
            adapters = {name for name, _ in parameters if name.endswith(ADAPTER_ENDS if is_dora else ADAPTER_ENDS[:2])}
            # Modules trained as a whole were kept in 32 bits, and have the type of the model in it.
            whole = array_names(model, self.whole_modules())
            _load(model, self.adapters.arrays, needed=adapters | whole, typed=whole)
        model.eval()  # dropout
        return model, with_end_tokens(config, load_tokenizer(self.tokenizer)) if self.has_own_tokenizer else config

    def whole_modules(self) -> list[str]:
        return [] if self.adapters is None else self.adapters.about().get("modules_to_save") or []


def open_model(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """(lazy model, its config.json). Raises UserError if mlx-lm cannot load it."""
    return open_weights(folder, str(folder), "model")


def _load(model: nn.Module, file: Path, needed: set[str] | None = None, typed: set[str] | None = None) -> None:
    """Load arrays from a file: all and only those `needed`, or any; those of `typed`, or all, in the model's types."""
    own: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    saved: Any = mx.load(str(file))
    if missing := sorted((needed or set()) - saved.keys()):  # mlx-lm would leave them at random
        raise UserError("run", f"{file} lacks {len(missing)} of the model's adapters, {missing[0]} among them.")
    shapes = {name: array.shape for name, array in own.items() if needed is None or name in needed}
    if wrong := [name for name, array in saved.items() if shapes.get(name) != array.shape]:
        raise UserError("run", f"{file} does not belong to this model: {wrong[0]} has no place in it.")
    weights = [
        (name, array.astype(own[name].dtype) if typed is None or name in typed else array)
        for name, array in saved.items()
    ]
    model.load_weights(weights, strict=False)
