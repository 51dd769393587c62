"""`modules_to_save`: modules that are trained as a whole beside adapters, saved with them and in what is exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import load_adapters

from backend.config.config import Config, parse
from backend.export.export_run import Export, export_run
from backend.models.policy import load_policy
from backend.runs.run_folder import RunFolder
from backend.trainer.memory.model_shape import shape_of
from backend.trainer.memory.phases import MemoryModel
from backend.training.batch import pack
from backend.training.grpo import grpo_learner
from backend.utils.errors import UserError
from tests.support.random_models import tiny_model
from tests.support.random_runs import PROMPT, furthest, write_run
from tests.support.reference_forward import sampled_groups

pytestmark = pytest.mark.usefixtures("without_compiler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", tie=False)


def config_of(folder: Path, **settings: Any) -> Config:
    return parse(
        {"model": str(folder), "data": "none", "num_layers": -1, "modules_to_save": ["lm_head", "norm"]} | settings
    )


def arrays_of(model: Any) -> dict[str, np.ndarray]:
    return {name: np.array(x.astype(mx.float32)) for name, x in tree_flatten(model.parameters())}


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_whole_modules_learn_beside_adapters_and_the_reference_stays(folder: Path, dtype: str) -> None:
    config = config_of(folder, dtype=dtype, learning_rate=1e-4, beta=0.1)
    policy = load_policy(config)
    whole = {"lm_head.weight", "model.norm.weight"}
    assert {name for name in policy.trainable() if "lora_" not in name} == whole
    assert {policy.trainable()[name].dtype for name in whole} == {mx.float32}  # what is small counts in 16 bits too
    before, reference, masters = arrays_of(policy.model), arrays_of(policy.reference_model), policy.trainable()
    learner, sampler = grpo_learner(policy, config, 2), load_policy(config_of(folder)).model
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
    config = config_of(folder, modules_to_save=["mlp", "embed_tokens"])
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
        load_policy(config_of(folder, **settings))
    (fault,) = caught.value.faults
    assert fault.setting == "modules_to_save" and fault.sentence.startswith(says) and len(fault.sentence) <= 200


def test_a_tied_output_layer_is_named_as_the_embedding(tmp_path: Path) -> None:
    tied = tiny_model(tmp_path / "tied", "qwen3", tie=True)
    with pytest.raises(UserError, match="its output layer is its embedding"):
        load_policy(config_of(tied))
    assert "model.embed_tokens.weight" in load_policy(config_of(tied, modules_to_save=["embed_tokens"])).trainable()


def test_the_estimate_counts_whole_matrices(folder: Path) -> None:
    config = config_of(folder, modules_to_save=["lm_head"], num_layers=1)
    shape = shape_of(Path(config.model))
    assert shape is not None
    counted = MemoryModel(config, shape, 8, gpu=False).trainable()
    assert counted == sum(x.nbytes for x in load_policy(config).trainable().values())


def test_whole_modules_are_saved_fused_and_exported(folder: Path, tmp_path: Path) -> None:
    trained = write_run(tmp_path / "run", folder, modules_to_save=["lm_head", "norm"], dropout=0.0)
    run = RunFolder(tmp_path / "run")
    about = json.loads((run.adapters / "adapter_config.json").read_text())
    assert about["modules_to_save"] == ["model.norm", "lm_head"] or set(about["modules_to_save"]) == {
        "model.norm",
        "lm_head",
    }
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
