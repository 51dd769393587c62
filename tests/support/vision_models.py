"""Tiny random vision models and pictures: every file that mlx-lm and mlx-vlm need, no network.

The weights have the names of mlx-vlm's converted models (`vision_tower.…`, `language_model.model.…`).
"""

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from tests.support.random_models import END, PAD, tiny_tokenizer

FAMILIES = ("qwen3_vl", "smolvlm", "gemma3", "lfm2_vl", "qwen3_5")
VOCABULARY, TEXT_VOCABULARY, HIDDEN, LAYERS = 320, 288, 32, 2

# Special tokens from id TEXT_VOCABULARY on; the first stands for one image feature.
_QWEN = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
_QWEN |= {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
_TILES = [f"{row}_col_{column}" for row in (1, 2) for column in (1, 2)]
TOKENS: dict[str, dict[str, str]] = {
    "qwen3_vl": _QWEN,
    "qwen3_5": _QWEN,
    "gemma3": {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    "smolvlm": {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"}
    | {"global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>"}
    | {f"row_{tile}": f"<row_{tile}>" for tile in _TILES},
    "lfm2_vl": {"image_token": "<image>", "image_start_token": "<|image_start|>"}
    | {"image_end_token": "<|image_end|>", "image_thumbnail": "<|img_thumbnail|>"}
    | {f"img_row_{tile}": f"<|img_row_{tile}|>" for tile in _TILES},
}
PLACEHOLDERS = {
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_5": "<|vision_start|><|image_pad|><|vision_end|>",
    "smolvlm": "<image>",
    "gemma3": "<start_of_image>",
    "lfm2_vl": "<image>",
}
TRANSFORMERS = {  # beginnings of mlx-vlm's names → transformers'
    "smolvlm": {"language_model.lm_head": "lm_head", "language_model": "model.text_model"},
    "lfm2_vl": {"language_model.model": "model.language_model", "": "model."},
    "qwen3_vl": {"language_model.model": "model.language_model", "vision_tower": "model.visual"},
}
IMAGE_TOKEN = TEXT_VOCABULARY  # its id, in every family
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_vision_model(
    folder: Path,
    family: str = "qwen3_vl",
    *,
    dtype: str = "float32",
    bits: int | None = None,
    vision_bits: int | None = None,
    seed: int = 0,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
) -> Path:
    """Write a random model of `family` with its tokenizer and processor into `folder` and return the folder.

    `text` and `vision` change text_config and vision_config; `bits` quantises the language model, `vision_bits` all
    else. Norms and biases are noisy, so that a forward pass that skips one is seen."""
    vision_tokenizer(folder, family)
    config = _config(family, text or {}, vision or {})
    package: Any = importlib.import_module(f"mlx_vlm.models.{family}")
    arguments = json.loads(json.dumps(config))
    arguments["text_config"] = package.TextConfig.from_dict(arguments["text_config"])
    arguments["vision_config"] = package.VisionConfig.from_dict(arguments["vision_config"])
    mx.random.seed(seed)
    model = package.Model(package.ModelConfig.from_dict(arguments))
    model.update(tree_map(_noisy, model.parameters()))
    if config["text_config"]["tie_word_embeddings"] and (head := getattr(model.language_model, "lm_head", None)):
        head.weight = model.language_model.model.embed_tokens.weight
        if not bits:  # mlx-vlm makes it when it loads, but not a quantised one
            del model.language_model.lm_head
    model.set_dtype(getattr(mx, dtype))
    if bits:
        nn.quantize(model.language_model, group_size=32, bits=bits)
        if vision_bits:
            fits = lambda _, part: hasattr(part, "to_quantized") and part.weight.shape[-1] % 32 == 0  # noqa: E731
            nn.quantize(model, group_size=32, bits=vision_bits, class_predicate=fits)
        config["quantization"] = config["quantization_config"] = {"group_size": 32, "bits": bits, "mode": "affine"}
    config["torch_dtype"] = dtype
    weights: Any = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "pad_token_id": 0}), encoding="utf-8")
    for name, content in _PROCESSORS[family].items():
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return folder


def rename_as_transformers(folder: Path, family: str) -> Path:
    """Give the arrays of a model in `folder` the names that transformers writes."""
    names, file = TRANSFORMERS[family], folder / "model.safetensors"
    arrays: dict[str, mx.array] = {}
    for name, array in mx.load(str(file)).items():
        old = next((old for old in names if name.startswith(old)), name)
        is_kernel = array.ndim > 3  # channels come second
        arrays[names.get(old, old) + name.removeprefix(old)] = mx.moveaxis(array, -1, 1) if is_kernel else array
    mx.save_safetensors(str(file), arrays, metadata={"format": "pt"})
    return folder


def vision_tokenizer(folder: Path, family: str) -> Path:
    """Write the text tokenizer with the special tokens of `family` and a chat template that takes image parts."""
    tiny_tokenizer(folder, vocab=TEXT_VOCABULARY)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in TOKENS[family].values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = CHAT_TEMPLATE.replace("IMAGE", PLACEHOLDERS[family])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {"eos_token": END, "pad_token": PAD, "chat_template": template, "model_max_length": 4096}
    settings |= {"extra_special_tokens": TOKENS[family]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    return folder


def picture(path: Path, width: int = 64, height: int = 48, seed: int = 0) -> str:
    """Write a PNG of random blocks of 8 × 8 pixels and return its absolute path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    blocks = np.random.default_rng(seed).integers(0, 256, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
    Image.fromarray(blocks.repeat(8, axis=0).repeat(8, axis=1)[:height, :width]).save(path)
    return str(path.absolute())


def chat(text: str, *images: str) -> list[dict[str, Any]]:
    """One user message: the pictures, then the text."""
    parts = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": text}]
    return [{"role": "user", "content": parts if images else text}]


def _noisy(x: mx.array) -> mx.array:
    is_constant = x.size > 1 and bool((x == x.flatten()[0]).all().item())
    return x + 0.1 * mx.random.normal(x.shape) if is_constant else x


def _config(family: str, text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    common = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "eos_token_id": 1}
    common |= {"intermediate_size": 2 * HIDDEN, "num_attention_heads": 2, "num_key_value_heads": 1}
    common |= {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "pad_token_id": 0}
    ids = {name: TEXT_VOCABULARY + i for i, name in enumerate(TOKENS[family])}
    texts = {"tie_word_embeddings": True} | common | _TEXTS[family] | text
    config = {"model_type": family, "text_config": texts, "vision_config": _VISIONS[family] | vision}
    config |= {"eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": texts["tie_word_embeddings"]}
    if family == "gemma3":
        return config | {"image_token_index": ids["image_token"], "mm_tokens_per_image": 4} | {
            "boi_token_index": ids["boi_token"], "eoi_token_index": ids["eoi_token"], "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
        }  # fmt: skip
    config |= {"image_token_id": ids["image_token"]}
    if family == "smolvlm":
        return config | {"scale_factor": 2, "vocab_size": VOCABULARY}
    if family == "lfm2_vl":
        return config | {"downsample_factor": 2, "projector_hidden_size": HIDDEN} | _LFM_TILES
    return config | {"video_token_id": ids["video_token"]} | {
        "vision_start_token_id": ids["vision_start_token"], "vision_end_token_id": ids["vision_end_token"]
    }  # fmt: skip


_MROPE = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_QWEN_VISION = {"model_type": "qwen3_vl", "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
_QWEN_VISION |= {"out_hidden_size": HIDDEN, "patch_size": 8, "spatial_patch_size": 8, "spatial_merge_size": 2}
_QWEN_VISION |= {
    "temporal_patch_size": 2,
    "in_channels": 3,
    "num_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
}
_QWEN_VISION |= {"deepstack_visual_indexes": [0]}
_SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_SIGLIP |= {"num_attention_heads": 2, "num_channels": 3, "patch_size": 8, "image_size": 32, "layer_norm_eps": 1e-6}
_LFM_TILES = {"encoder_patch_size": 8, "tile_size": 32, "min_image_tokens": 4, "max_image_tokens": 16}
_LFM_TILES |= {"max_num_patches": 64, "max_pixels_tolerance": 2.0, "min_tiles": 2, "max_tiles": 4}
_TEXTS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"model_type": "qwen3_vl_text", "head_dim": 16, "rope_theta": 10000.0, "rope_scaling": _MROPE},
    "smolvlm": {"model_type": "llama", "head_dim": 16, "rope_theta": 10000.0, "tie_word_embeddings": False},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16}
    | {"sliding_window_pattern": 2, "mm_tokens_per_image": 4},
    "lfm2_vl": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_dim": HIDDEN}
    | {"conv_dim": HIDDEN, "conv_dim_out": HIDDEN, "conv_L_cache": 3, "block_ff_dim": 2 * HIDDEN, "num_heads": 2}
    | {"block_multiple_of": 8, "block_auto_adjust_ff_dim": False, "block_ffn_dim_multiplier": 1.0}
    | {"norm_eps": 1e-5, "conv_bias": False, "rope_theta": 10000.0, "full_attn_idxs": [1]},
    "qwen3_5": {"model_type": "qwen3_5_text", "head_dim": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    | {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4}
    | {"full_attention_interval": 2, "layer_types": ["linear_attention", "full_attention"]}
    | {"rope_parameters": _MROPE | {"mrope_section": [2, 1, 1], "rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
}
_VISIONS: dict[str, dict[str, Any]] = {
    "qwen3_vl": _QWEN_VISION,
    "qwen3_5": _QWEN_VISION | {"model_type": "qwen3_5", "deepstack_visual_indexes": []},
    "smolvlm": _SIGLIP,
    "gemma3": _SIGLIP,
    "lfm2_vl": _SIGLIP | {"model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False},
}
_PIXELS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_rescale": True, "rescale_factor": 1 / 255}
_PIXELS |= {"do_normalize": True, "do_resize": True, "do_convert_rgb": True}
_QWEN_FILES = {
    "preprocessor_config.json": _PIXELS
    | {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
    | {"size": {"shortest_edge": 256, "longest_edge": 4096}, "processor_class": "Qwen3VLProcessor"}
}
_PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen3_vl": _QWEN_FILES,
    "qwen3_5": _QWEN_FILES,
    "smolvlm": {
        "preprocessor_config.json": _PIXELS
        | {"image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": True, "do_pad": True}
        | {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}, "processor_class": "SmolVLMProcessor"},
        "processor_config.json": {"image_seq_len": 4, "processor_class": "SmolVLMProcessor"},
    },
    "gemma3": {
        "preprocessor_config.json": _PIXELS
        | {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}, "resample": 2}
        | {"image_seq_length": 4, "processor_class": "Gemma3Processor", "do_pan_and_scan": None},
        "processor_config.json": {"image_seq_length": 4, "processor_class": "Gemma3Processor"},
    },
    "lfm2_vl": {
        "preprocessor_config.json": _PIXELS | _LFM_TILES | {"downsample_factor": 2, "do_image_splitting": True}
        | {"image_processor_type": "Lfm2VlImageProcessorFast", "use_thumbnail": True},
        "processor_config.json": {"processor_class": "Lfm2VlProcessor"},
    },
}  # fmt: skip
