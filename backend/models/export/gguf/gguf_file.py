"""Write a model as one GGUF file, a tensor at a time, and open it again by its original names.

Matrices are in the chosen type, vectors in float32. A row whose length is no multiple of Q8_0's 32 stays float16, as llama.cpp has it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from backend.models.export.gguf.gguf_family import ROPE_FACTORS, GgufFamily
from backend.models.export.gguf.gguf_vocabulary import check_vocabulary, write_vocabulary
from backend.models.export.original.merged_weights import merged_arrays
from backend.models.export.original.original_files import OriginalFiles, open_with
from backend.models.export.trained_weights import TrainedWeights

F32, F16, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0

TYPES = {
    "f16": (F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
"""The type of matrices, and llama.cpp's name for such a file."""

Done = Callable[[float], None]


def check(original: OriginalFiles, tokenizer: Path) -> None:
    """Raise Mistake for a model or a tokenizer that is not written here, before minutes of work."""
    family = GgufFamily(original.config)
    for name in original.shapes:
        family.tensor_name(name)
    check_vocabulary(tokenizer)


def write_gguf(trained: TrainedWeights, original: OriginalFiles, type_: str, file: Path, done: Done) -> None:
    """Write the trained weights to `file`, in a new folder. Raises Mistake for a model that is not written here."""
    family = GgufFamily(original.config)
    arrays = merged_arrays(trained, original)
    matrix_type, file_type = TYPES[type_]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[family.architecture])
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(original.name.rpartition("/")[2])
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    family.write_sizes(writer)
    write_vocabulary(trained.tokenizer, int(original.config["vocab_size"]), writer)
    names = {name: there for name in arrays if (there := family.tensor_name(name)) is not None}
    extra = family.extra_tensors()
    for name, array in extra.items():
        writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes)
    for name, there in names.items():
        _announce(writer, there, arrays[name].shape, matrix_type)
    file.parent.mkdir(parents=True)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for array in extra.values():
            writer.write_tensor_data(array)
        for count, name in enumerate(names, 1):
            array = family.laid_out(name, _numbers(arrays.pop(name)))
            writer.write_tensor_data(gguf.quants.quantize(array, _type_of(array.shape, matrix_type)))
            done(count / len(names))
    finally:
        writer.close()


def open_gguf(file: Path, original: OriginalFiles) -> nn.Module:
    """The model in a GGUF file, its tensors under their original names again. Of the original only config.json and names are read."""
    family = GgufFamily(original.config)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    arrays: dict[str, mx.array] = {}
    for name in original.shapes:
        there = family.tensor_name(name)
        if there is not None:
            tensor = tensors.pop(there)
            numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            arrays[name] = mx.array(np.ascontiguousarray(family.laid_out(name, numbers, undo=True)))
    if strangers := tensors.keys() - {ROPE_FACTORS}:
        raise RuntimeError(f"{file} holds tensors that the model does not have: {', '.join(sorted(strangers))}.")
    return open_with(original, arrays)


def _announce(
    writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], matrix_type: gguf.GGMLQuantizationType
) -> None:
    """Tell the writer of a tensor whose bytes come later."""
    type_ = _type_of(shape, matrix_type)
    if type_ in (F32, F16):
        dtype = np.dtype(np.float32 if type_ == F32 else np.float16)
        writer.add_tensor_info(name, shape, dtype, dtype.itemsize * int(np.prod(shape)))
        return
    packed = gguf.quant_shape_to_byte_shape(shape, type_)
    writer.add_tensor_info(name, packed, np.dtype(np.uint8), int(np.prod(packed)), raw_dtype=type_)


def _type_of(shape: tuple[int, ...], matrix_type: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    if len(shape) < 2:
        return F32
    return F16 if matrix_type == Q8_0 and shape[-1] % 32 else matrix_type


def _numbers(array: mx.array) -> np.ndarray:
    """An array as float32, computed now and freed with what it was computed from."""
    widened: Any = array.astype(mx.float32)
    numbers = np.array(widened)
    mx.clear_cache()
    return numbers
