"""config.json of a tiny model of every type of mlx-lm: sizes by the name of the setting, and what a type adds."""

import ast
import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any

VOCABULARY, HIDDEN, LAYERS, HEADS, HEAD = 320, 32, 2, 2, 16

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "num_vocab", "embedding_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "model_dim", "hidden_dim", "block_dim"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_transformer_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head", "num_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(
        (
            "num_key_value_heads",
            "n_kv_heads",
            "num_kv_heads",
            "swa_num_key_value_heads",
            "num_attention_groups",
            "num_global_key_value_heads",
        ),
        1,
    ),
    **dict.fromkeys(
        (
            "head_dim",
            "v_head_dim",
            "swa_head_dim",
            "swa_v_head_dim",
            "hidden_size_per_head",
            "global_head_dim",
            "kv_channels",
        ),
        HEAD,
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "intermediate_size_mlp",
            "ffn_hidden_size",
            "ff_intermediate_size",
            "mlp_hidden_size",
            "n_inner",
            "block_ff_dim",
            "dense_intermediate_size",
        ),
        2 * HIDDEN,
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "expert_ffn_hidden_size",
            "share_expert_dim",
            "moe_hidden_size",
            "routed_expert_hidden_size",
        ),
        HIDDEN,
    ),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts"), 2
    ),
    **dict.fromkeys(
        (
            "n_shared_experts",
            "num_shared_experts",
            "num_shared_expert",
            "moe_num_shared_experts",
            "n_group",
            "topk_group",
            "first_k_dense_replace",
            "moe_layer_freq",
            "num_dense_layers",
            "decoder_sparse_step",
        ),
        1,
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "block_size", "model_max_length"), 512),
    **dict.fromkeys(
        (
            "rms_norm_eps",
            "layer_norm_eps",
            "layer_norm_epsilon",
            "norm_eps",
            "norm_epsilon",
            "layernorm_epsilon",
            "post_norm_eps",
        ),
        1e-5,
    ),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "swa_rope_theta", "rope_local_base_freq"), 1e4),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias", "mamba_proj_bias", "conv_bias"), False),
    **dict.fromkeys(
        (
            "use_qk_norm",
            "qk_norm",
            "norm_topk_prob",
            "use_conv_bias",
            "mamba_conv_bias",
            "mla_scale_q_lora",
            "mla_scale_kv_lora",
        ),
        True,
    ),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), 0.5),
    **dict.fromkeys(
        ("kv_lora_rank", "q_lora_rank", "o_lora_rank", "index_head_dim", "laurel_rank", "attention_window_size"), 16
    ),
    **dict.fromkeys(
        (
            "qk_rope_head_dim",
            "qk_nope_head_dim",
            "sliding_window",
            "sliding_window_size",
            "window_size",
            "rotary_dim",
            "attention_chunk_size",
            "index_topk",
            "loop_window_size",
            "hidden_size_per_layer_input",
            "state_size",
            "ssm_state_size",
            "mamba_d_state",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "a_low_rank_dim",
            "v_low_rank_dim",
            "gate_low_rank_dim",
            "decay_low_rank_dim",
        ),
        8,
    ),
    **dict.fromkeys(
        (
            "conv_kernel",
            "mamba_d_conv",
            "conv1d_width",
            "conv_L_cache",
            "linear_conv_kernel_dim",
            "short_conv_kernel_size",
            "conv_window",
        ),
        3,
    ),
    **dict.fromkeys(
        (
            "sliding_window_pattern",
            "full_attention_interval",
            "layer_group_size",
            "linear_num_value_heads",
            "linear_num_key_heads",
            "index_n_heads",
            "interleave_moe_layer_step",
            "altup_num_inputs",
            "group_norm_size",
        ),
        2,
    ),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("n_groups", "mamba_n_groups"), 1),
    "mlp_only_layers": [],
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_scaling": None,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}


# Types whose config.json describes several models → where mlx-lm defines the settings of the text model
TEXT_PART = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n.TextConfig",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "kimi_k3": "kimi_k3.TextArgs",
    "kimi_vl": "kimi_vl.TextArgs",
    "lfm2-vl": "lfm2",
    "llama4": "llama4.TextArgs",
    "minimax_m3_vl": "minimax_m3_vl.TextArgs",
    "mistral3": "ministral3",
    "muse_spark": "muse_spark.TextArgs",
    "pixtral": "llama",
    "prism_hadamard_qwen35": "qwen3_5.TextModelArgs",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5.TextModelArgs",
    "qwen3_5_moe": "qwen3_5.TextModelArgs",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}

WINDOW_THEN_FULL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
ROPE_BY_KIND = {
    "rope_parameters": {
        kind: {"rope_theta": 1e4, "rope_type": "default"} for kind in ("sliding_attention", "full_attention")
    }
}
MULTIPLIERS = {
    "logits_scaling": 2.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
}
LLAMA_4_ROPE = {
    "rope_parameters": {
        "rope_theta": 1e4,
        "type": "default",
        "rope_type": "default",
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 16,
    }
}
KDA = {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 3}
HADAMARD_PACK = {"group_size": 128, "bits": 2, "mode": "affine"}

# What a type's ModelArgs, or those of its text model, need beside or instead of SIZES
SPECIAL: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 1},
    "afmoe": {"num_hidden_layers": 2},
    "apertus": {"post_norm": False},
    "baichuan_m1": {"sliding_window_layers": [0], "conv_window": 2, "tie_word_embeddings": False},
    "cohere2": {"logit_scale": 0.25},
    "dbrx": {
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "tie_word_embeddings": False,
    },
    "deepseek": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "topk_method": "greedy",
        "rope_scaling": {
            "type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "deepseek_v3": {"n_shared_experts": 1, "n_routed_experts": 4},
    "deepseek_v32": {"n_shared_experts": 1, "n_routed_experts": 4},
    "deepseek_v41": {
        "o_groups": 2,
        "compress_ratios": [0, 2],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1],
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-6,
    },
    "exaone4": WINDOW_THEN_FULL | {"sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": [False, True]},
    "falcon_h1": {"mamba_d_ssm": 64, "lm_head_multiplier": 1.0},
    "gemma3n": WINDOW_THEN_FULL
    | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "final_logit_softcapping": 30.0,
        "activation_sparsity_pattern": [0.5, 0.0] * 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "global_head_dim": 32,
    },
    "gear": {"layer_types": ["conv_mixer", "sliding_attention", "full_attention"], "num_hidden_layers": 3},
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
    "gpt_oss": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        }
    },
    "granite": MULTIPLIERS,
    "granitemoe": MULTIPLIERS,
    "granitemoehybrid": MULTIPLIERS
    | {
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
        "position_embedding_type": "nope",
        "shared_intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "alpha": 2.0, "factor": 1.0},
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_expand": 2,
        "mamba_dt_rank": 8,
    },
    "kimi_k3": {
        "linear_attn_config": KDA,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "kimi_linear": {
        "linear_attn_config": KDA,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
    },
    "kimi_vl": {"n_shared_experts": 1, "n_routed_experts": 4},
    "laguna": WINDOW_THEN_FULL | {"mlp_layer_types": ["dense", "sparse"]} | ROPE_BY_KIND,
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "full_attn_idxs": [1],
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": 64,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1], "use_expert_bias": True},
    "lille-130m": {"n_embd": 64},
    "llama4": {"num_experts_per_tok": 1, "num_hidden_layers": 4},
    "llama4_text": {"no_rope_layers": [1, 0]},
    "longcat_flash": {"attention_method": "MLA", "zero_expert_type": "identity", "zero_expert_num": 2},
    "longcat_flash_ngram": {
        "zero_expert_num": 2,
        "ngram_vocab_size_ratio": 2,
        "emb_neighbor_num": 3,
        "emb_split_num": 2,
    },
    "mamba": {"time_step_rank": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "time_step_rank": 8, "time_step_limit": [0.0, 100.0]},
    "mellum": ROPE_BY_KIND,
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0],
        "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    },
    "minicpm": {"tie_word_embeddings": False, "dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 2.0},
    "minicpm3": {
        "dim_model_base": 16,
        "scale_depth": 1.4,
        "scale_emb": 2.0,
        "rope_scaling": {"original_max_position_embeddings": 256, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    },
    "minimax_m3_vl": {
        "moe_layer_freq": [0, 1],
        "sparse_attention_freq": [0, 1],
        "index_n_heads": 1,
        "index_head_dim": 8,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral3": WINDOW_THEN_FULL | LLAMA_4_ROPE,
    "mistral4": LLAMA_4_ROPE,
    "muse_spark": LLAMA_4_ROPE
    | {
        "num_shared_experts": 0,
        "layer_rope_theta": [1e4, 1e4],
        "final_logit_softcapping": 20.0,
        "output_multiplier": 0.5,
    },
    "muse_glimmer": WINDOW_THEN_FULL,
    "nanbeige": {"num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {"block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}}] * 2},
    "nemotron_h": {"hybrid_override_pattern": ["M", "*", "-"], "time_step_limit": [0.0, 100.0]},
    "olmo3": WINDOW_THEN_FULL,
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"], "linear_allow_neg_eigval": True},
    "openelm": {"ffn_dim_divisor": 8, "num_query_heads": [2, 2], "num_kv_heads": [1, 1], "ffn_multipliers": [1.0, 2.0]},
    "phi3small": {"vocab_size": 100352, "dense_attention_every_n_layers": 2, "gegelu_limit": 20.0},
    "plamo": {"n_shared_head": 2},
    "plamo3": {"sliding_window": 8},
    "qwen3": {"rope_theta": 1e4},
    "qwen3_5": {"num_experts": 0},
    "qwen3_5_moe": {"num_experts": 4},
    "qwen3_vl_moe": {"tie_word_embeddings": False},
    "recurrent_gemma": {"logits_soft_cap": 30.0, "block_types": ["recurrent", "attention"]},
    "smollm3": {"no_rope_layer_interval": 2},
    "spark2_5": WINDOW_THEN_FULL | ROPE_BY_KIND,
    "step3p5": WINDOW_THEN_FULL | {"moe_layers_enum": "1"},
}


def tiny_config(arch: str) -> dict[str, Any]:
    """The config.json of a tiny model of `arch`."""
    own = SPECIAL.get(arch, {})
    config = {"model_type": arch, "vocab_size": VOCABULARY, "eos_token_id": 1, "pad_token_id": 0}
    if arch in TEXT_PART:
        module, _, name = TEXT_PART[arch].partition(".")
        text = {"model_type": module} | _sizes(module, name or "ModelArgs", SPECIAL.get(module, {}) | own)
        return config | {"text_config": text, "tie_word_embeddings": text.get("tie_word_embeddings", True)}
    return config | _sizes(arch, "ModelArgs", own)


def _sizes(module: str, name: str, own: dict[str, Any]) -> dict[str, Any]:
    settings = getattr(importlib.import_module(f"mlx_lm.models.{module}"), name)
    parameters = {
        name: parameter for name, parameter in inspect.signature(settings).parameters.items() if name != "model_type"
    }
    sizes = {name: SIZES[name] for name, parameter in parameters.items() if _is_given(name, parameter)} | own
    if unknown := [
        name for name, parameter in parameters.items() if parameter.default is parameter.empty and name not in sizes
    ]:
        raise ValueError(
            f"{module}.{name} needs {', '.join(unknown)}: give it a size in tests/support/architectures/tiny_configs.py"
        )
    return sizes


def _is_given(name: str, parameter: inspect.Parameter) -> bool:
    return name in SIZES and (parameter.default is parameter.empty or parameter.default is not None)


def model_types() -> list[str]:
    """The modules of the installed mlx-lm that define a model; the others are parts that several of them use."""
    package = importlib.util.find_spec("mlx_lm")
    assert package is not None and package.submodule_search_locations
    folder = Path(package.submodule_search_locations[0]) / "models"
    return sorted(file.stem for file in folder.glob("*.py") if {"Model", "ModelArgs"} <= _names(file))


def _names(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names
