"""`lora_keys`: only the named layers get adapters, and an unknown name is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load

from backend.config.config import Config, parse
from backend.models.policy import load_policy
from backend.models.saving import adapter_config
from backend.training.batch import pack
from backend.training.grpo import grpo_learner
from backend.utils.errors import UserError
from tests.support import random_models
from tests.support.adapters import save_adapters
from tests.support.reference_forward import sampled_groups

pytestmark = pytest.mark.usefixtures("without_compiler")


def config_of(models: Path, arch: str = "qwen3", **settings: Any) -> Config:
    folder = models / arch
    if not folder.exists():
        random_models.tiny_model(folder, arch, tie=False)
    return parse({"model": str(folder), "data": "none", "num_layers": -1, "beta": 0} | settings)


def adapted(config: Config) -> set[str]:
    """The modules that learn, by their names within a layer (or within the model, for what is in no layer)."""
    names = {name.rsplit(".", 1)[0] for name in load_policy(config).trainable()}
    return {name.split("layers.")[1].split(".", 1)[1] if "layers." in name else name for name in names}


@pytest.mark.parametrize("train_type", ["lora", "dora"])
@pytest.mark.parametrize("keys", [["self_attn.v_proj", "lm_head"], ["mlp.up_proj", "model.embed_tokens"]], ids=str)
def test_only_the_named_layers_train(models: Path, tmp_path: Path, train_type: str, keys: list[str]) -> None:
    config = config_of(models, lora_keys=keys, train_type=train_type, learning_rate=1e-2)
    assert adapted(config) == set(keys)
    policy = load_policy(config)
    before = {name: np.array(x) for name, x in tree_flatten(policy.model.parameters())}
    learner = grpo_learner(policy, config, 2)
    for seed in (0, 1):
        learner.learn(pack(sampled_groups(policy.model, seed=seed), pad_id=0))
    moved = {
        name for name, x in tree_flatten(policy.model.parameters()) if not np.array_equal(np.array(x), before[name])
    }
    assert moved == set(policy.trainable())
    save_adapters(policy, config, tmp_path)
    policy.model.eval()
    tokens = mx.array([[5, 6, 7]])
    loaded = load(config.model, adapter_path=str(tmp_path))[0](tokens)
    assert mx.array_equal(loaded, policy.model(tokens))
    assert not mx.allclose(loaded, load(config.model)[0](tokens), atol=1e-4)


@pytest.mark.parametrize(
    ("arch", "keys", "meant"),
    [
        ("qwen3", ["q_proj", "v_proj"], {"self_attn.q_proj", "self_attn.v_proj"}),
        ("qwen3", ["embed_tokens", "mlp.up_proj"], {"model.embed_tokens", "mlp.up_proj"}),
        ("qwen3_moe", ["up_proj"], {"mlp.switch_mlp.up_proj"}),
        ("phi3", ["qkv_proj"], {"self_attn.qkv_proj"}),
        ("gemma3_text", ["q_proj", "self_attn.q_proj"], {"self_attn.q_proj"}),
    ],
    ids=lambda value: "-".join(sorted(value)) if isinstance(value, list | set) else value,
)
def test_the_end_of_a_name_means_every_such_layer(models: Path, arch: str, keys: list[str], meant: set[str]) -> None:
    assert adapted(config_of(models, arch, lora_keys=keys)) == meant


def test_all_linear_is_every_layer_but_the_output(models: Path, tmp_path: Path) -> None:
    config = config_of(models, lora_keys=["all-linear"])
    assert adapted(config) == adapted(config_of(models)) and "lm_head" not in adapted(config)
    policy = load_policy(config)
    assert "keys" not in adapter_config(policy, config)["lora_parameters"]  # as mlx-lm adapts them without names
    short = config_of(models, lora_keys=["q_proj", "lm_head"])
    saved = adapter_config(load_policy(short), short)
    assert saved["lora_parameters"]["keys"] == ["self_attn.q_proj", "lm_head"]  # mlx-lm knows whole names alone


@pytest.mark.parametrize(
    ("keys", "named"),
    [(["w_proj"], "w_proj"), (["self_attn.q_proj", "mlp.w1", "nope"], "mlp.w1, nope"), (["self_attn"], "self_attn")],
    ids=str,
)
def test_an_unknown_layer_name_is_refused_with_the_names_there_are(models: Path, keys: list[str], named: str) -> None:
    """An unknown name beside a known one was once ignored without a message."""
    with pytest.raises(UserError) as caught:
        load_policy(config_of(models, lora_keys=keys))
    (fault,) = caught.value.faults
    start, _, listed = fault.sentence.rstrip(".").partition("; there are ")
    assert (fault.setting, start) == ("lora_keys", f"No layer of this model is called {named}")
    layers = ["lm_head", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "model.embed_tokens"]
    # What is meant comes first; the others follow by name.
    assert sorted(listed.split(", ")) == layers + [f"self_attn.{name}_proj" for name in "koqv"]
