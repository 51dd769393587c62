"""The original weights with what was trained merged into them: the same files, tensors, names, types and order, and the original's config.

One tensor at a time is computed and written, so neither model is ever in memory as a whole. Merging is done in float32 and rounded once.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from backend.export.model_files import KEPT_FILES, write_safetensors
from backend.export.original.original_files import OriginalFiles
from backend.export.original.row_trace import Rows, by_original, trace
from backend.export.original.trained_rows import TrainedRows, trained_rows
from backend.export.trained_weights import TrainedWeights
from backend.utils.errors import UserError
from backend.utils.own_files import own_file

COPIED = (
    *KEPT_FILES,
    "config.json",
    "*.safetensors.index.json",
    "LICENSE*",
    "preprocessor_config.json",
    "*processor*.json",
)
"""Files of the original, beside its weights, that are copied unchanged."""

Done = Callable[[float], None]
"""Receives the fraction of the bytes that are written."""


def write_merged(trained: TrainedWeights, original: OriginalFiles, to: Path, done: Done) -> None:
    """Write the original's files into a new folder, its weights merged. Raises UserError where a trained array has no place in them."""
    arrays = merged_arrays(trained, original)
    total, written = sum(array.nbytes for array in arrays.values()), 0

    def count(size: int) -> None:
        nonlocal written
        written += size
        done(written / max(total, 1))

    to.mkdir(parents=True)
    for file, tensors in original.files.items():
        write_safetensors(to / file, {name: arrays.pop(name) for name in tensors}, count, metadata={"format": "pt"})
    for pattern in COPIED:
        for file in original.folder.glob(pattern):
            shutil.copyfile(own_file(file, original.folder, "model"), to / file.name)


def merged_arrays(trained: TrainedWeights, original: OriginalFiles) -> dict[str, mx.array]:
    """Every original tensor by name, lazily merged, in its own type. Raises UserError where a trained array has no place among them."""
    learned, traced = trained_rows(trained), trace(original)
    if lost := sorted(learned.changed() - traced.keys()):
        raise UserError(
            "format",
            f"How mlx-lm makes {lost[0]} from the original weights could not be found out, so nothing can be merged into them; "
            "choose one of mlx's formats.",
        )
    arrays = original.arrays()
    for name, runs in by_original(run for array in learned.changed() for run in traced[array]).items():
        arrays[name] = merged(arrays[name], runs, learned)
    return arrays | _tied_copy(original, arrays, {run.original for runs in traced.values() for run in runs})


def merged(tensor: mx.array, runs: list[Rows], learned: TrainedRows) -> mx.array:
    """The tensor with the rows that were trained in the place of its own."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.ndim > 1 else tensor.reshape(math.prod(tensor.shape), 1)
    parts: list[mx.array] = []
    at = 0
    for run in runs:
        end = run.original_start + run.count
        if run.original_start < at:
            raise UserError(
                "format", f"mlx-lm uses {run.original} twice, so what was trained cannot be merged into it."
            )
        parts += [rows[at : run.original_start], learned.rows(run.array, run.start, rows[run.original_start : end])]
        at = end
    parts.append(rows[at:])
    return mx.concatenate([part.astype(mx.float32) for part in parts]).reshape(tensor.shape).astype(tensor.dtype)


def _tied_copy(original: OriginalFiles, arrays: dict[str, mx.array], used: set[str]) -> dict[str, mx.array]:
    """The output layer that some files hold beside an embedding it is tied to. mlx-lm drops it; llama.cpp would use it."""
    heads = [name for name in arrays if name.endswith("lm_head.weight") and name not in used]
    embeddings = [name for name in used if name.endswith("embed_tokens.weight")]
    if original.config.get("tie_word_embeddings") and len(heads) == len(embeddings) == 1:
        return {heads[0]: arrays[embeddings[0]].astype(arrays[heads[0]].dtype)}
    return {}
