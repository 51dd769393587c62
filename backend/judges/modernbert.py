"""ModernBERT with a classification head (arXiv:2412.13663), whose attention looks both ways: mlx-lm has no such model.

The names of modules are those of transformers, whose weights load as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs

ACTIVATIONS = {"gelu": nn.gelu, "gelu_new": nn.gelu_approx, "gelu_pytorch_tanh": nn.gelu_approx, "silu": nn.silu}
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


@dataclass
class ModelArgs(BaseModelArgs):
    """Fields of config.json. Raises ValueError for an activation or pooling without code here."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    classifier_bias: bool = False
    hidden_activation: str = "gelu"
    classifier_activation: str = "gelu"
    classifier_pooling: str = "cls"
    local_attention: int = 128
    global_attn_every_n_layers: int = 3
    layer_types: list[str] | None = None
    global_rope_theta: float = 160_000.0
    local_rope_theta: float | None = 10_000.0
    rope_parameters: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        every = self.global_attn_every_n_layers
        self.layer_types = self.layer_types or [_LOCAL if i % every else _GLOBAL for i in range(self.num_hidden_layers)]
        thetas = {_GLOBAL: self.global_rope_theta, _LOCAL: self.local_rope_theta or self.global_rope_theta}
        self.thetas = thetas | {kind: rope["rope_theta"] for kind, rope in self.rope_parameters.items() if rope}
        if odd := {self.hidden_activation, self.classifier_activation} - ACTIVATIONS.keys():
            raise ValueError(f"its activation {odd.pop()} is not supported")
        if self.classifier_pooling not in ("cls", "mean"):
            raise ValueError(f"its pooling {self.classifier_pooling} is neither cls nor mean")


def _norm(args: ModelArgs) -> nn.LayerNorm:
    return nn.LayerNorm(args.hidden_size, args.norm_eps, bias=args.norm_bias)


class Attention(nn.Module):
    """Attention to all tokens, or to those within half of `local_attention` on each side."""

    def __init__(self, args: ModelArgs, kind: str) -> None:
        super().__init__()
        size = args.hidden_size
        self.heads = args.num_attention_heads
        self.Wqkv = nn.Linear(size, 3 * size, bias=args.attention_bias)
        self.Wo = nn.Linear(size, size, bias=args.attention_bias)
        self.rope = nn.RoPE(size // self.heads, base=args.thetas[kind])

    def __call__(self, x: mx.array, mask: mx.array) -> mx.array:
        rows, columns, size = x.shape
        qkv = self.Wqkv(x).reshape(rows, columns, 3, self.heads, size // self.heads).transpose(2, 0, 3, 1, 4)
        queries, keys = self.rope(qkv[0]), self.rope(qkv[1])
        scale = (size // self.heads) ** -0.5
        out = mx.fast.scaled_dot_product_attention(queries, keys, qkv[2], scale=scale, mask=mask)
        return self.Wo(out.transpose(0, 2, 1, 3).reshape(rows, columns, size))


class MLP(nn.Module):
    """GeGLU."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.Wi = nn.Linear(args.hidden_size, 2 * args.intermediate_size, bias=args.mlp_bias)
        self.Wo = nn.Linear(args.intermediate_size, args.hidden_size, bias=args.mlp_bias)
        self.activation = ACTIVATIONS[args.hidden_activation]

    def __call__(self, x: mx.array) -> mx.array:
        inputs, gate = mx.split(self.Wi(x), 2, axis=-1)
        return self.Wo(self.activation(inputs) * gate)


class Layer(nn.Module):
    """The first one has no norm before its attention: the embeddings have been normalised."""

    def __init__(self, args: ModelArgs, kind: str, *, is_first: bool) -> None:
        super().__init__()
        self.attn_norm = nn.Identity() if is_first else _norm(args)
        self.attn = Attention(args, kind)
        self.mlp_norm = _norm(args)
        self.mlp = MLP(args)

    def __call__(self, x: mx.array, mask: mx.array) -> mx.array:
        x = x + self.attn(self.attn_norm(x), mask)
        return x + self.mlp(self.mlp_norm(x))


class Embeddings(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.hidden_size)
        self.norm = _norm(args)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.norm(self.tok_embeddings(tokens))


class Encoder(nn.Module):
    """Tokens [B, T] of these lengths [B] → hidden states [B, T, H]."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.kinds, self.reach = args.layer_types or [], args.local_attention // 2
        self.embeddings = Embeddings(args)
        self.layers = [Layer(args, kind, is_first=not i) for i, kind in enumerate(self.kinds)]
        self.final_norm = _norm(args)

    def __call__(self, tokens: mx.array, lengths: mx.array) -> mx.array:
        places = mx.arange(tokens.shape[1])
        everywhere = (places < lengths[:, None])[:, None, None]  # [B, 1, 1, T]: no padding
        near = everywhere & (mx.abs(places[:, None] - places) <= self.reach)
        x = self.embeddings(tokens)
        for layer, kind in zip(self.layers, self.kinds, strict=True):
            x = layer(x, everywhere if kind == _GLOBAL else near)
        return self.final_norm(x)


class Head(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.dense = nn.Linear(args.hidden_size, args.hidden_size, bias=args.classifier_bias)
        self.norm = _norm(args)
        self.activation = ACTIVATIONS[args.classifier_activation]

    def __call__(self, x: mx.array) -> mx.array:
        return self.norm(self.activation(self.dense(x)))


class Model(nn.Module):
    """Tokens [B, T], padded on the right, and their lengths [B] → scores [B]."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.pools_mean = args.classifier_pooling == "mean"
        self.model = Encoder(args)
        self.head = Head(args)
        self.classifier = nn.Linear(args.hidden_size, 1)

    def __call__(self, tokens: mx.array, lengths: mx.array) -> mx.array:
        hidden = self.model(tokens, lengths)
        pooled = hidden[:, 0]
        if self.pools_mean:
            is_token = (mx.arange(tokens.shape[1]) < lengths[:, None])[..., None]
            pooled = mx.where(is_token, hidden, 0).sum(axis=1) / lengths[:, None]
        return self.classifier(self.head(pooled).astype(mx.float32))[:, 0]

    @staticmethod
    def end(tokens: Sequence[int], pad: int) -> int:
        """Number of tokens: a text's own token like padding counts, as in transformers' attention mask."""
        return len(tokens)

    @staticmethod
    def quant_predicate(path: str, module: nn.Module) -> bool:
        return path != "classifier"
