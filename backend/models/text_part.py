"""The text model of a vision model that mlx-lm itself does not know, such as SmolVLM, Idefics 3, LFM2-VL and LLaVA."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.cache import make_prompt_cache

from backend.models.architectures import is_text_part, language_model, rotary_settings

TEXT = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?|^(?=lm_head\.)")
"""Prefixes of the text model's arrays, as transformers and mlx-vlm write them; the others are the vision tower's."""


def model_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Classes of a model and its arguments, for `mlx_lm.utils.load_model`."""
    return (TextPart, _Arguments) if is_text_part(config) else mlx_lm_utils._get_classes(config)


class _Arguments:
    from_dict = staticmethod(dict[str, Any])


class TextPart(nn.Module):
    """`language_model` is mlx-lm's model of `text_config`."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        from transformers import CONFIG_MAPPING

        text = dict(language_model(config))
        self._is_tied = bool(text.get("tie_word_embeddings") or config.get("tie_word_embeddings"))
        if text["model_type"] in CONFIG_MAPPING:  # config.json leaves out its defaults, and mlx-lm's are others
            whole = CONFIG_MAPPING[text["model_type"]](**text).to_dict()
            text = {**whole, **rotary_settings(whole), **text}
        self._text = text
        self._make(self._is_tied)

    def _make(self, is_tied: bool) -> None:
        kind, arguments = mlx_lm_utils._get_classes(self._text)
        self.language_model: Any = kind(arguments.from_dict({**self._text, "tie_word_embeddings": is_tied}))

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        other = {} if input_embeddings is None else {"input_embeddings": input_embeddings}  # some models lack it
        return self.language_model(inputs, cache=cache, **other)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """The text model's arrays. Without an output layer among them it is the embedding."""
        named: dict[str, mx.array] = {}
        for name, array in weights.items():
            if found := TEXT.match(name):
                rest = name[found.end() :]
                named[rest if rest.startswith("lm_head.") else f"model.{rest}"] = array
        if not self._is_tied:
            self._make("lm_head.weight" not in named)
        if hasattr(self.language_model, "sanitize"):
            named = self.language_model.sanitize(named)
        return {f"language_model.{name}": array for name, array in named.items()}

    @property
    def layers(self) -> list[nn.Module]:
        return self.language_model.layers

    def make_cache(self) -> list[Any]:
        return make_prompt_cache(self.language_model)

    @property
    def cast_predicate(self) -> Any:
        return getattr(self.language_model, "cast_predicate", lambda name: True)

    @property
    def quant_predicate(self) -> Any:
        return getattr(self.language_model, "quant_predicate", None)
