"""Write a model as one GGUF file, a tensor at a time, and open it again by its original names.

Matrices are in the chosen type, vectors in float32. A row whose length is no multiple of Q8_0's 32 stays float16, as llama.cpp has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from backend.export.gguf.gguf_family import ROPE_FACTORS, GgufFamily, use_converter
from backend.export.original.merged_weights import merged_arrays
from backend.export.original.original_files import OriginalFiles, open_with
from backend.export.trained_weights import TrainedWeights

# The tokenizer of a GGUF file, from tokenizer.json: tokens with their types, merges, special tokens, the chat
# template.

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

LLAMA_3 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}"
QWEN_2 = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{REST}"

WORD_SPLITTERS = {
    (LLAMA_3, "bytes"): "llama-bpe",
    (QWEN_2, "bytes"): "qwen2",
    ("digits", "gpt-2"): "smollm",
    ("gpt-2",): "gpt-2",
}
"""llama.cpp's name by the steps of the pre-tokenizer, as `_steps` tells them."""

WHOLE_WORDS_FIRST = {"llama-bpe"}
"""Those with which llama.cpp takes a word that is a token as it is, without merging (`ignore_merges`)."""


def check_vocabulary(folder: Path) -> None:
    """Raise UserError for a tokenizer that llama.cpp is not known to read in the same way."""
    _word_splitter(_read(folder))


def write_vocabulary(folder: Path, size: int, writer: gguf.GGUFWriter) -> None:
    """Write the tokenizer in `folder`; `size` is the model's number of tokens, which may be larger. Raises as `check_vocabulary`."""
    tokenizer = _read(folder)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_word_splitter(tokenizer))
    tokens, types = _tokens(tokenizer, size)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=size).add_to_gguf(writer, quiet=True)


def _read(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise use_converter("The tokenizer has no tokenizer.json")
    return json.loads(file.read_text(encoding="utf-8"))


def _tokens(tokenizer: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Every token by id, and its type. Ids that the model has and the tokenizer has not are unused."""
    tokens, types = [f"[PAD{number}]" for number in range(size)], [int(gguf.TokenType.UNUSED)] * size
    for token, number in tokenizer["model"]["vocab"].items():
        tokens[number], types[number] = token, int(gguf.TokenType.NORMAL)
    for added in tokenizer.get("added_tokens", ()):
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], int(kind)
    return tokens, types


def _word_splitter(tokenizer: dict[str, Any]) -> str:
    model = tokenizer["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise use_converter("The tokenizer is no byte-level BPE")
    name = WORD_SPLITTERS.get(tuple(_steps(tokenizer.get("pre_tokenizer"))))
    if name is None or (name in WHOLE_WORDS_FIRST) != bool(model.get("ignore_merges")):
        raise use_converter("The tokenizer splits words in a way whose name in llama.cpp is not known")
    return name


def _steps(pre_tokenizer: dict[str, Any] | None) -> list[str]:
    """The steps of a pre-tokenizer: a regular expression, "digits" one by one, "gpt-2" for its words in bytes, "bytes" for bytes alone;
    its type where it is none of these."""
    match pre_tokenizer:
        case {"type": "Sequence", "pretokenizers": steps}:
            return [name for step in steps for name in _steps(step)]
        case {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": pattern}}:
            return [pattern]
        case {"type": "Digits", "individual_digits": True}:
            return ["digits"]
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return ["gpt-2" if pre_tokenizer.get("use_regex", True) else "bytes"]
    return [str((pre_tokenizer or {}).get("type"))]


# ── gguf file ────────────────────────────────────────────────────────────────────────────────────────────────────────

F32, F16, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0

TYPES = {
    "f16": (F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
"""The type of matrices, and llama.cpp's name for such a file."""

Done = Callable[[float], None]


def check(original: OriginalFiles, tokenizer: Path) -> None:
    """Raise UserError for a model or a tokenizer that is not written here, before minutes of work."""
    family = GgufFamily(original.config)
    for name in original.shapes:
        family.tensor_name(name)
    check_vocabulary(tokenizer)


def write_gguf(trained: TrainedWeights, original: OriginalFiles, type_: str, file: Path, done: Done) -> None:
    """Write the trained weights to `file`, in a new folder. Raises UserError for a model that is not written here."""
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
