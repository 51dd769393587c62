"""ModernBERT with a classification head (arXiv:2412.13663), whose attention looks both ways: mlx-lm has no such model.

The names of modules are those of transformers, whose weights load as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs

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
        self.kinds = self.layer_types or [_LOCAL if i % every else _GLOBAL for i in range(self.num_hidden_layers)]
        thetas = {_GLOBAL: self.global_rope_theta, _LOCAL: self.local_rope_theta or self.global_rope_theta}
        self.thetas = thetas | {kind: rope["rope_theta"] for kind, rope in self.rope_parameters.items() if rope}
        if {self.hidden_activation, self.classifier_activation} != {"gelu"}:
            raise ValueError("its activation is not gelu")
        if self.classifier_pooling not in ("cls", "mean"):
            raise ValueError(f"its pooling {self.classifier_pooling} is neither cls nor mean")


class Parts(nn.Module):
    """Modules under these names."""

    def __init__(self, **modules: Any) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


class Model(nn.Module):
    """Tokens [B, T], padded on the right, and their lengths [B] → scores [B]."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args, size, inner = args, args.hidden_size, args.intermediate_size

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(size, args.norm_eps, bias=args.norm_bias)

        def layer(number: int) -> Parts:
            linears = nn.Linear(size, 3 * size, args.attention_bias), nn.Linear(size, size, args.attention_bias)
            gated = nn.Linear(size, 2 * inner, args.mlp_bias), nn.Linear(inner, size, args.mlp_bias)
            return Parts(
                attn_norm=norm() if number else nn.Identity(),  # the embeddings have been normalised
                attn=Parts(Wqkv=linears[0], Wo=linears[1]),
                mlp_norm=norm(),
                mlp=Parts(Wi=gated[0], Wo=gated[1]),
            )

        self.model = Parts(
            embeddings=Parts(tok_embeddings=nn.Embedding(args.vocab_size, size), norm=norm()),
            layers=[layer(number) for number in range(len(args.kinds))],
            final_norm=norm(),
        )
        self.head = Parts(dense=nn.Linear(size, size, args.classifier_bias), norm=norm())
        self.classifier = nn.Linear(size, 1)

    def __call__(self, tokens: mx.array, lengths: mx.array) -> mx.array:
        args = self.args
        model, head = cast("Any", self.model), cast("Any", self.head)
        places = mx.arange(tokens.shape[1])
        is_token = places < lengths[:, None]
        masks = {_GLOBAL: is_token[:, None, None]}  # [B, 1, 1, T]
        masks[_LOCAL] = masks[_GLOBAL] & (mx.abs(places[:, None] - places) <= args.local_attention // 2)
        x = model.embeddings.norm(model.embeddings.tok_embeddings(tokens))
        for layer, kind in zip(model.layers, args.kinds, strict=True):
            x = x + self._attended(layer.attn, layer.attn_norm(x), masks[kind], args.thetas[kind])
            inputs, gate = mx.split(layer.mlp.Wi(layer.mlp_norm(x)), 2, axis=-1)
            x = x + layer.mlp.Wo(nn.gelu(inputs) * gate)
        x = model.final_norm(x)
        pooled = x[:, 0]
        if args.classifier_pooling == "mean":
            pooled = mx.where(is_token[..., None], x, 0).sum(axis=1) / lengths[:, None]
        return self.classifier(head.norm(nn.gelu(head.dense(pooled))).astype(mx.float32))[:, 0]

    def _attended(self, attention: Any, x: mx.array, mask: mx.array, theta: float) -> mx.array:
        rows, columns, size = x.shape
        heads, width = self.args.num_attention_heads, size // self.args.num_attention_heads
        queries, keys, values = attention.Wqkv(x).reshape(rows, columns, 3, heads, width).transpose(2, 0, 3, 1, 4)
        rope = {"traditional": False, "base": theta, "scale": 1.0, "offset": 0}
        queries, keys = mx.fast.rope(queries, width, **rope), mx.fast.rope(keys, width, **rope)
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=width**-0.5, mask=mask)
        return attention.Wo(out.transpose(0, 2, 1, 3).reshape(rows, columns, size))

    @staticmethod
    def end(tokens: Sequence[int], pad: int) -> int:
        """Number of tokens: a text's own token like padding counts, as in transformers' attention mask."""
        return len(tokens)

    @staticmethod
    def quant_predicate(path: str, module: nn.Module) -> bool:
        return path != "classifier"
