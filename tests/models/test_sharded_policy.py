"""A model divided among two ranks: loaded, sampled from and trained as on one machine, or refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from backend.models.loading import check_opens
from backend.models.policy import load_policy
from backend.models.sharded_architectures import WITHOUT_GRADIENT, divides, sharding_refusal
from backend.models.sharded_policy import check_divides
from backend.run import preflight
from backend.spec.config import parse
from backend.spec.faults import Mistake
from tests.support import random_models, sharded_trial
from tests.support.architectures.tiny_configs import model_types, tiny_config

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"own": HEADS, "hidden": 64},
    "qwen2": {"own": HEADS, "hidden": 64},
    "qwen3-4bit-step": {"own": HEADS, "hidden": 64, "bits": 4},
    "qwen3_moe-step": {"own": HEADS, "hidden": 64, "bits": 8},
    "deepseek_v3": {"own": {}},
}
"""Name of the architecture, and what `tiny_model` takes. Those that end in "step" also make one."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, list[Any]]]:
    """For each case what one machine computes, and what each of two ranks does."""
    folder = tmp_path_factory.mktemp("sharded")
    settings = {}
    for name, model in CASES.items():
        arch = name.split("-")[0]
        own, others = model["own"] or tiny_config(arch), {key: value for key, value in model.items() if key != "own"}
        random_models.tiny_model(folder / name, arch, own=own, noise=0.05, **others)
        settings[name] = sharded_trial.SETTINGS | {"model": str(folder / name)}
    ranks = sharded_trial.of_ranks(folder, settings)
    mx.disable_compile()  # as in the ranks: g++ would take most of the time
    try:
        alone = {
            name: sharded_trial.trial(load_policy(parse(raw)), raw, steps=name.endswith("step"))
            for name, raw in settings.items()
        }
    finally:
        mx.enable_compile()
    return {name: (alone[name], [rank[name] for rank in ranks]) for name in CASES}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_compute_what_one_does(case: str, found: dict[str, tuple[Any, list[Any]]]) -> None:
    alone, ranks = found[case]
    for rank in ranks:
        assert alone.keys() == rank.keys() - {"peak"}
        for name, expected in alone.items():
            tolerance = 1e-5 * max(1.0, float(np.abs(expected).max()))
            np.testing.assert_allclose(rank[name], expected, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_ranks_have_the_same_bits(case: str, found: dict[str, tuple[Any, list[Any]]]) -> None:
    """Adapters and tokens must never drift apart; a rank that drew another token would wait for ever for a row that the other ended."""
    first, second = found[case][1]
    for name in first.keys() - {"peak"}:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def test_adapters_learn_in_every_layer(found: dict[str, tuple[Any, list[Any]]]) -> None:
    """Equality of gradients that are all zero would prove nothing."""
    for alone, _ in found.values():
        assert all(np.abs(array).max() > 1e-6 for name, array in alone.items() if name.startswith("gradient of"))


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────


def refusal(folder: Path, size: int, **settings: Any) -> str:
    model, _, _ = check_opens(folder, str(folder), "model")
    with pytest.raises(Mistake) as caught:
        check_divides(model, parse({"model": str(folder), "data": "none"} | settings), size)
    (fault,) = caught.value.faults
    assert fault.setting == "parallelism" and len(fault.sentence) <= 200
    return fault.sentence


def test_heads_that_do_not_divide_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    """mlx-lm divides the count with `//`, and would compute other numbers with other heads."""
    folder = random_models.tiny_model(tmp_path / "model", "qwen3", hidden=64, own=HEADS)
    assert refusal(folder, 4).endswith("among 4 machines: its n_kv_heads of 2 does not divide by 4.")


def test_groups_of_a_quantised_row_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    folder = random_models.tiny_model(tmp_path / "model", "llama", hidden=32, bits=4, own={**HEADS, "head_dim": 8})
    assert "its layers do not divide by 2" in refusal(folder, 2)


def test_keys_that_several_machines_share_take_no_adapters(tmp_path: Path) -> None:
    folder = random_models.tiny_model(tmp_path / "model", "qwen3_5", own=tiny_config("qwen3_5"))
    assert refusal(folder, 2, num_layers=-1).endswith("no adapter can follow how self_attn.v_proj is divided.")


def test_every_architecture_divides_or_is_refused_in_a_sentence() -> None:
    found = {arch: sharding_refusal({"model_type": arch}) for arch in model_types()}
    assert WITHOUT_GRADIENT.keys() <= found.keys(), "an architecture that mlx-lm no longer has"
    for arch, sentence in found.items():
        assert bool(sentence) == (not divides(arch) or arch in WITHOUT_GRADIENT), arch
        assert not sentence or (sentence.endswith(".") and len(sentence) <= 200), sentence
    assert {"llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe"} <= {
        arch for arch, sentence in found.items() if not sentence
    }


def test_a_model_is_checked_for_the_ranks_of_its_hosts_file(tmp_path: Path) -> None:
    folder = random_models.tiny_model(tmp_path / "model", "qwen3", hidden=64, own=HEADS)
    (tmp_path / "hosts.json").write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 3))
    raw = {"model": str(folder), "data": "none", "hosts": str(tmp_path / "hosts.json"), "parallelism": "tensor"}
    model, _, model_config = check_opens(folder, str(folder), "model")
    with pytest.raises(Mistake, match="not divide by 3"):
        preflight.check_division(model, model_config, parse(raw))
