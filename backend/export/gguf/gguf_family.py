"""Families whose GGUF file is written here: what llama.cpp must be told of a model's sizes, and how it lays out its attention.

The keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Other families go through llama.cpp's own converter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np

from backend.utils.errors import UserError

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA, "mistral": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3,
}  # fmt: skip
"""By the model_type of config.json."""

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor by which llama.cpp divides the frequencies of rotary positions."""


def use_converter(reason: str) -> UserError:
    """The refusal of a model that is not written here, with the way that is left."""
    return UserError(
        "format",
        f"{reason}, so its GGUF file is not written here; export the Hugging Face weights (--format original), and run llama.cpp's "
        "`python convert_hf_to_gguf.py FOLDER` on them.",
    )


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Attention heads: queries, keys, and the numbers of one."""

    queries: int
    keys: int
    size: int


class GgufFamily:
    """What llama.cpp calls a model and its tensors."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Raises UserError for a model that is not written here."""
        kind = str(config.get("model_type"))
        if kind not in ARCHITECTURES:
            raise use_converter(f"A model of type {kind} needs llama.cpp's own converter")
        self.config, self.architecture = config, ARCHITECTURES[kind]
        self.layers = int(config["num_hidden_layers"])
        queries = int(config["num_attention_heads"])
        keys = int(config.get("num_key_value_heads") or queries)
        self.heads = HeadSizes(queries, keys, int(config.get("head_dim") or config["hidden_size"] // queries))
        self._rope = _rope(config)
        self._names = gguf.get_tensor_name_map(self.architecture, self.layers)
        if (kind == "mistral" and config.get("sliding_window")) or config.get("use_sliding_window"):
            raise use_converter("The model attends within a sliding window")

    def tensor_name(self, original: str) -> str | None:
        """llama.cpp's name of an original tensor; None for one that it computes itself. Raises UserError for one it does not know."""
        if original.endswith("rotary_emb.inv_freq"):
            return None
        if original == "lm_head.weight" and self.config.get("tie_word_embeddings"):
            return None
        name = self._names.get_name(original, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise use_converter(f"llama.cpp's format has no place for {original}")
        return name

    def laid_out(self, original: str, array: np.ndarray, *, undo: bool = False) -> np.ndarray:
        """A tensor's rows as llama.cpp wants them, or back. Its Llama rotates neighbouring numbers of a head, transformers' the two halves,
        so the rows of queries and keys are in another order."""
        is_query = ".q_proj." in original
        if self.architecture != gguf.MODEL_ARCH.LLAMA or not (is_query or ".k_proj." in original):
            return array
        heads, half = (self.heads.queries if is_query else self.heads.keys), self.heads.size // 2
        pairs = (half, 2) if undo else (2, half)
        return array.reshape(heads, *pairs, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)

    def write_sizes(self, writer: gguf.GGUFWriter) -> None:
        """The keys that llama.cpp reads before it builds the model."""
        config, heads = self.config, self.heads
        writer.add_block_count(self.layers)
        writer.add_context_length(int(config["max_position_embeddings"]))
        writer.add_embedding_length(int(config["hidden_size"]))
        writer.add_feed_forward_length(int(config["intermediate_size"]))
        writer.add_head_count(heads.queries)
        writer.add_head_count_kv(heads.keys)
        writer.add_key_length(heads.size)
        writer.add_value_length(heads.size)
        writer.add_layer_norm_rms_eps(float(config.get("rms_norm_eps", 1e-6)))
        writer.add_rope_freq_base(float(self._rope.get("rope_theta", 10_000.0)))
        writer.add_rope_dimension_count(heads.size)
        writer.add_vocab_size(int(config["vocab_size"]))

    def extra_tensors(self) -> dict[str, np.ndarray]:
        """Tensors that llama.cpp wants beside the model's."""
        if _rope_kind(self._rope) != "llama3":
            return {}
        return {ROPE_FACTORS: _llama3_factors(self._rope, self.heads.size)}


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Settings of rotary positions, which transformers 5 keeps in one place and 4 in two. Raises UserError for a kind not written here."""
    rope = {"rope_theta": config.get("rope_theta", 10_000.0)} | (config.get("rope_scaling") or {})
    rope |= config.get("rope_parameters") or {}
    if _rope_kind(rope) not in ("default", "llama3"):
        raise use_converter(f"The model scales its positions by {_rope_kind(rope)}")
    return rope


def _rope_kind(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _llama3_factors(rope: dict[str, Any], size: int) -> np.ndarray:
    """What Llama 3.1 divides each frequency by, [size / 2]: 1 for short waves, `factor` for those longer than the context it was first
    trained with, and between them a mean. As transformers' `_compute_llama3_parameters`."""
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    context = float(rope["original_max_position_embeddings"])
    frequency = float(rope["rope_theta"]) ** -(np.arange(0, size, 2, dtype=np.float64) / size)
    turns = context * frequency / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - share) / factor + share)).astype(np.float32)
