"""mlx-vlm's own processor and full forward pass, the reference for what we compute with pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np


class MlxVlm:
    """A model folder as mlx-vlm loads it."""

    def __init__(self, folder: Path) -> None:
        from mlx_vlm.utils import load_model, load_processor  # 2 s

        self.model: Any = load_model(folder)
        self.processor: Any = load_processor(folder, True, eos_token_ids=1)
        if hasattr(self.model.config, "pad_token_id"):
            self.model.config.pad_token_id = -1  # else gemma3 embeds a sampled padding token as 0

    def prompt(self, messages: list[dict[str, Any]]) -> tuple[list[int], dict[str, mx.array]]:
        """Ids with the image tokens expanded, and the model's other inputs, of one chat."""
        images = [part["image"] for message in messages for part in message["content"] if "image" in part]
        text = self.processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        from mlx_vlm.utils import prepare_inputs

        inputs = dict(prepare_inputs(self.processor, images=images, prompts=text))
        ids = inputs.pop("input_ids")[0].tolist()
        del inputs["attention_mask"]
        return ids, inputs

    def logps(self, messages: list[dict[str, Any]], completion: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """log π of the completion's tokens in one pass over prompt and completion. Without padding: mlx-vlm's Qwen3-VL
        lets tokens see padding on the left, and its own log-probabilities move by 1 nat."""
        return np.take_along_axis(self.all_logps(messages, completion, temperature), np.array(completion)[:, None], 1)[
            :, 0
        ]

    def all_logps(
        self, messages: list[dict[str, Any]], completion: Sequence[int], temperature: float = 1.0
    ) -> np.ndarray:
        """log π [T, V] of every token in place of the completion's."""
        ids, inputs = self.prompt(messages)
        tokens: Any = mx.array([ids + list(completion)])
        found = self.model.get_input_embeddings(tokens, mask=mx.ones_like(tokens), **inputs).to_dict()
        # In gemma3's own mask every token sees every other; without it mlx-vlm's pass is causal, as in decoding.
        found.pop("attention_mask_4d", None)
        logits = self.model.language_model(tokens, **found).logits[0].astype(mx.float32) / temperature
        logits = logits[len(ids) - 1 : -1]
        return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
