"""The original weights of the model that an adapter is carried onto: their names and shapes, and which rows of mlx-lm's arrays they are.

An adapter of peft names the original weights. Where they are not on this disk, as for a quantised model of the mlx community, the layers of
mlx-lm's model stand for them, if the adapter's names are theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from backend.models.export.original.original_files import Fetch, OriginalFiles, find_original
from backend.models.export.original.row_trace import Rows, Trace, trace
from backend.models.peft.settings import SETTING
from backend.spec.faults import Mistake
from backend.spec.user_input.text import shown


@dataclass(frozen=True, slots=True)
class Origin:
    """`shapes` of the original tensors, where mlx-lm's arrays come from (`traced`), and the files that hold them, where those are here.
    `is_tied`: the output layer is the embedding."""

    shapes: Mapping[str, tuple[int, ...]]
    traced: Trace
    files: OriginalFiles | None
    is_tied: bool

    def tensor(self, name: str) -> mx.array:
        """An original tensor, float32. Raises Mistake where the files are not here."""
        if self.files is None:
            raise Mistake(
                SETTING,
                f"The original weights are needed for {shown(name, 90)}, and are not on this disk; give --fetch.",
            )
        return self.files.arrays()[name].astype(mx.float32)


def origin_of(
    base: Path, name: str, model: nn.Module, config: Mapping[str, Any], layers: Iterable[str], fetch: Fetch | None
) -> Origin:
    """Where the arrays of `model`, from the folder `base` and called `name`, come from. `config`: its config.json. `layers`: those that the
    adapter names. `fetch` downloads the original weights where they are not on this disk. Raises Mistake where it cannot be known."""
    try:
        files = find_original(base, name, fetch)
    except Mistake:
        shapes = _own_shapes(model)
        if fetch is not None or any(f"{layer}.weight" not in shapes for layer in layers):
            raise
        traced = {name: [Rows(name, 0, name, 0, math.prod(shape[:-1] or shape))] for name, shape in shapes.items()}
        return Origin(shapes, traced, None, is_tied(config, traced))
    traced = trace(files)
    return Origin(files.shapes, traced, files, is_tied(config, traced))


def is_tied(config: Mapping[str, Any], traced: Trace) -> bool:
    """Whether the output layer of a model is its embedding. transformers takes a config.json that does not say as yes."""
    text: Mapping[str, Any] = config.get("text_config") or config
    has_head = any(name.endswith("lm_head.weight") for name in traced)
    return bool(text.get("tie_word_embeddings", True)) and not has_head


def _own_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of mlx-lm's arrays, of a quantised layer those of the weights that it stands for."""
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    packed = {
        f"{name}.weight": (module.weight.shape[0], module.weight.shape[1] * 32 // module.bits)
        for name, module in model.named_modules()
        if isinstance(module, nn.QuantizedLinear)
    }
    return {name: array.shape for name, array in arrays.items() if array.ndim} | packed
