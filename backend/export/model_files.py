"""The files of an exported model: safetensors written one array at a time, config.json, the base's tokenizer; or adapters alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm import utils as mlx_lm_utils

from backend.export.trained_weights import TrainedWeights
from backend.utils.own_files import own_file

KEPT_FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "*.tiktoken", "chat_template.*", "generation_config.json"),
    *("tokenization_*.py", "configuration_*.py", "modeling_*.py"),
)
"""Files that are copied from the base model unchanged, beside the new config.json and weights."""

SAFETENSORS_TYPES = {
    mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.bool_: "BOOL",
    mx.int8: "I8", mx.int16: "I16", mx.int32: "I32", mx.int64: "I64",
    mx.uint8: "U8", mx.uint16: "U16", mx.uint32: "U32", mx.uint64: "U64",
}  # fmt: skip

METADATA = {"format": "mlx"}
"""Without metadata a file's header would hold "__metadata__": null, which LM Studio refuses."""

Done = Callable[[float], None]
"""Receives the fraction of the bytes that are written."""


def write_model(
    model: nn.Module, config: dict[str, Any], tokenizer_from: Path, to: Path, done: Done = lambda share: None
) -> None:
    """Write weights, config.json and the base's tokenizer files into an empty folder. Takes the arrays out of the model.

    Raises UserError as `kept_files`.
    """
    to.mkdir(parents=True, exist_ok=True)
    # By default mlx-lm drops `vision_config`, which a model that keeps its vision tower needs for loading.
    keep_vision = "vision_tower" in getattr(model, "model", {})
    write_weights(model, to, done)
    mlx_lm_utils.save_config(config, to / "config.json", keep_vision_config=keep_vision)
    # Copied rather than saved again by transformers 5, whose class name in tokenizer_config.json older versions refuse to load.
    # By copyfile, which drops extended attributes: some disks turn them into ._ files.
    for file in kept_files(tokenizer_from):
        shutil.copyfile(file, to / file.name)


def kept_files(base: Path) -> list[Path]:
    """KEPT_FILES of a base model, or of a tokenizer's folder. Raises UserError for one that is a link out of its folder: it could be any file
    of this machine, and exports are published."""
    return [own_file(file, base, "model") for pattern in KEPT_FILES for file in base.glob(pattern)]


def write_weights(model: nn.Module, to: Path, done: Done) -> None:
    """Write model.safetensors, or shards of mlx-lm's size with their index. Takes the arrays out of the model.

    One array at a time is computed, written and freed with what it was computed from, so a lazy model is never in memory as a whole.
    """
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    total, written = sum(array.nbytes for array in weights.values()), 0
    shards = mlx_lm_utils.make_shards(weights)
    model.update(tree_map(lambda _: mx.array([]), model.parameters()))
    weights.clear()  # from here only `shards` holds the arrays

    def count(size: int) -> None:
        nonlocal written
        written += size
        done(written / max(total, 1))

    index: dict[str, str] = {}
    number_of_shards = len(shards)
    for number, shard in enumerate(shards, 1):
        name = (
            f"model-{number:05d}-of-{number_of_shards:05d}.safetensors" if number_of_shards > 1 else "model.safetensors"
        )
        index |= dict.fromkeys(shard, name)
        write_safetensors(to / name, shard, count)
    if number_of_shards > 1:
        about = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        (to / "model.safetensors.index.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def write_safetensors(
    file: Path,
    arrays: dict[str, Any],
    written: Callable[[int], None] = lambda size: None,
    metadata: dict[str, str] = METADATA,
) -> None:
    """Write lazy arrays of mlx, or numpy's, one by one, and remove each from `arrays` as it is written; `written` is told its bytes.

    The format (https://github.com/huggingface/safetensors): eight bytes of length, little-endian; a JSON header with the type, shape and
    byte range of every array, all known before anything is computed; the bytes. mlx's own writer holds every array of a file.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": _stored_type(array), "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]
        }  # fmt: skip
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of eight
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in list(arrays):
            written(_write_array(stream, arrays.pop(name)))


def _stored_type(array: mx.array | np.ndarray) -> str:
    dtype = getattr(mx, array.dtype.name) if isinstance(array, np.ndarray) else array.dtype
    return SAFETENSORS_TYPES[dtype]


def _write_array(stream: BinaryIO, array: mx.array | np.ndarray) -> int:
    """Compute an array and write its bytes; → how many."""
    if isinstance(array, np.ndarray):
        stream.write(np.ascontiguousarray(array).data)
        return array.nbytes
    if array.size:
        numbers: Any = mx.contiguous(array).reshape(-1).view(mx.uint8)
        stream.write(memoryview(numbers))
    size = array.nbytes
    del array
    mx.clear_cache()  # a GPU's allocator keeps freed buffers for the next array of the same size
    return size


def write_adapter(trained: TrainedWeights, to: Path) -> None:
    """Write the adapters in mlx-lm's layout into a new folder, with a README that names the base model they belong to."""
    assert trained.adapters is not None
    files = trained.adapters.copied_to(to)
    kind = json.loads(files.config.read_text(encoding="utf-8")).get("fine_tune_type", "lora")
    quantised = {"none": "", "mxfp4": " quantised to MXFP4"}.get(
        trained.quantization, f" quantised to {trained.quantization} bits"
    )
    (to / "README.md").write_text(
        f"{'DoRA' if kind == 'dora' else 'LoRA'} adapters for the model {trained.name}{quantised}, trained with GRPO Studio.\n\n"
        f'```\nmlx_lm.generate --model {trained.name} --adapter-path . --prompt "…"\n```\n',
        encoding="utf-8",
    )
