"""Suggested models with architecture numbers from their config.json, for sizes without a download."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from backend.trainer.memory.model_shape import ModelShape, shape_from

TOKENIZER_BYTES = 16e6
"""Approximate bytes of tokenizer and configs."""
_FOUR_BITS = {"group_size": 64, "bits": 4}


@dataclass(frozen=True)
class SuggestedModel:
    """A Hugging Face model. `architecture` has the sizes of its config.json."""

    id: str
    good_for: str
    architecture: Mapping[str, Any]

    @cached_property
    def shape(self) -> ModelShape:
        shape = shape_from(self.architecture)
        assert shape is not None, self.id
        return shape

    @property
    def download_bytes(self) -> float:
        """Approximate bytes to download."""
        return self.shape.weights + TOKENIZER_BYTES


def _architecture(
    kind: str, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, inner: int, vocabulary: int
) -> Mapping[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "quantization": _FOUR_BITS,
    }


SUGGESTED_MODELS: tuple[SuggestedModel, ...] = (
    SuggestedModel(
        "mlx-community/Qwen2.5-0.5B-Instruct-4bit",
        "The smallest worth training: for a first run on any Mac, and for short answers.",
        _architecture("qwen2", 896, 24, 14, 2, 64, 4864, 151936),
    ),
    SuggestedModel(
        "mlx-community/Qwen3-0.6B-4bit",
        "Thinks before it answers: a good first model for reasoning on 8 GB.",
        _architecture("qwen3", 1024, 28, 16, 8, 128, 3072, 151936),
    ),
    SuggestedModel(
        "mlx-community/Llama-3.2-1B-Instruct-4bit",
        "Follows instructions without thinking aloud: for formats, tone and short tasks.",
        _architecture("llama", 2048, 16, 32, 8, 64, 8192, 128256),
    ),
    SuggestedModel(
        "mlx-community/Qwen3-1.7B-4bit",
        "Grade-school mathematics and longer reasoning, at a few times the seconds of 0.6B.",
        _architecture("qwen3", 2048, 28, 16, 8, 128, 6144, 151936),
    ),
    SuggestedModel(
        "mlx-community/Qwen3-4B-4bit",
        "The strongest of these: for results that are to be used, on 16 GB or more.",
        _architecture("qwen3", 2560, 36, 32, 8, 128, 9728, 151936),
    ),
)
"""Smallest first."""


def suggested(id_: str) -> SuggestedModel | None:
    return next((model for model in SUGGESTED_MODELS if model.id == id_), None)
