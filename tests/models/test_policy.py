"""Loading a policy and its reference: what trains, what is shared, what is refused, what is saved."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load

from backend.config.config import Config, parse
from backend.engine.model_probe import split
from backend.export.writer import adapter_config, save_model
from backend.models import policy as policy_module
from backend.models.architectures import UNTRAINABLE
from backend.models.loading import check_opens
from backend.models.policy import Policy, QuantizedRollouts, load_policy
from backend.models.sharded_policy import check_divides, sharding_refusal
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.utils.text import shown_path
from tests.support import random_models, sharded_trial, small_run
from tests.support.adapters import save_adapters
from tests.support.architectures.tiny_configs import model_types, tiny_config
from tests.support.cases import mistake

TOKENS = mx.array([[5, 6, 70, 8]])


def folder_of(models: Path, arch: str = "qwen3", **how: Any) -> Path:
    folder = models / "-".join([arch, *(f"{key}={value}" for key, value in how.items())])
    return folder if folder.exists() else random_models.tiny_model(folder, arch, **how)


def config_of(model: Path | str, **settings: Any) -> Config:
    return parse({"model": str(model), "data": "none", "num_layers": -1} | settings)


def update(policy: Policy, rate: float = 0.05) -> None:
    """Two real optimizer updates: DoRA and LoRA move A only once B is no longer 0."""
    optimizer = optim.SGD(rate)
    for _ in range(2):
        grads = nn.value_and_grad(policy.model, lambda: mx.logsumexp(policy.model(TOKENS), axis=-1).mean())()[1]
        optimizer.update(policy.model, grads)
        mx.eval(policy.model.parameters())


def refused(setting: str, **settings: Any) -> str:
    """The sentence with which `load_policy` refuses these settings; it names `setting`."""
    found, sentence = mistake(load_policy, config_of(**settings))
    assert found == setting
    return sentence


@pytest.mark.parametrize("arch", ["gemma3_text", "qwen3_moe", "mamba"])
def test_only_adapters_train(models: Path, arch: str) -> None:
    policy = load_policy(config_of(folder_of(models, arch)))
    names = list(policy.trainable())
    assert names and all(name.endswith((".lora_a", ".lora_b")) for name in names)
    before = {name: np.array(x) for name, x in tree_flatten(policy.model.parameters())}
    update(policy)
    moved = {key for key, x in tree_flatten(policy.model.parameters()) if not np.array_equal(np.array(x), before[key])}
    assert moved and moved <= set(names)


@pytest.mark.parametrize(("num_layers", "adapted"), [(-1, {0, 1, 2}), (2, {1, 2}), (16, {0, 1, 2})])
def test_num_layers_counts_from_the_last(models: Path, num_layers: int, adapted: set[int]) -> None:
    notes: list[str] = []
    config = config_of(folder_of(models, layers=3), num_layers=num_layers)
    policy = load_policy(config, notes.append)
    assert {int(name.split("layers.")[1].split(".")[0]) for name in policy.trainable()} == adapted
    assert adapter_config(policy, config)["num_layers"] == len(adapted)
    assert notes == (["Layers is 16, and the model has 3: all of them get adapters."] if num_layers == 16 else [])


@pytest.mark.parametrize(
    ("train_type", "settings"),
    [("lora", {"dtype": "bfloat16"}), ("dora", {}), ("lora", {"hidden": 64, "bits": 4})],
    ids=["lora-bfloat16", "dora-float32", "lora-4 bits"],
)
def test_saved_adapters_load_in_mlx_lm(models: Path, tmp_path: Path, train_type: str, settings: dict[str, Any]) -> None:
    folder = folder_of(models, layers=3, **settings)
    config = config_of(folder, train_type=train_type, num_layers=2, rank=4)
    policy = load_policy(config)
    update(policy)
    save_adapters(policy, config, tmp_path)
    policy.model.eval()
    loaded = load(str(folder), adapter_path=str(tmp_path))[0]
    split(loaded)  # in 16 bits the policy's residual stream is float32
    assert mx.array_equal(loaded(TOKENS), policy.model(TOKENS))
    assert not mx.allclose(loaded(TOKENS), load(str(folder))[0](TOKENS), atol=1e-3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapters.safetensors"]


def test_assign_restores_saved_weights_and_refuses_those_of_another_model(models: Path) -> None:
    policy, other = (load_policy(config_of(folder_of(models))) for _ in range(2))
    update(policy)
    other.assign(policy.trainable())
    assert mx.array_equal(other.model(TOKENS), policy.model(TOKENS))
    smaller = load_policy(config_of(folder_of(models), rank=2))
    fewer = dict(list(policy.trainable().items())[1:])
    for wrong in (smaller.trainable(), fewer):
        with pytest.raises(ValueError, match="do not belong"):
            policy.assign(wrong)


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Collects every reference model that is copied from the policy."""
    models: list[nn.Module] = []
    copy = policy_module.copy_sharing_arrays
    monkeypatch.setattr(policy_module, "copy_sharing_arrays", lambda model: models.append(copy(model)) or models[-1])
    return models


def logits_of(folder: Path) -> mx.array:
    """The logits of the model as it was loaded."""
    split_model = split(load(str(folder))[0])
    return split_model.logits(split_model.hidden(TOKENS))


@pytest.mark.parametrize(("arch", "train_type"), [("qwen3_moe", "lora"), ("mamba", "dora"), ("qwen3", "full")])
def test_the_reference_shares_and_never_moves(models: Path, twins: list[nn.Module], arch: str, train_type: str) -> None:
    folder = folder_of(models, arch)
    policy = load_policy(config_of(folder, train_type=train_type, beta=0.1))
    policy_arrays = {id(x) for _, x in tree_flatten(policy.model.parameters())}
    for step in range(2):
        assert all(id(x) in policy_arrays for _, x in tree_flatten(twins[0].parameters())), "a second copy in memory"
        reference = policy.reference.logits(policy.reference.hidden(TOKENS))
        assert mx.array_equal(reference, logits_of(folder))
        assert mx.allclose(policy.model(TOKENS), reference, atol=1e-3) == (step == 0)
        update(policy)


def test_no_reference_is_built_unless_something_reads_it(models: Path, twins: list[nn.Module]) -> None:
    folder = folder_of(models)
    assert load_policy(config_of(folder, beta=0)).reference is None and not twins
    for settings in ({"beta": 0.1}, {"beta": 0, "log_kl": True}, {"beta": 0, "ratio_against": "reference"}):
        assert load_policy(config_of(folder, **settings)).reference is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_full_model_has_its_original_precision(models: Path, tmp_path: Path, dtype: str) -> None:
    folder, notes = folder_of(models, dtype=dtype), []
    config = config_of(folder, train_type="full", beta=0)
    policy = load_policy(config, notes.append)
    assert {x.dtype for x in policy.trainable().values()} == {mx.float32}
    assert len(notes) == (dtype != "float32")
    update(policy)
    save_model(policy, config, tmp_path)
    loaded, tokenizer, saved = load(str(tmp_path), return_config=True)
    for name, x in tree_flatten(loaded.parameters()):
        assert x.dtype == getattr(mx, dtype)
        assert mx.array_equal(x, policy.trainable()[name].astype(x.dtype)), name
    assert {x.dtype for x in policy.trainable().values()} == {mx.float32}, "saving left the run's weights alone"
    assert saved["eos_token_id"] == 1 and not [key for key in saved if "studio" in key]
    assert tokenizer.encode("17 plus 25") == load(str(folder))[1].encode("17 plus 25")


def test_float32_masters_keep_updates_that_bfloat16_would_swallow(models: Path) -> None:
    policy = load_policy(config_of(folder_of(models, dtype="bfloat16"), train_type="full", beta=0))
    weight = policy.trainable()["model.layers.0.mlp.up_proj.weight"]
    moved = {name: x + 1e-5 for name, x in policy.trainable().items()}
    policy.assign(moved)
    changed = policy.trainable()["model.layers.0.mlp.up_proj.weight"] != weight
    assert changed.astype(mx.float32).mean().item() > 0.99


@pytest.mark.parametrize("name", ["owner/name", "owner/name@v2"])
def test_saving_a_hub_model_needs_no_network(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """mlx-lm fetches a model card where it is given an id: a run that ended offline failed to save."""
    config = config_of(folder_of(models), train_type="full", beta=0)
    policy = load_policy(config)
    cached = tmp_path / "hub" / "models--owner--name"
    shutil.copytree(folder_of(models), cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / (name.partition("@")[2] or "main")).write_text("0" * 40)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.ModelCard.load", lambda name: pytest.fail("it went to the Hub"))
    save_model(policy, config.model_copy(update={"model": name}), tmp_path / "model")
    assert mx.array_equal(load(str(tmp_path / "model"))[0](TOKENS), policy.model(TOKENS))
    gone = config.model_copy(update={"model": str(tmp_path / "gone")})
    setting, sentence = mistake(save_model, policy, gone, tmp_path / "other")
    assert setting == "model" and "is gone" in sentence and not (tmp_path / "other").exists()


@pytest.mark.parametrize(("train_type", "quantization"), [("lora", "mxfp4"), ("dora", "8")])
def test_quantised_bases(models: Path, capsys: pytest.CaptureFixture[str], train_type: str, quantization: str) -> None:
    settings = {"train_type": train_type, "quantization": quantization, "beta": 0.1}
    policy = load_policy(config_of(folder_of(models, hidden=64), **settings))
    assert policy_module.is_quantised(policy.model)
    assert all(x.dtype == mx.float32 for x in policy.trainable().values())
    before, start = policy.model(TOKENS), policy.reference.logits(policy.reference.hidden(TOKENS))
    update(policy)
    assert not mx.allclose(policy.model(TOKENS), before, atol=1e-3)
    assert mx.array_equal(policy.reference.logits(policy.reference.hidden(TOKENS)), start)
    assert capsys.readouterr().out == "", "stdout may carry the event log"


@pytest.mark.parametrize(
    ("arch", "dtype", "train_type", "bits"), [("qwen3", "bfloat16", "dora", "8"), ("qwen3_moe", "float32", "lora", "4")]
)
def test_quantised_rollouts_are_the_quantised_base_with_the_present_adapters(
    models: Path, arch: str, dtype: str, train_type: str, bits: str
) -> None:
    folder = folder_of(models, arch, hidden=64, dtype=dtype)
    config = config_of(folder, train_type=train_type, rollout_quantization=bits)
    learner = load_policy(config)
    rollouts, start = QuantizedRollouts(learner, config), learner.model(TOKENS)
    update(learner)
    rollouts.follow()
    expected = load_policy(config_of(folder, train_type=train_type, quantization=bits))
    expected.assign(learner.trainable())
    assert mx.array_equal(rollouts.model(TOKENS), expected.model(TOKENS))
    assert not policy_module.is_quantised(learner.model)
    exact = load_policy(config_of(folder, train_type=train_type))
    assert mx.array_equal(exact.model(TOKENS), start)


@pytest.mark.usefixtures("as_on_a_cpu")
@pytest.mark.parametrize("how", [{"bits": 8}, {"arch": "qwen3_moe", "bits": 4}], ids=str)
def test_on_a_cpu_float32_expands_quantised_weights_exactly(models: Path, how: dict[str, Any]) -> None:
    folder = folder_of(models, hidden=64, dtype="bfloat16", **how)
    stored: Any = {
        name: x if x.dtype == mx.uint32 else x.astype(mx.float32)
        for name, x in mx.load(str(folder / "model.safetensors")).items()
    }  # type: ignore[union-attr]
    policy = load_policy(config_of(folder, dtype="float32", beta=0.1))
    assert not any("scales" in module for module in policy.model.modules())
    own = {name.replace(".linear.", "."): x for name, x in tree_flatten(policy.reference_model.parameters())}
    for name in (name for name in stored if name.endswith(".scales")):
        weight, scales, biases = (stored[name.replace("scales", part)] for part in ("weight", "scales", "biases"))
        expected = mx.dequantize(weight, scales, biases, group_size=32, bits=how["bits"])
        assert mx.array_equal(own[name.replace("scales", "weight")], expected), name
    assert {x.dtype for x in own.values()} == {mx.float32}


def test_quantising_a_model_that_cannot_be_quantised_is_refused(models: Path) -> None:
    quantised = folder_of(models, hidden=64, bits=4)
    assert "quantised already" in refused("quantization", model=quantised, quantization="4")
    config = config_of(quantised, rollout_quantization="4")
    setting, sentence = mistake(QuantizedRollouts, load_policy(config), config)
    assert setting == "rollout_quantization" and "quantised already" in sentence
    assert "LoRA" in refused("train_type", model=quantised, train_type="full", beta=0)
    # No layer of a 32-wide model has groups of 64: it was once trained unquantised without a message.
    narrow = random_models.tiny_model(models / "narrow", "qwen3_moe")
    sentence = refused("quantization", model=narrow, quantization="8")
    assert "64" in sentence and "None" in sentence


def test_a_missing_model_is_refused_by_name(models: Path, tmp_path: Path) -> None:
    missing = tmp_path / "gone"
    for name in (str(missing), "./gone", "a/b/c", "justaname"):
        sentence = refused("model", model=name)
        assert sentence.startswith(f"There is no model {shown_path(name, 110)}:")
    assert "config.json is missing" in refused("model", model=tmp_path)
    assert "config.json is missing" in refused(
        "reference_model_path", model=folder_of(models), reference_model_path=str(tmp_path)
    )


def test_layers_that_are_read_get_no_adapter(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Gemma 3n's code does (mlx_lm/models/gemma3n.py): a layer with an adapter has no `weight`. adapter_config.json
    names the others, so that mlx-lm attaches the same ones."""
    from mlx_lm.models import qwen3

    monkeypatch.setattr(
        qwen3.MLP, "__call__", lambda mlp, x: mlp.down_proj(mlp.up_proj(x) * (x @ mlp.gate_proj.weight.T))
    )
    folder, notes = folder_of(models), []
    config = config_of(folder)
    policy = load_policy(config, notes.append)
    assert notes == ["The model's code takes no adapters in mlp.gate_proj; the other layers get them."]
    assert not any("gate_proj" in name for name in policy.trainable()) and any(
        "up_proj" in name for name in policy.trainable()
    )
    update(policy)
    save_adapters(policy, config, tmp_path)
    policy.model.eval()
    assert mx.array_equal(load(str(folder), adapter_path=str(tmp_path))[0](TOKENS), policy.model(TOKENS))


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
CASES: dict[str, dict[str, Any]] = {"qwen3-4bit-step": {"own": HEADS, "hidden": 64, "bits": 4}}
"""Name of the architecture, and what `tiny_model` takes beside it. Those that end in "step" also make one."""
MORE: dict[str, dict[str, Any]] = {
    f"{arch}-step": {"own": HEADS, "hidden": 64} for arch in ("llama", "qwen2", "qwen3", "qwen3_moe")
}
MORE |= {
    f"{arch}-{bits}bit": {"own": HEADS, "hidden": 64, "bits": bits} for arch, bits in (("llama", 4), ("qwen3_moe", 8))
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


def run_settings(folder: Path) -> dict[str, Any]:
    """A run of three steps, with evaluations."""
    changes = {"iters": 3, "num_iterations": 2, "group_size": 3, "max_completion_length": 9, "optimizer": "sgd"}
    changes |= {"steps_per_eval": 2, "val_batches": 1, "validation_split": 0.25, "beta": 0.05, "learning_rate": 1e-3}
    return small_run.settings_for(folder, **small_run.low_half(folder)) | changes


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, tuple[Any, list[Any]]]:
    """Case → what one machine computes and what each of two ranks does; `folder` gets a stopped run of the two."""
    random_models.tiny_model(folder / "model", "llama", hidden=64, own=HEADS)
    small_run.write_rows(folder / "rows.jsonl")
    run = run_settings(folder)
    (folder / "run.json").write_text(json.dumps({"settings": run | {"parallelism": "tensor"}, "stop_after": 2}))
    return compared(folder, CASES)


def compared(folder: Path, cases: dict[str, dict[str, Any]]) -> dict[str, tuple[Any, list[Any]]]:
    settings: dict[str, dict[str, Any]] = {}
    for name, model in cases.items():
        arch = name.split("-")[0]
        own = model.get("own") or {"num_key_value_heads": 2} | two_key_heads(tiny_config(arch))
        others = {key: value for key, value in model.items() if key != "own"}
        random_models.tiny_model(folder / name, arch, own=own, noise=0.05, **others)
        settings[name] = sharded_trial.SETTINGS | {"model": str(folder / name)}
    ranks = sharded_trial.of_ranks(folder, settings)
    alone = {
        name: sharded_trial.trial(load_policy(parse(raw)), raw, steps=name.endswith("step"))
        for name, raw in settings.items()
    }
    return {name: (alone[name], [rank[name] for rank in ranks]) for name in cases}


def two_key_heads(config: dict[str, Any]) -> dict[str, Any]:
    """Tiny models have one head of keys and values, which two ranks cannot share."""
    names = ("key_value_heads", "kv_heads", "attention_groups", "index_n_heads")
    return {
        key: two_key_heads(value) if isinstance(value, dict) else 2 if value == 1 and key.endswith(names) else value
        for key, value in config.items()
    }


def assert_same(alone: dict[str, np.ndarray], rank: dict[str, np.ndarray]) -> None:
    assert alone.keys() == rank.keys() - {sharded_trial.DISTURBED}
    for name, expected in alone.items():
        tolerance = 1e-5 * max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(rank[name], expected, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_compute_what_one_does(case: str, found: dict[str, tuple[Any, list[Any]]]) -> None:
    alone, ranks = found[case]
    for rank in ranks:
        assert_same(alone, rank)


@pytest.mark.parametrize("case", CASES)
def test_ranks_have_the_same_bits(case: str, found: dict[str, tuple[Any, list[Any]]]) -> None:
    """Adapters and tokens must never drift apart: a rank would wait for ever for a row that the other ended."""
    first, second = found[case][1]
    assert not case.endswith("step") or len(first[sharded_trial.DISTURBED]) > 12
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def test_a_run_on_two_ranks_goes_on_alone(found: dict[str, tuple[Any, list[Any]]], folder: Path) -> None:
    """Stopped in its third step, where the ranks were sampling: what they had drawn is given up on both."""
    assert found and (folder / "ending").read_text() == "stopped"
    raw, run, alone = run_settings(folder), RunFolder(folder / "run"), RunFolder(folder / "alone")
    started = next(event for event in read_events(run.events) if event["kind"] == "started")
    assert started["ranks"] == 2 and started["parallelism"] == "tensor" and len(started["machines"]) == 2
    assert small_run.train_here(raw, run).kind == small_run.train_here(raw, alone).kind == "finished"
    assert run.completions.read_text() == alone.completions.read_text()
    loaded: Any = [mx.load(str(each.adapters / "adapters.safetensors")) for each in (run, alone)]
    ours, theirs = loaded
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(np.array(ours[name]), np.array(theirs[name]), rtol=0, atol=1e-6, err_msg=name)
    for mine, other in zip(*(metrics_of(each) for each in (run, alone)), strict=True):
        assert mine == pytest.approx(other, abs=1e-5)


def metrics_of(run: RunFolder) -> list[dict[str, float]]:
    """Of each step and evaluation, without what differs from process to process."""
    found = [{name: x for name, x in metrics.items() if x is not None} for _, _, metrics in small_run.numbers(run)]
    assert found
    return found


def test_heads_that_do_not_divide_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    """mlx-lm divides the count with `//`, and would compute other numbers with other heads."""
    folder = random_models.tiny_model(tmp_path / "model", "qwen3", hidden=64, own=HEADS)
    setting, sentence = mistake(check_divides, check_opens(folder, str(folder), "model")[0], config_of(folder), 4)
    assert setting == "parallelism"
    assert sentence.endswith("among 4 machines: its n_kv_heads of 2 does not divide by 4.")


@pytest.mark.parametrize(("arch", "reason"), [("qwen3", ""), ("gpt2", "has no code that"), ("minimax", "norms across")])
def test_an_architecture_divides_or_is_refused(arch: str, reason: str) -> None:
    sentence = sharding_refusal({"model_type": arch})
    assert reason in sentence and bool(reason) == bool(sentence)


@pytest.mark.proof
def test_every_architecture_that_divides_has_the_gradient_of_one_machine(tmp_path: Path) -> None:
    kinds = [arch for arch in model_types() if arch not in UNTRAINABLE and not sharding_refusal({"model_type": arch})]
    assert len(kinds) > 15
    found = compared(tmp_path, MORE | {arch: {} for arch in kinds})
    for arch, (alone, ranks) in found.items():
        print(arch)
        for rank in ranks:
            assert_same(alone, rank)
