"""A causal language model as two functions, body and output layer, so that logits are computed only where they are needed.

Training needs the logits of completion tokens, decoding those of the last token; a model's own `__call__` computes them for
every token of every prompt, [B, L, V]. `backend.engine.model_probe.split` builds a SplitModel and finds out how far the model
allows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import mlx.core as mx
import mlx.nn as nn


@dataclass(slots=True)
class SplitModel:
    """`hidden(tokens_BL, cache)` → [B, L, H], the states after the last norm; `logits(hidden)` → [..., V].

    A model that does more than a linear head after its last norm is kept whole: its hidden states are its logits.
    """

    hidden: Callable[..., mx.array]
    logits: Callable[[mx.array], mx.array]
    head: nn.Module | None = None
    """The module whose weights `logits` uses; None where the model is kept whole."""
    prefix_layers: int = 0
    """The number of layers, where all of them let a prompt be prefilled once for all of its completions; else 0."""
    vocab_size: int = 0
    dtype: mx.Dtype = mx.float32
    """Of the hidden states: what the model computes in, whatever its weights are stored in."""
    slow_paths: list[str] = field(default_factory=list)
    """Sentences for the user: each slow path that this model takes, and the reason. Empty if it takes none."""
    cut: Callable[[nn.Module], SplitModel] = field(kw_only=True)
    """Cuts another tree of the same code in the same place, and runs nothing."""

    def of_tree(self, model: nn.Module) -> SplitModel:
        """The split of another tree of the same code, such as one whose layers compute the same function in fewer products. What trial passes
        have shown of the code is not tried again."""
        other = self.cut(model)
        return replace(self, hidden=other.hidden, logits=other.logits, head=other.head)
