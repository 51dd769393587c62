"""Write a model as a GGUF file, one tensor at a time, and read it back under its original names.

Matrices have the chosen type, vectors float32; rows not divisible by 32 stay float16, as in llama.cpp.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from backend.export.original_files import OriginalFiles
from backend.export.original_rows import merged_arrays
from backend.export.trained_weights import TrainedWeights
from backend.utils.errors import UserError

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
"""By `model_type` in config.json."""
ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of RoPE frequency divisors."""
F32, F16, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0
TYPES = {
    "f16": (F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
"""Matrix type, and llama.cpp's name of the file type."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
QWEN_2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
WORD_SPLITTERS = {
    (LLAMA_3, "bytes"): "llama-bpe",
    (QWEN_2, "bytes"): "qwen2",
    ("digits", "gpt-2"): "smollm",
    ("gpt-2",): "gpt-2",
}
"""llama.cpp's pre-tokenizer name by its steps."""
WHOLE_WORDS_FIRST = {"llama-bpe"}
"""Pre-tokenizers with `ignore_merges` in llama.cpp."""

Done = Callable[[float], None]


def use_converter(reason: str) -> UserError:
    """Error for an unsupported model; points to llama.cpp's converter."""
    converter = "llama.cpp's `python convert_hf_to_gguf.py FOLDER`"
    other = f"export the Hugging Face weights (--format original), and run {converter} on them"
    return UserError("format", f"{reason}, so its GGUF file is not written here; {other}.")


class GgufFamily:
    """llama.cpp's names of a model and its tensors, and its attention layout."""

    def __init__(self, config: dict[str, Any]) -> None:
        kind = str(config.get("model_type"))
        if kind not in ARCHITECTURES:
            raise use_converter(f"A model of type {kind} needs llama.cpp's own converter")
        if (kind == "mistral" and config.get("sliding_window")) or config.get("use_sliding_window"):
            raise use_converter("The model attends within a sliding window")
        self.config, self.architecture = config, ARCHITECTURES[kind]
        self.layers = int(config["num_hidden_layers"])
        self.queries = int(config["num_attention_heads"])
        self.keys = int(config.get("num_key_value_heads") or self.queries)
        self.head_size = int(config.get("head_dim") or config["hidden_size"] // self.queries)
        # Settings of rotary positions, which transformers 5 keeps in one place and 4 in two.
        self.rope: dict[str, Any] = {"rope_theta": config.get("rope_theta", 10_000.0)}
        self.rope |= (config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})
        self.rope_kind = str(self.rope.get("rope_type") or self.rope.get("type") or "default")
        if self.rope_kind not in ("default", "llama3"):
            raise use_converter(f"The model scales its positions by {self.rope_kind}")
        self._names = gguf.get_tensor_name_map(self.architecture, self.layers)

    def tensor_name(self, original: str) -> str | None:
        """llama.cpp's name of a tensor; None for one that it computes. Raises UserError if unknown."""
        is_tied = original == "lm_head.weight" and self.config.get("tie_word_embeddings")
        if is_tied or original.endswith("rotary_emb.inv_freq"):
            return None
        name = self._names.get_name(original, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise use_converter(f"llama.cpp's format has no place for {original}")
        return name

    def laid_out(self, original: str, array: np.ndarray, *, undo: bool = False) -> np.ndarray:
        """Permute a tensor's rows to llama.cpp's order, or back.

        llama.cpp's Llama rotates neighbouring numbers of a head, transformers the two halves.
        """
        is_query = ".q_proj." in original
        if self.architecture != gguf.MODEL_ARCH.LLAMA or not (is_query or ".k_proj." in original):
            return array
        heads, half = (self.queries if is_query else self.keys), self.head_size // 2
        pairs = (half, 2) if undo else (2, half)
        return array.reshape(heads, *pairs, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)

    def write_sizes(self, writer: gguf.GGUFWriter) -> None:
        """Write the hyperparameter keys."""
        config = self.config
        writer.add_block_count(self.layers)
        writer.add_context_length(int(config["max_position_embeddings"]))
        writer.add_embedding_length(int(config["hidden_size"]))
        writer.add_feed_forward_length(int(config["intermediate_size"]))
        writer.add_head_count(self.queries)
        writer.add_head_count_kv(self.keys)
        writer.add_key_length(self.head_size)
        writer.add_value_length(self.head_size)
        writer.add_layer_norm_rms_eps(float(config.get("rms_norm_eps", 1e-6)))
        writer.add_rope_freq_base(float(self.rope.get("rope_theta", 10_000.0)))
        writer.add_rope_dimension_count(self.head_size)
        writer.add_vocab_size(int(config["vocab_size"]))

    def extra_tensors(self) -> dict[str, np.ndarray]:
        """Divisors of Llama 3.1's RoPE frequencies, [head / 2], as in transformers' `_compute_llama3_parameters`."""
        if self.rope_kind != "llama3":
            return {}
        rope = self.rope
        factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
        context, size = float(rope["original_max_position_embeddings"]), self.head_size
        frequency = float(rope["rope_theta"]) ** -(np.arange(0, size, 2, dtype=np.float64) / size)
        turns = context * frequency / (2 * math.pi)
        share = np.clip((turns - low) / (high - low), 0, 1)
        return {ROPE_FACTORS: (1 / ((1 - share) / factor + share)).astype(np.float32)}


# The tokenizer


def _read_tokenizer(folder: Path) -> tuple[dict[str, Any], str]:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise use_converter("The tokenizer has no tokenizer.json")
    tokenizer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    model = tokenizer["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise use_converter("The tokenizer is no byte-level BPE")
    name = WORD_SPLITTERS.get(tuple(_steps(tokenizer.get("pre_tokenizer"))))
    if name is None or (name in WHOLE_WORDS_FIRST) != bool(model.get("ignore_merges")):
        raise use_converter("The tokenizer splits words in a way whose name in llama.cpp is not known")
    return tokenizer, name


def _steps(pre_tokenizer: dict[str, Any] | None) -> list[str]:
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


def _write_vocabulary(folder: Path, size: int, writer: gguf.GGUFWriter) -> None:
    tokenizer, splitter = _read_tokenizer(folder)
    tokens, types = [f"[PAD{number}]" for number in range(size)], [int(gguf.TokenType.UNUSED)] * size
    for token, number in tokenizer["model"]["vocab"].items():
        tokens[number], types[number] = token, int(gguf.TokenType.NORMAL)
    for added in tokenizer.get("added_tokens", ()):
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], int(kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=size).add_to_gguf(writer, quiet=True)


# The file


def check(original: OriginalFiles, tokenizer: Path) -> None:
    """Raise UserError for an unsupported model or tokenizer."""
    family = GgufFamily(original.config)
    for name in original.shapes:
        family.tensor_name(name)
    _read_tokenizer(tokenizer)


def write_gguf(trained: TrainedWeights, original: OriginalFiles, type_: str, file: Path, done: Done) -> None:
    """Write the trained weights to a new `file`. Raises UserError for an unsupported model."""
    family = GgufFamily(original.config)
    arrays = merged_arrays(trained, original)
    matrix_type, file_type = TYPES[type_]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[family.architecture])
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(original.name.rpartition("/")[2])
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    family.write_sizes(writer)
    _write_vocabulary(trained.tokenizer, int(original.config["vocab_size"]), writer)
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
    """Open a GGUF model under its original tensor names."""
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
    return original.open_with(arrays)


def _announce(
    writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], matrix_type: gguf.GGMLQuantizationType
) -> None:
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
    widened: Any = array.astype(mx.float32)
    numbers = np.array(widened)
    mx.clear_cache()
    return numbers
