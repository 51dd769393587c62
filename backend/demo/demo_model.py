"""The demo's model: a Qwen3 of 4 layers and hidden size 128 in float32, with random weights. Loading it is mlx-lm's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import qwen3

from backend.demo.char_tokenizer import END, PAD, VOCABULARY

LAYERS, HIDDEN, HEADS = 4, 128, 4

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 416,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "head_dim": HIDDEN // HEADS,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": VOCABULARY.index(END),
    "pad_token_id": VOCABULARY.index(PAD),
}
"""config.json. The vocabulary size is rounded up to 32; ids above the last token are not used."""


def make(seed: int) -> qwen3.Model:
    """A model with random weights that depend on `seed` alone, not on mlx's global random state."""
    model = qwen3.Model(qwen3.ModelArgs.from_dict(CONFIG))
    weights = parameters(model)
    keys = mx.random.split(mx.random.key(seed), len(weights))
    initial = [(name, _initial(name, array, key)) for (name, array), key in zip(weights.items(), keys, strict=True)]
    model.update(tree_unflatten(initial))
    mx.eval(model.parameters())
    return model


def save(model: qwen3.Model, folder: Path) -> None:
    """Write config.json and model.safetensors into `folder`."""
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    mx.save_safetensors(str(folder / "model.safetensors"), parameters(model), metadata={"format": "mlx"})


def parameters(model: qwen3.Model) -> dict[str, mx.array]:
    """Every weight by its dotted name."""
    return dict(tree_flatten(model.parameters()))  # pyright: ignore[reportArgumentType]


def _initial(name: str, array: mx.array, key: mx.array) -> mx.array:
    """Norms start at 1, matrices normal with variance 1 / inputs; projections into the residual stream are scaled down by
    √(2 · layers), as in GPT-2."""
    if array.ndim < 2:
        return mx.ones_like(array)
    scale = array.shape[-1] ** -0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        scale *= (2 * LAYERS) ** -0.5
    return mx.random.normal(array.shape, scale=scale, key=key)
