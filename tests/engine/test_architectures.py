"""Model families: a tiny random model of each takes GRPO steps, is stopped and resumed, or is refused in a sentence.

CI takes one family per mechanism (REPRESENTATIVE); `make proofs` takes all of them. docs/architectures.md shows the table FAMILIES, and is
compared with all of it in CI.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

from backend.generation import rollout as rollout_module
from backend.generation.rollout import Rollout
from backend.models.policy import load_policy
from backend.run import checkpoint
from backend.spec.config import parse
from backend.spec.events import read_events
from backend.spec.faults import Mistake
from backend.spec.places import RunFolder
from backend.training.batch import pack
from backend.training.grpo import grpo_learner
from tests.support import random_models, small_run
from tests.support.reference_forward import sampled_groups

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
KEYS, WINDOW, STATE, BOTH = "keys and values", "sliding window", "state", "state and keys in one layer"
CACHES = {"KVCache": KEYS, "RotatingKVCache": WINDOW, "ArraysCache": STATE, "CacheList": BOTH}


@dataclass(frozen=True)
class Family:
    """A family's additional config.json keys, and what is expected of it."""

    caches: tuple[str, ...]
    """Kinds of its layers' caches, in the words of docs/architectures.md."""
    own: dict[str, Any] = field(default_factory=dict)
    together: bool = True
    """Whether rows of unequal length are decoded in one batch."""
    dora: bool = True
    layers: int = 2
    tied: bool = True
    whole: bool = False
    """Whether logits are computed for all tokens, because the model cannot be split into body and head."""
    shared: bool = True
    """Whether a prompt is prefilled once for all completions of its group; only families that cache keys and values alone."""


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
MAMBA = {"state_size": 8, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 32, "intermediate_size": 64}  # fmt: skip
PLAIN = (KEYS,)

FAMILIES: dict[str, Family] = {
    "llama": Family(PLAIN, tied=False),
    "qwen2": Family(PLAIN),
    "qwen3": Family(PLAIN),
    "smollm3": Family(PLAIN, {"no_rope_layer_interval": 2}),
    "gemma2": Family(PLAIN, {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
                     together=False, whole=True, shared=False),
    "phi3": Family(PLAIN, {"num_key_value_heads": 2}, tied=False),
    "olmo2": Family(PLAIN, tied=False),
    "starcoder2": Family(PLAIN, {"norm_epsilon": 1e-5}),
    "stablelm": Family(PLAIN, {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5, "use_qkv_bias": True, "qk_layernorm": False,
                               "num_key_value_heads": 2}, tied=False, whole=True),
    "glm4": Family(PLAIN, {"attention_bias": False, "partial_rotary_factor": 0.5}, tied=False),
    "nemotron": Family(PLAIN, {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5}, tied=False),
    "gpt_bigcode": Family(PLAIN, {"n_embd": 32, "n_layer": 2, "n_inner": 64, "n_head": 2, "n_positions": 512, "multi_query": True,
                                  "layer_norm_epsilon": 1e-5}, together=False, whole=True, shared=False),
    "mixtral": Family(PLAIN, dora=False),
    "qwen3_moe": Family(PLAIN, dora=False),
    "olmoe": Family(PLAIN, EXPERTS | {"num_key_value_heads": 2}, dora=False, tied=False),
    "deepseek_v3": Family(PLAIN, {"moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
                                  "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
                                  "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "rope_scaling": None,
                                  "num_key_value_heads": 2}, dora=False, tied=False),
    "dbrx": Family(PLAIN, {"d_model": 32, "n_heads": 2, "n_layers": 2, "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 1e4},
                           "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}}, together=False, tied=False, whole=True),
    "gemma3_text": Family((WINDOW, KEYS), {"sliding_window": 8}, together=False),
    "ministral3": Family((WINDOW, KEYS), TWO_KINDS | {"rope_parameters": {
        "rope_theta": 1e4, "type": "default", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}}, together=False),
    "cohere2": Family((WINDOW, KEYS), {"sliding_window": 8, "sliding_window_pattern": 2, "logit_scale": 0.06, "layer_norm_eps": 1e-5},
                      together=False, whole=True),
    "olmo3": Family((WINDOW, KEYS), TWO_KINDS, together=False, tied=False),
    "gpt_oss": Family((WINDOW, KEYS), TWO_KINDS | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False}}, together=False, dora=False, tied=False),
    "mamba": Family((STATE,), MAMBA, together=False, whole=True),
    "mamba2": Family((STATE,), MAMBA | {"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8, "time_step_limit": [0.0, 100.0],
                                        "layer_norm_epsilon": 1e-5, "expand": 2}, together=False, whole=True),
    "qwen3_next": Family((STATE, KEYS), EXPERTS | {
        "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 3, "full_attention_interval": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "shared_expert_intermediate_size": 32, "moe_intermediate_size": 32, "partial_rotary_factor": 0.5}, together=False, dora=False,
        tied=False),
    "granitemoehybrid": Family((STATE, KEYS), {
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_conv": 4,
        "mamba_n_groups": 1, "mamba_proj_bias": False, "mamba_conv_bias": True, "position_embedding_type": "nope",
        "shared_intermediate_size": 64, "attention_multiplier": 0.25, "num_local_experts": 4, "num_experts_per_tok": 2,
        "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_bias": False}, together=False,
        dora=False),
    "jamba": Family((STATE, KEYS), {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2, "mamba_d_conv": 4,
        "mamba_d_state": 8, "mamba_expand": 2, "mamba_proj_bias": False, "mamba_conv_bias": True, "mamba_dt_rank": 8,
        "num_experts": 4, "num_experts_per_tok": 2}, together=False, dora=False),
    "nemotron_h": Family((STATE, KEYS), {
        "hybrid_override_pattern": ["M", "*", "-"], "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_proj_bias": False,
        "ssm_state_size": 8, "conv_kernel": 4, "n_groups": 1, "time_step_limit": [0.0, 100.0], "mlp_hidden_act": "relu2",
        "use_conv_bias": True, "use_bias": False, "mlp_bias": False, "attention_bias": False, "layer_norm_epsilon": 1e-5, "rms_norm_eps": 1e-5},
        together=False, layers=3, tied=False, whole=True),
    "lfm2": Family((STATE, KEYS), {
        "layer_types": ["conv", "full_attention"], "full_attn_idxs": [1], "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-5,
        "block_dim": 32, "block_ff_dim": 64, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False}, together=False),
    "falcon_h1": Family((BOTH,), {
        "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_n_groups": 1,
        "mamba_expand": 2}, together=False, whole=True),
}  # fmt: skip

REPRESENTATIVE = {
    "llama": "plain attention, an untied head",
    "qwen3_moe": "mixture of experts, a tied head",
    "gemma2": "soft caps on attention and logits",
    "gemma3_text": "sliding window",
    "deepseek_v3": "latent attention (MLA)",
    "mamba": "state space",
    "qwen3_next": "gated delta net beside attention",
    "falcon_h1": "state and attention in one layer",
}


def families(in_ci: Iterable[str] = REPRESENTATIVE) -> list[Any]:
    """All families, of which those outside `in_ci` are run by `make proofs`."""
    return [pytest.param(arch, marks=() if arch in in_ci else pytest.mark.proof) for arch in FAMILIES]


def folder_of(models: Path, arch: str) -> Path:
    folder, family = models / arch, FAMILIES[arch]
    if not folder.exists():
        random_models.tiny_model(folder, arch, layers=family.layers, tie=family.tied, own=family.own)
    return folder


# ---- a run -----------------------------------------------------------------------------------------------------

RUN: dict[str, Any] = {
    "iters": 2, "group_size": 3, "max_completion_length": 12, "top_p": 1.0, "top_k": 0, "num_iterations": 2, "beta": 0.05,
    "learning_rate": 1e-2, "save_every": 2,
}  # fmt: skip


@pytest.mark.parametrize("arch", families())
def test_a_run_with_lora_resumes_to_the_weights_of_an_unbroken_one(models: Path, tmp_path: Path, arch: str) -> None:
    """Log-probabilities recorded while sampling are those of training's forward pass; the run resumed after its first step ends
    with the weights of the unbroken one; and mlx-lm opens the adapters it leaves."""
    folder = folder_of(models, arch)
    raw = small_run.settings_for(models / "rows", model=str(folder), **RUN) | small_run.low_half(tmp_path)
    unbroken, broken = RunFolder(tmp_path / "unbroken"), RunFolder(tmp_path / "broken")
    ending = small_run.train_here(raw, unbroken)
    assert ending.kind == "finished", ending.sentence

    def stop_after_the_first_step(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 1:
            broken.say("stop")

    assert small_run.train_here(raw, broken, stop_after_the_first_step).kind == "stopped"
    assert small_run.train_here(raw, broken).kind == "finished"
    saved = [checkpoint.newest(run) for run in (unbroken, broken)]
    assert saved[0] and saved[1] and saved[0].state.step == saved[1].state.step == 2
    weights, resumed = (checkpoint_.weights() for checkpoint_ in saved if checkpoint_)
    assert all(np.array_equal(np.array(x), np.array(resumed[name])) for name, x in weights.items())
    steps = [event["metrics"] for event in read_events(unbroken.events) if event["kind"] == "step"]
    assert all(step["sampling/sampling_logp_difference/max"] < 1e-4 for step in steps)
    assert all(math.isfinite(step[name]) for step in steps for name in ("loss", "kl", "grad_norm", "entropy"))
    assert steps[0]["grad_norm"] > 0 and steps[1]["kl"] > 0
    tokens = mx.array([[5, 6, 70, 8]])
    tuned, base = load(str(folder), adapter_path=str(unbroken.adapters))[0], load(str(folder))[0]
    assert not mx.allclose(tuned(tokens), base(tokens), atol=1e-5)


@pytest.mark.parametrize("arch", families())
def test_a_family_is_what_the_table_says(models: Path, arch: str) -> None:
    family = FAMILIES[arch]
    policy = load_policy(config_of(models, arch, "lora"))
    before = {name: np.array(x) for name, x in tree_flatten(policy.model.parameters())}
    caches = tuple(dict.fromkeys(CACHES[type(cache).__name__] for cache in make_prompt_cache(policy.model)))
    assert (caches, Rollout(policy, 4).has_continuous_batching) == (family.caches, family.together)
    assert (policy.split_model.head is None) == family.whole
    shared = family.shared and family.caches == PLAIN
    assert policy.split_model.prefix_layers == (family.layers if shared else 0)
    assert len(policy.split_model.slow_paths) == family.whole + (not shared), (
        "each slow path is reported, and nothing else"
    )
    after = dict(tree_flatten(policy.model.parameters()))
    assert all(np.array_equal(np.array(after[name]), x) for name, x in before.items()), "the trial changed the weights"


def test_a_model_that_is_only_wrong_with_rows_of_unequal_length_is_decoded_by_the_group(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that takes one mask or one position for all rows raises nothing when the shapes happen to broadcast."""
    plain = rollout_module.BatchKVCache
    monkeypatch.setattr(rollout_module, "BatchKVCache", lambda pads: plain([0] * len(pads)))
    assert not Rollout(load_policy(config_of(models, "qwen3", "lora")), 4).has_continuous_batching


def config_of(models: Path, arch: str, train_type: str) -> Any:
    raw = {"model": str(folder_of(models, arch)), "data": "none", "num_layers": -1, "rank": 2, "batch_size": 3}
    return parse(raw | {"train_type": train_type, "learning_rate": 1e-3, "num_iterations": 2})


def assert_it_learns(models: Path, arch: str, train_type: str) -> None:
    """Two updates on synthetic completions change every trainable array, and nothing else."""
    config = config_of(models, arch, train_type)
    policy = load_policy(config)
    before = {name: np.array(x) for name, x in tree_flatten(policy.model.parameters())}
    metrics = grpo_learner(policy, config, 1).learn(pack(sampled_groups(policy.model), pad_id=0))
    assert math.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0
    moved = {n for n, x in tree_flatten(policy.model.parameters()) if not np.array_equal(np.array(x), before[n])}
    assert moved and moved <= set(policy.trainable())
    assert len(moved) >= len(policy.trainable()) - 1, "DeepSeek's correction of the router has no gradient by design"


@pytest.mark.parametrize("arch", families())
def test_full_fine_tuning_changes_every_weight(models: Path, arch: str) -> None:
    assert_it_learns(models, arch, "full")


@pytest.mark.parametrize("arch", families(in_ci=("llama", "mamba", "qwen3_moe")))
def test_dora_learns_or_is_refused_in_a_sentence(models: Path, arch: str) -> None:
    if FAMILIES[arch].dora:
        assert_it_learns(models, arch, "dora")
        return
    with pytest.raises(Mistake) as caught:
        load_policy(config_of(models, arch, "dora"))
    (fault,) = caught.value.faults
    sentence = "This model cannot take DORA adapters: SwitchLinear doesn't support DoRA yet."
    assert (fault.setting, fault.sentence) == ("train_type", sentence)


# ---- what cannot be trained ------------------------------------------------------------------------------------


def refused(folder: Path) -> str:
    with pytest.raises(Mistake) as caught:
        load_policy(parse({"model": str(folder), "data": "none", "num_layers": -1}))
    (fault,) = caught.value.faults
    assert fault.setting == "model" and fault.sentence.endswith(".") and "\n" not in fault.sentence
    return fault.sentence


def test_a_family_whose_code_is_broken_is_refused(models: Path) -> None:
    """RecurrentGemma loads with mlx-lm 0.32 and then fails as soon as its weights are read: its `__init__` skips nn.Module's."""
    own = {"attention_window_size": 8, "block_types": ["recurrent", "attention"], "conv1d_width": 4, "logits_soft_cap": 30.0,
           "attention_bias": False}  # fmt: skip
    try:
        folder = random_models.tiny_model(models / "recurrent_gemma", "recurrent_gemma", tie=False, own=own)
    except AttributeError:
        pytest.skip("this mlx-lm cannot even make one")
    assert "loads, but cannot run with this mlx-lm here: 'Model' object has no attribute" in refused(folder)


def test_a_family_that_wants_a_package_is_refused(models: Path) -> None:
    """The first OLMo's code ends the process where a package is missing; a run must not end without a message."""
    pytest.importorskip("mlx_lm.models.olmo2")
    folder = random_models.tiny_model(models / "first-olmo")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"qwen3"', '"olmo"'))
    assert "cannot be loaded: To run olmo install ai2-olmo" in refused(folder)


def test_a_model_without_a_kernel_here_is_refused(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = random_models.tiny_model(models / "kernel")
    from mlx_lm.models import qwen3

    def no_kernel(*args: Any, **more: Any) -> None:
        raise RuntimeError("[metal_kernel] No Metal back-end.")

    monkeypatch.setattr(qwen3.Model, "__call__", no_kernel)
    assert refused(folder).endswith("cannot run with this mlx-lm here: [metal_kernel] No Metal back-end.")


def test_an_operation_without_a_gradient_is_a_sentence(models: Path) -> None:
    """A kernel that runs forward only, as BitNet's; here a decomposition that mlx has no backward pass of."""
    config = config_of(models, "qwen3", "lora")
    policy = load_policy(config)
    groups, inner = sampled_groups(policy.model), policy.split_model.hidden

    def hidden(tokens: mx.array, cache: Any = None) -> mx.array:
        plain = inner(tokens, cache)
        return plain + 0 * mx.linalg.svd(plain, stream=mx.cpu)[1].sum()

    policy.split_model.hidden = hidden
    with pytest.raises(Mistake, match=r"has no gradient on this device.*SVD") as caught:
        grpo_learner(policy, config, 1).learn(pack(groups, pad_id=0))
    assert caught.value.faults[0].setting == "model"


# ---- the page --------------------------------------------------------------------------------------------------


def test_docs_architectures_shows_the_table_of_all_families() -> None:
    rows = [line.strip("| ").split("|") for line in PAGE.read_text().splitlines() if line.count("|") == 7]
    documented = {cells[0].strip(" `"): [cell.strip() for cell in cells[2:]] for cells in rows if "`" in cells[0]}
    assert documented.keys() == FAMILIES.keys()
    for arch, family in FAMILIES.items():
        tuned = "LoRA, DoRA, full" if family.dora else "LoRA, full"
        decoded = "all rows together" if family.together else "a group at a time"
        assert documented[arch][:3] == [", ".join(family.caches), decoded, tuned], arch
        assert family.whole == ("Whole logits." in " ".join(documented[arch][3:])), arch
