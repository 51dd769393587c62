"""A model divided among two ranks: loaded, sampled from and trained as on one machine, or refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from backend.config.config import parse
from backend.models.architectures import UNTRAINABLE
from backend.models.loading import check_opens
from backend.models.policy import load_policy
from backend.models.sharded_policy import check_divides, sharding_refusal
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.utils.errors import UserError
from tests.support import random_models, sharded_trial, small_run
from tests.support.architectures.tiny_configs import model_types, tiny_config

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


def refusal(folder: Path, size: int, **settings: Any) -> str:
    model, _, _ = check_opens(folder, str(folder), "model")
    with pytest.raises(UserError) as caught:
        check_divides(model, parse({"model": str(folder), "data": "none"} | settings), size)
    (fault,) = caught.value.faults
    assert fault.setting == "parallelism" and len(fault.sentence) <= 200
    return fault.sentence


def test_heads_that_do_not_divide_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    """mlx-lm divides the count with `//`, and would compute other numbers with other heads."""
    folder = random_models.tiny_model(tmp_path / "model", "qwen3", hidden=64, own=HEADS)
    assert refusal(folder, 4).endswith("among 4 machines: its n_kv_heads of 2 does not divide by 4.")


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
