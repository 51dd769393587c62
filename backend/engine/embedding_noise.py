"""NEFTune's noise on the policy's input embeddings while it learns (arXiv:2310.05914): alpha / √(L · H) times a draw
from [−1, 1).

Draws are keyed by seed, rollout and row, so resuming and micro-batches change none. All passes of a rollout share them;
sampling, evaluation and the reference add no noise. Letters: B rows, L tokens, H embedding width.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.dora import DoRAEmbedding
from mlx_lm.tuner.lora import LoRAEmbedding

from backend.engine import patches
from backend.engine.output_layer import PROBE
from backend.utils.errors import UserError

EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding, LoRAEmbedding, DoRAEmbedding)


@dataclass(slots=True)
class EmbeddingNoise:
    """The noise of one run."""

    embedding: Any
    alpha: float
    seed: int
    rollout: int | None = None  # the rollout that is being learned from; None: no noise

    @contextmanager
    def on(self, rows: Sequence[int], lengths: Sequence[int]) -> Iterator[None]:
        """Add noise to embeddings of whole rows, [B, L, H]. `rows`: rollout numbers; `lengths`: unpadded tokens."""
        kind = type(self.embedding)

        class NoisyEmbedding(kind):
            def __call__(layer, tokens: mx.array) -> mx.array:
                y_BLH = kind.__call__(layer, tokens)
                return y_BLH + self._noise(rows, lengths, *y_BLH.shape[1:]).astype(y_BLH.dtype)

        self.embedding.__class__ = NoisyEmbedding
        try:
            yield
        finally:
            self.embedding.__class__ = kind

    def _noise(self, rows: Sequence[int], lengths: Sequence[int], width: int, hidden: int) -> mx.array:
        parts: list[mx.array] = []
        for row, length in zip(rows, lengths, strict=True):
            # As many draws as the row has tokens, without its padding: another shape would give other numbers.
            digest = hashlib.blake2b(f"{self.seed} {self.rollout} {row}".encode(), digest_size=8).digest()
            key = mx.random.key(int.from_bytes(digest, "little"))
            draw_LH = mx.random.uniform(-1, 1, (length, hidden), key=key)
            shown = (self.alpha / (length * hidden) ** 0.5 * draw_LH)[:width]
            parts.append(mx.pad(shown, [(0, width - shown.shape[0]), (0, 0)]))
        return mx.stack(parts)


def input_embedding(model: nn.Module) -> nn.Module:
    """The first embedding that a pass calls. Raises UserError where the model calls none."""
    called: list[nn.Module] = []

    def recording(call: Callable[..., mx.array]) -> Callable[..., mx.array]:
        return lambda layer, tokens: called.append(layer) or call(layer, tokens)

    with patches.replaced((kind, "__call__", recording(kind.__call__)) for kind in EMBEDDINGS):
        model(PROBE)
    if not called:
        raise UserError(
            "neftune_noise_alpha", "This model's code has no embedding layer of mlx, so none can get noise."
        )
    return called[0]
