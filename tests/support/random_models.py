"""Tiny random models: every file that mlx_lm.load needs, a few hundred kilobytes, no network."""

import importlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, END, START = "<|pad|>", "<|im_end|>", "<|im_start|>"  # ids 0, 1 and 2

# mlx_lm passes enable_thinking=False by itself where the vocabulary has no <think> token, so only True has an effect.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}"
)

CORPUS = [
    "<think> add the digits one by one </think><answer> 42 </answer>",
    "What is 17 plus 25? What is the sum of 3 and 4? user assistant system reasoning",
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 30 40 50 60 70 80 90 100",
]


def tiny_model(
    folder: Path,
    arch: str = "qwen3",
    *,
    vocab: int = 320,
    hidden: int = 32,
    layers: int = 2,
    tie: bool = True,
    dtype: str = "float32",
    bits: int | None = None,
    seed: int = 0,
    own: dict[str, Any] | None = None,
    noise: float = 0.0,
) -> Path:
    """Write a random model of `arch` with its tokenizer into `folder` (made if absent) and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer(folder, vocab=vocab)
    config = _config(arch, vocab, hidden, layers, tie) | (own or {})
    mx.random.seed(seed)
    module = importlib.import_module(f"mlx_lm.models.{arch}")
    model = module.Model(module.ModelArgs.from_dict(config))
    if noise:
        model.update(tree_map(lambda x: _noisy(x, noise), model.parameters()))
    model.set_dtype(getattr(mx, dtype))
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
        config["quantization"] = config["quantization_config"] = {"group_size": 32, "bits": bits, "mode": "affine"}
    config["torch_dtype"] = dtype
    weights: Any = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "pad_token_id": 0}), encoding="utf-8")
    return folder


def _noisy(x: mx.array, deviation: float) -> mx.array:
    is_constant = mx.issubdtype(x.dtype, mx.floating) and x.size > 1 and (x == x.flatten()[0]).all().item()
    return x + deviation * mx.random.normal(x.shape, x.dtype) if is_constant else x


def tiny_tokenizer(folder: Path, *, vocab: int = 320) -> Path:
    """Write tokenizer.json and tokenizer_config.json: byte-level BPE over `CORPUS`, a chat template, eos and pad."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_trained(vocab), encoding="utf-8")
    tokens = {"eos_token": END, "pad_token": PAD, "chat_template": CHAT_TEMPLATE, "model_max_length": 4096}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | tokens
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    return folder


@cache
def _trained(vocab: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(token, special=True) for token in (PAD, END, START)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 2, trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"the corpus gives {tokenizer.get_vocab_size()} tokens, not {vocab}")
    return tokenizer.to_str()


def _config(arch: str, vocab: int, hidden: int, layers: int, tie: bool) -> dict[str, Any]:
    common = {"model_type": arch, "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers}
    common |= {"tie_word_embeddings": tie, "max_position_embeddings": 4096, "eos_token_id": 1, "pad_token_id": 0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": hidden // 2}
    attention = heads | {"intermediate_size": 2 * hidden, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    experts |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    # Mamba's hidden state; `hidden` must leave whole groups for quantising.
    state = {"intermediate_size": 2 * hidden, "state_size": 8, "conv_kernel": 4, "time_step_rank": 32}
    own = {
        "gemma3_text": {"query_pre_attn_scalar": hidden // 2, "sliding_window": 64, "sliding_window_pattern": 2},
        # Mixtral computes its head size itself and ignores head_dim.
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "qwen3_moe": experts,
    }
    if arch == "mamba":
        return common | state | {"use_bias": False, "use_conv_bias": True}
    return common | attention | own.get(arch, {})
