"""A policy with random weights in the shape of a Qwen3, made on the device: no download, no file of weights, no float copy of them.

Weights have the size that keeps activations at about 1 from layer to layer; logits have a standard deviation of 3, about that
of a trained model. Adapters are not zero, so that folding or rounding them shows in the gap between sampler and learner.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import qwen3

from backend.bench.schema import Precision, Qwen3Shape
from backend.engine.shared_weights import copy_sharing_arrays
from backend.models.adapters import attach_adapters
from backend.models.policy import Policy
from backend.spec.config import Config

BITS, GROUP = 4, 64
LOGIT_STD = 3.0
LORA_B_STD = 1e-3
"""With rank 8 and scale 20 adapters then add about 3 % to a layer's output."""


def model_config(shape: Qwen3Shape, precision: Precision) -> dict[str, Any]:
    """The config.json of such a model."""
    config = {
        "model_type": "qwen3", "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "intermediate_size": shape.intermediate, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "vocab_size": shape.vocab,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": True,
        "torch_dtype": "float32" if "float32" in precision else "bfloat16",
    }  # fmt: skip
    packed = {"quantization": {"bits": BITS, "group_size": GROUP, "mode": "affine"}} if "4-bit" in precision else {}
    return config | packed


def write_config(folder: Path, shape: Qwen3Shape, precision: Precision) -> None:
    """A model folder with no weights: all that the memory estimate reads."""
    (folder / "config.json").write_text(json.dumps(model_config(shape, precision)), encoding="utf-8")


def random_policy(config: Config, shape: Qwen3Shape, precision: Precision) -> Policy:
    """A policy with adapters as `config` has them, and a reference that shares its base."""
    about = model_config(shape, precision)
    model = random_model(about)
    reference = copy_sharing_arrays(model)
    reference.freeze()
    reference.eval()
    attach_adapters(model, config)
    trainable: dict[str, Any] = dict(tree_flatten(model.trainable_parameters()))
    noise = [(name, LORA_B_STD * mx.random.normal(b.shape)) for name, b in trainable.items() if name.endswith("lora_b")]
    model.load_weights(noise, strict=False)
    mx.eval(model.parameters())
    return Policy(model, SilentTokenizer(), about, reference)


def same_model(policy: Policy) -> Policy:
    """Another policy over the same modules: the engine looks again at what it can do with them."""
    return Policy(policy.model, policy.tokenizer, policy.model_config, policy.reference_model)


def random_model(about: dict[str, Any]) -> nn.Module:
    """The model of a config.json, with random weights in its type, or packed to 4 bits with scales of that type."""
    model: Any = qwen3.Model(qwen3.ModelArgs.from_dict(about))
    model.set_dtype(getattr(mx, about["torch_dtype"]))
    if "quantization" in about:
        nn.quantize(model, GROUP, BITS)
    # Nothing is computed so far: what the layers' constructors drew is dropped unevaluated, only its shapes are used.
    mx.random.seed(0)
    model.update(tree_map_with_path(lambda name, array: _random_like(name, array, about), model.parameters()))
    # Largest first and one at a time, so that what drawing an array takes is never on top of all the others.
    arrays: list[mx.array] = [array for _, array in tree_flatten(model.parameters())]  # pyright: ignore
    for array in sorted(arrays, key=lambda array: -array.nbytes):
        mx.eval(array)
    return model


def _random_like(name: str, array: mx.array, about: dict[str, Any]) -> mx.array:
    """A new array of this shape and type. Norms are 1; a quantised weight's numbers 0 … 15 become symmetric around 0."""
    if array.ndim == 1:
        return mx.ones(array.shape, array.dtype)
    if array.dtype == mx.uint32:
        # Halves of 16 bits: random integers come from floats, which have 24.
        halves = mx.random.randint(0, 1 << 16, (*array.shape[:-1], 2 * array.shape[-1]), mx.uint16)
        return halves.view(mx.uint32)
    is_packed = name.endswith(("scales", "biases"))
    inputs = array.shape[1] * (GROUP if is_packed else 1)
    std = LOGIT_STD / math.sqrt(inputs) if "embed_tokens" in name else 1 / math.sqrt(inputs)
    step = std / math.sqrt((2 ** (2 * BITS) - 1) / 12)  # the standard deviation of the whole numbers 0 … 15 is 4.6
    if name.endswith("scales"):
        return mx.full(array.shape, step, array.dtype)
    if name.endswith("biases"):
        return mx.full(array.shape, -step * (2**BITS - 1) / 2, array.dtype)
    return mx.random.uniform(-math.sqrt(3) * std, math.sqrt(3) * std, array.shape, array.dtype)


class SilentTokenizer:
    """What a policy needs of a tokenizer, for tokens that mean nothing."""

    eos_token_ids = (1,)
    pad_token_id = 0

    def decode(self, tokens: list[int], **_: Any) -> str:
        return ""
