"""Random models of Qwen3's shape with a tokenizer, whose probability of ending a completion is chosen.

Every contender loads the same folder through mlx-lm. Contenders must not suppress or force the end token by their own
means, so its probability is in the weights: all (tied) embeddings share one large component, so every hidden state has
it too, and the end token's embedding is a multiple of that component.
"""

import json
import math
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from benchmarks.contender import IMAGE_TOKENS, PICTURES
from benchmarks.workloads import Case

PAD, END = 0, 1
SHARED_LENGTH = 4.0  # length of the component that all embeddings share; their random part has about 0.3
NEVER = 1e-20  # probability of the end token where completions are to have full length


def model_folder(case: Case, within: Path) -> Path:
    """The folder of the case's model, made the first time. Cases of equal shape and end probability share one."""
    ends = f"ends-{1 / case.end_chance:.0f}" if case.natural else "forced"
    path = within / f"{case.hidden}x{case.layers}-{case.vocab}-{ends}{f'-{case.image}' if case.image else ''}"
    if not path.exists():
        make(path, case)
    return path


def make(path: Path, case: Case) -> None:
    """config.json, model.safetensors, tokenizer.json and tokenizer_config.json of a float32 model."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map
    from mlx_lm.models import qwen3

    heads, kv_heads = case.hidden // 64, max(1, case.hidden // 128)
    config = qwen3_config(case.hidden, case.layers, case.vocab, heads, kv_heads)
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    model.update(tree_map(lambda x: mx.random.normal(x.shape) * 0.02 if x.ndim == 2 else x, model.parameters()))
    _calibrate_end(model, case.end_chance if case.natural else NEVER)
    path.mkdir(parents=True)
    weights: Any = dict(tree_flatten(model.parameters()))
    if case.image:
        config, weights = _with_eyes(case, config, weights)
        _write_pictures(path, case.image)
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_tokenizer(path, case.vocab, IMAGE_TOKENS if case.image else ())


def _with_eyes(case: Case, config: dict[str, Any], weights: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A Qwen3-VL: the text model, and a random vision tower of its width and depth."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_vlm.models.qwen3_vl import VisionConfig, VisionModel

    tower = {"model_type": "qwen3_vl", "depth": case.layers, "hidden_size": case.hidden, "num_heads": case.hidden // 64}
    tower |= {"intermediate_size": 4 * case.hidden, "out_hidden_size": case.hidden, "patch_size": 16}
    tower |= {"num_position_embeddings": (case.image // 16) ** 2, "deepstack_visual_indexes": [1]}
    eyes = [
        (name, mx.random.normal(x.shape) * 0.02 if x.ndim > 1 else x)
        for name, x in tree_flatten(VisionModel(VisionConfig.from_dict(tower)).parameters())
    ]
    rope = {"rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True}
    text = config | {"model_type": "qwen3_vl_text", "rope_scaling": rope}
    names = ("vision_start_token_id", "vision_end_token_id", "video_token_id", "image_token_id")
    ids = {name: case.vocab - len(names) + i for i, name in enumerate(names)}
    whole = {"model_type": "qwen3_vl", "text_config": text, "vision_config": tower} | ids
    whole |= {name: config[name] for name in ("tie_word_embeddings", "eos_token_id", "pad_token_id", "torch_dtype")}
    named = {f"language_model.{name}": x for name, x in weights.items()}
    return whole, named | {f"vision_tower.{name}": x for name, x in eyes}


def _write_pictures(path: Path, side: int) -> None:
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for i in range(PICTURES):
        Image.fromarray(draw.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(path / f"{i}.png")
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2}
    processor |= {"size": {"shortest_edge": 1024, "longest_edge": side * side}}
    (path / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")


def qwen3_config(
    hidden: int, layers: int, vocab: int, heads: int, kv_heads: int, head_dim: int = 64, **more: Any
) -> dict[str, Any]:
    """config.json of a model of Qwen3's shape in float32; `more` has other values."""
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "torch_dtype": "float32",
    } | more


def _calibrate_end(model: Any, chance: float) -> None:
    """Set the embeddings so that the end token's mean probability over random texts is `chance` (within noise)."""
    import mlx.core as mx

    table = model.model.embed_tokens
    V, H = table.weight.shape
    direction = mx.random.normal((H,))
    direction = direction / mx.linalg.norm(direction)
    table.weight = table.weight + SHARED_LENGTH * direction
    hidden = model.model(mx.random.randint(2, V, (4, 64))).reshape(-1, H)
    others = mx.logsumexp(table.as_linear(hidden), axis=-1)
    # On average the end's logit must exceed the others' log-sum-exp by the log odds of `chance`.
    length = (math.log(chance / (1 - chance)) + others.mean()) / (hidden @ direction).mean()
    table.weight[END] = length * direction
    mx.eval(table.weight)


def write_tokenizer(path: Path, vocab: int, last: Sequence[str] = ()) -> None:
    """A tokenizer of 256 bytes, two special tokens and invented words, so that every id decodes to text; `last`: more
    special tokens, in place of the last words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = ("".join(letters) for letters in product(ascii_lowercase, repeat=4))
    names = [
        "<|pad|>",
        "<|end|>",
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *islice(words, vocab - 258 - len(last)),
        *last,
    ]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in [*names[:2], *last]])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": names[END], "pad_token": names[PAD]}
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
