"""Suggested models with architecture numbers from their config.json, for sizes without a download."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from backend.trainer.memory.model_shape import ModelShape, shape_from
from backend.utils.places import resources

TOKENIZER_BYTES = 16e6  # approximate bytes of tokenizer and configs
SHARED = {"tie_word_embeddings": True, "torch_dtype": "bfloat16", "quantization": {"group_size": 64, "bits": 4}}


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
        return self.shape.weights + TOKENIZER_BYTES


SUGGESTED_MODELS = tuple(  # smallest first
    SuggestedModel(sizes.pop("id"), sizes.pop("good_for"), sizes | SHARED)
    for sizes in tomllib.loads((resources() / "suggested_models.toml").read_text(encoding="utf-8"))["models"]
)


def suggested(id_: str) -> SuggestedModel | None:
    return next((model for model in SUGGESTED_MODELS if model.id == id_), None)
