"""The frozen vision tower, through mlx-vlm: pictures → what `backend.engine.images` gives the text model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from backend.engine.images import PromptImages
from backend.types import Problem
from backend.utils.errors import UserError
from backend.utils.text import quote, reason_of

if TYPE_CHECKING:
    from backend.vision.tokenizer import VisionTokenizer

TEXT_MODEL = "language_model"  # mlx-vlm's name of the part that is never evaluated here


class VisionTower:
    """`dtype`: of the text model's states; towers in float16 overflow (Qwen3-VL), so others compute in bfloat16."""

    def __init__(self, tokenizer: VisionTokenizer, dtype: mx.Dtype) -> None:
        from mlx_vlm.models.rope_utils import MRoPERotaryEmbedding
        from mlx_vlm.utils import load_model

        self._tokenizer = tokenizer
        # Lazy: the weights of its text model, which has no part in this, are never read.
        self._model: Any = load_model(tokenizer.folder, lazy=True)
        config = self._model.config
        names = (f"{kind}_token_{word}" for kind in ("image", "video", "audio") for word in ("index", "id"))
        tokens = [token for name in names if (token := getattr(config, name, None)) is not None]
        self._image_token, self._placeholders = tokens[0], tuple(dict.fromkeys(tokens))
        parts = self._model.modules()
        self._rotary = next((part for part in parts if isinstance(part, MRoPERotaryEmbedding)), None)
        text_model = self._model[TEXT_MODEL]
        for module in text_model.modules():
            for name, child in module.children().items():
                if isinstance(child, (nn.Embedding, nn.QuantizedEmbedding)):
                    module[name] = _NoEmbedding(config.text_config.hidden_size)
        own = {name: part for name, part in self._model.parameters().items() if name != TEXT_MODEL}
        wide = mx.float32 if dtype == mx.float32 else mx.bfloat16
        own = tree_map(lambda x: x.astype(wide) if mx.issubdtype(x.dtype, mx.floating) else x, own)
        self._model.update(own)
        self._model.eval()
        mx.eval(own)

    def read(self, problem: Problem) -> PromptImages:
        """The pictures of a prompt: one pass of the tower. Raises UserError."""
        ids = mx.array([problem.tokens])
        pixels = self._tokenizer.pixels(problem.images)
        try:
            found = self._model.get_input_embeddings(ids, mask=mx.ones_like(ids), **pixels)
        except ValueError as error:
            why = f"The model cannot read the pictures of row {problem.index + 1}: {reason_of(error)}."
            raise UserError("data", why) from error
        column_n = np.flatnonzero(np.array(problem.tokens) == self._image_token)
        if column_n.size and column_n[-1] == len(problem.tokens) - 1:
            raise UserError("data", f"The prompt of row {problem.index + 1} ends with a picture: text must follow it.")
        if found.per_layer_inputs is not None or found.cross_attention_states is not None:
            kind = quote(self._model.config.model_type, 30)
            raise UserError("model", f"Pictures for a model of the kind {kind} are not supported.")
        feature_nH = found.inputs_embeds[0][mx.array(column_n)]
        deepstack = found.deepstack_visual_embeds
        deepstack = () if deepstack is None else tuple(deepstack[i] for i in range(len(deepstack)))
        mx.eval(feature_nH, deepstack)
        images = PromptImages(column_n, feature_nH, deepstack, placeholders=self._placeholders)
        if self._rotary is None:
            return images
        position_3K, shift = np.array(found.position_ids)[:, 0], int(found.rope_deltas.item())
        return replace(images, position_3K=position_3K, rotary=partial(self._rotary, mx.zeros(1)), shift=shift)


class _NoEmbedding(nn.Module):
    """In place of the text model's table: only the embeddings of image tokens are read."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def __call__(self, tokens: mx.array) -> mx.array:
        return mx.zeros((*tokens.shape, self._size))
