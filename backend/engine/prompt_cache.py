"""New KV caches for a model, one per layer that keeps any."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache


def new_prompt_cache(model: nn.Module) -> list[Any]:
    """Empty caches as the model itself makes them, else one KVCache per layer.

    mlx-lm asks only the outermost module. Some that wrap a text model do not pass the question on (mlx_lm/models/mistral3.py):
    their sliding windows would get plain caches, and in decoding attend to all tokens, but in learning to the window.
    """
    text_model: Any = getattr(model, "language_model", None)
    asks_text_model = not hasattr(model, "make_cache") and hasattr(text_model, "make_cache")
    return make_prompt_cache(text_model if asks_text_model else model)
