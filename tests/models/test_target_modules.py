"""`lora_keys`: only the named layers get adapters, and an unknown name is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.tuner.utils import load_adapters

from backend.config.config import Config, parse
from backend.export.export_run import Export, export_run
from backend.models.policy import load_policy
from backend.models.saving import adapter_config
from backend.runs.run_folder import RunFolder
from backend.training.batch import pack
from backend.training.grpo import grpo_learner
from backend.utils.errors import UserError
from tests.support import random_models
from tests.support.adapters import save_adapters
from tests.support.random_models import tiny_model
from tests.support.random_runs import PROMPT, furthest, write_run
from tests.support.reference_forward import sampled_groups


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
    moved = {key for key, x in tree_flatten(policy.model.parameters()) if not np.array_equal(np.array(x), before[key])}
    assert moved == set(policy.trainable())
    save_adapters(policy, config, tmp_path)
    policy.model.eval()
    tokens = mx.array([[5, 6, 7]])
    loaded = load(config.model, adapter_path=str(tmp_path))[0](tokens)
    assert mx.array_equal(loaded, policy.model(tokens))
    assert not mx.allclose(loaded, load(config.model)[0](tokens), atol=1e-4)


MEANT = [
    ("qwen3", ["q_proj", "v_proj"], ["self_attn.q_proj", "self_attn.v_proj"]),
    ("qwen3", ["embed_tokens", "mlp.up_proj"], ["model.embed_tokens", "mlp.up_proj"]),
    ("qwen3_moe", ["up_proj"], ["mlp.switch_mlp.up_proj"]),
    ("gemma3_text", ["q_proj", "self_attn.q_proj"], ["self_attn.q_proj"]),
]


@pytest.mark.parametrize(("arch", "keys", "meant"), MEANT, ids=str)
def test_the_end_of_a_name_means_every_such_layer(models: Path, arch: str, keys: list[str], meant: list[str]) -> None:
    assert adapted(config_of(models, arch, lora_keys=keys)) == set(meant)


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", tie=False)


def whole_config(folder: Path, **settings: Any) -> Config:
    return parse(
        {"model": str(folder), "data": "none", "num_layers": -1, "modules_to_save": ["lm_head", "norm"]} | settings
    )


def arrays_of(model: Any) -> dict[str, np.ndarray]:
    return {name: np.array(x.astype(mx.float32)) for name, x in tree_flatten(model.parameters())}


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_whole_modules_learn_beside_adapters_and_the_reference_stays(folder: Path, dtype: str) -> None:
    config = whole_config(folder, dtype=dtype, learning_rate=1e-4, beta=0.1)
    policy = load_policy(config)
    whole = {"lm_head.weight", "model.norm.weight"}
    assert {name for name in policy.trainable() if "lora_" not in name} == whole
    assert {policy.trainable()[name].dtype for name in whole} == {mx.float32}  # what is small counts in 16 bits too
    before, reference, masters = arrays_of(policy.model), arrays_of(policy.reference_model), policy.trainable()
    learner, sampler = grpo_learner(policy, config, 2), load_policy(whole_config(folder)).model
    for seed in (0, 1):
        learner.learn(pack(sampled_groups(sampler, seed=seed), pad_id=0))
    after = arrays_of(policy.model)
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert all(name in whole or "lora_" in name for name in moved)
    assert not any(mx.array_equal(masters[name], policy.trainable()[name]) for name in whole)
    assert all(np.array_equal(x, reference[name]) for name, x in arrays_of(policy.reference_model).items())
    again = load_policy(config)
    again.assign(policy.trainable())
    assert mx.array_equal(again.model(PROMPT), policy.model(PROMPT))  # pyright: ignore


def test_layers_in_whole_modules_get_no_adapters(folder: Path) -> None:
    config = whole_config(folder, modules_to_save=["mlp", "embed_tokens"])
    names = set(load_policy(config).trainable())
    assert not any("mlp" in name and "lora_" in name for name in names)
    assert {"model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"} <= names
    assert any("self_attn.q_proj.lora_a" in name for name in names)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"modules_to_save": ["head"]}, "No module of this model is called head; there are "),
        ({"modules_to_save": ["lm_head"], "lora_keys": ["lm_head"]}, "lm_head would get an adapter and be trained"),
        ({"modules_to_save": ["down_proj"], "quantization": "4"}, "model.layers."),
    ],
    ids=["unknown", "both", "quantised"],
)
def test_what_cannot_be_trained_as_a_whole_is_refused(folder: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        load_policy(whole_config(folder, **settings))
    (fault,) = caught.value.faults
    assert fault.setting == "modules_to_save" and fault.sentence.startswith(says) and len(fault.sentence) <= 200


def test_a_tied_output_layer_is_named_as_the_embedding(tmp_path: Path) -> None:
    tied = tiny_model(tmp_path / "tied", "qwen3", tie=True)
    with pytest.raises(UserError, match="its output layer is its embedding"):
        load_policy(whole_config(tied))
    assert "model.embed_tokens.weight" in load_policy(whole_config(tied, modules_to_save=["embed_tokens"])).trainable()


def test_whole_modules_are_saved_fused_and_exported(folder: Path, tmp_path: Path) -> None:
    trained = write_run(tmp_path / "run", folder, modules_to_save=["lm_head", "norm"], dropout=0.0)
    run = RunFolder(tmp_path / "run")
    about = json.loads((run.adapters / "adapter_config.json").read_text())
    assert set(about["modules_to_save"]) == {"model.norm", "lm_head"}
    for format_ in ("full", "original", "peft", "adapter"):
        path = export_run(run, Export("folder", format_, tmp_path, format_)).path
        if format_ in ("full", "original"):
            assert furthest(mlx_lm.load(str(path))[0](PROMPT)[0], trained) < 1e-4, format_  # pyright: ignore
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["lm_head", "model.norm"]
    saved: Any = mx.load(str(tmp_path / "peft" / "adapter_model.safetensors"))
    assert "base_model.model.lm_head.weight" in saved
    with pytest.raises(ValueError, match="not an adapter parameter"):  # mlx-lm refuses by name what it has no place for
        load_adapters(mlx_lm.load(str(folder))[0], str(run.adapters))
