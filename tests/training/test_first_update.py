"""Before the weights have moved, the ratio is exactly 1 and the KL exactly 0: old, reference and new come from the same operations.

On Metal, mlx-lm's own code takes other operations in eval mode than in train mode (`backend.engine.patches`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backend.config.config import parse
from backend.engine import model_probe, patches
from backend.models.policy import load_policy
from backend.training.batch import pack
from backend.training.grpo import grpo_learner
from tests.support import random_models
from tests.support.reference_forward import P, sampled_groups
from tests.support.simulated_metal import take_metal_s_paths

pytestmark = pytest.mark.usefixtures("without_compiler")

GATED_DELTA_NET: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "linear_num_value_heads": 2, "linear_num_key_heads": 1,
    "linear_key_head_dim": 32, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3, "full_attention_interval": 2,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "shared_expert_intermediate_size": 32, "moe_intermediate_size": 32,
    "partial_rotary_factor": 0.5,
}  # fmt: skip


def first_update(models: Path, **settings: Any) -> dict[str, float]:
    """Metrics of two updates on the same rollout at learning rate 0, hence with the first update's weights; the old policy's and the
    reference's log-probabilities are computed before, in eval mode. Any ratio but 1 counts as
    clipped, where it lies on the side that its advantage pushes to."""
    folder = models / "qwen3_next"
    if not folder.exists():
        random_models.tiny_model(folder, "qwen3_next", tie=False, own=GATED_DELTA_NET)
    about = {
        "model": str(folder),
        "data": "none",
        "num_layers": -1,
        "rank": 2,
        "batch_size": P,
        "beta": 0.05,
        "skip_zero_signal": False,
    }
    config = parse(about | {"steps_per_generation": 2} | settings)
    config = config.model_copy(update={"learning_rate": 0.0, "epsilon": 0.0, "epsilon_high": 0.0})
    policy = load_policy(config)
    groups = sampled_groups(policy.model, problems=2 * P)
    return grpo_learner(policy, config, 1).learn(pack(groups, pad_id=0))


@pytest.mark.parametrize("recompute", [False, True], ids=["activations kept", "activations recomputed"])
def test_on_metal_the_first_ratio_is_one_and_the_first_kl_zero(
    models: Path, monkeypatch: pytest.MonkeyPatch, recompute: bool
) -> None:
    take_metal_s_paths(monkeypatch)
    metrics = first_update(models, grad_checkpoint=recompute)
    assert metrics["clip_ratio_total"] == 0 and metrics["kl"] == 0


@pytest.mark.usefixtures("patched_as_before")
def test_without_our_rule_they_are_not(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: mlx-lm's own choice on Metal, a kernel in eval mode and a loop in train mode."""
    take_metal_s_paths(monkeypatch)
    patches.uninstall()
    monkeypatch.setattr(model_probe, "install", lambda model: None)
    metrics = first_update(models)
    assert metrics["clip_ratio_total"] > 0.1 and metrics["kl"] > 0
