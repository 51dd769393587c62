"""Ours stand in for mlx-lm's functions where they are meant to, hand on everything else, and change no number either way."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.models import activations, base

from backend.engine import forward, patches
from backend.engine.cpu import swiglu
from backend.engine.forward import SequenceRows, completion_logps, sequence_rows, split
from backend.engine.prefix_cache import PrefixMask, PrefixReader, PrefixRecorder
from backend.engine.slot_cache import SlotCache
from backend.generation.rollout import Rollout
from backend.generation.sampler import GREEDY
from backend.models.policy import load_policy
from backend.spec.config import parse
from backend.training.batch import pack
from backend.types import Group, Problem
from tests.support import random_models, reference_forward

ARCHES = ["qwen3", "llama", "qwen3_moe", "mixtral", "gemma3_text"]
FILES = {
    "scaled_dot_product_attention": ARCHES,
    "swiglu": ["qwen3", "llama", "qwen3_moe", "switch_layers"],
}
"""Where a model's code looks a function up."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def folder_of(models: Path, arch: str) -> Path:
    return models / arch if (models / arch).exists() else random_models.tiny_model(models / arch, arch)


def model_of(models: Path, arch: str = "qwen3") -> nn.Module:
    return load(str(folder_of(models, arch)))[0]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each of ours was called; on every processor they are worth it, however little there is to do."""
    counted: Counter[str] = Counter()

    def spied(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: counted.update([name]) or real(*given)

    monkeypatch.setattr(patches, "attend", spied("attend", patches.attend))
    monkeypatch.setattr(patches, "look_back", spied("look_back", patches.look_back))
    monkeypatch.setattr(swiglu, "swiglu", spied("swiglu", swiglu.swiglu))
    monkeypatch.setattr(patches, "spelled_out", lambda: True)
    monkeypatch.setattr(patches, "WORTH_A_GATE", 1)
    return counted


def take_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm's own in every model, until the test ends."""
    monkeypatch.setattr(forward, "install", lambda model: None)
    theirs = {name: function for name, function, _ in patches.STAND_INS}
    for name, files in FILES.items():
        for file in files:
            monkeypatch.setattr(importlib.import_module(f"mlx_lm.models.{file}"), name, theirs[name])


def batch_of(model: nn.Module) -> SequenceRows:
    """Completions of unequal lengths after prompts of unequal lengths."""
    batch = pack(reference_forward.given(model), pad_id=0)
    return sequence_rows(batch.tokens_BL, batch.prompt_length_B, batch.group_B, batch.completion_BT, batch.mask_BT)


def learned(model: nn.Module) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Log-probabilities, and the gradient of a loss in which each has its own weight."""
    split_model, rows = split(model), batch_of(model)
    weight_BT = mx.array(np.random.default_rng(1).normal(size=rows.completion_BT.shape), mx.float32)

    def loss() -> tuple[mx.array, mx.array]:
        logp_BT = completion_logps(split_model, rows, 0.8)[0]
        return (weight_BT * logp_BT).sum(), logp_BT

    (_, logp_BT), grads = nn.value_and_grad(model, loss)()
    return np.array(logp_BT), {name: np.array(grad) for name, grad in tree_flatten(grads)}


# ---- where they stand ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHES)
def test_the_files_of_a_model_find_ours_and_mlx_lm_s_own_files_theirs(
    models: Path, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_out(monkeypatch)
    own, experts = (importlib.import_module(f"mlx_lm.models.{file}") for file in (arch, "switch_layers"))
    assert own.scaled_dot_product_attention is patches.THEIR_ATTENTION
    assert experts.swiglu is getattr(own, "swiglu", experts.swiglu) is patches.THEIR_SWIGLU
    patches.install(model_of(models, arch))
    for name, _, ours in patches.STAND_INS:
        assert (getattr(own, name, None) is ours) == (arch in FILES[name])
    assert base.scaled_dot_product_attention is patches.THEIR_ATTENTION
    assert activations.swiglu is patches.THEIR_SWIGLU
    assert (experts.swiglu is patches.swiglu) == (arch in ("qwen3_moe", "mixtral"))


def test_a_part_from_mlx_lm_s_own_file_leaves_that_file_alone() -> None:
    """Else whoever asked it for theirs later would be given ours."""
    part = activations.SwigluOAI()
    patches.install(part)
    assert activations.swiglu is patches.THEIR_SWIGLU


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("qwen3", {"attend": 4, "swiglu": 4}),  # two layers: prompts, then completions
        ("llama", {"attend": 4, "swiglu": 4}),
        ("qwen3_moe", {"attend": 4, "swiglu": 4}),
        ("mixtral", {"attend": 4, "swiglu": 4}),
        ("gemma3_text", {"attend": 2}),  # rows are read whole
    ],
)
def test_learning_calls_ours(models: Path, calls: Counter[str], arch: str, expected: dict[str, int]) -> None:
    model = model_of(models, arch)
    split_model, rows = split(model), batch_of(model)
    calls.clear()
    mx.eval(completion_logps(split_model, rows, 1.0))
    assert calls == expected


def test_a_window_that_is_reached_is_left_to_mlx_lm(models: Path, calls: Counter[str]) -> None:
    """Of gemma's two layers one looks 64 tokens back: it is given an array as its mask."""
    model = model_of(models, "gemma3_text")
    split_model = split(model)
    for tokens, expected in ((64, 2), (65, 1)):
        calls.clear()
        mx.eval(split_model.hidden(mx.full((2, tokens), 7)))
        assert calls["attend"] == expected


# ---- no other number -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHES)
def test_a_model_without_ours_learns_the_same(
    models: Path, calls: Counter[str], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logps, grads = learned(model_of(models, arch))
    assert calls["attend"] and (calls["swiglu"] or arch == "gemma3_text")
    take_out(monkeypatch)
    calls.clear()
    plain_logps, plain = learned(model_of(models, arch))
    assert not calls
    np.testing.assert_allclose(logps, plain_logps, atol=1e-5)
    assert grads.keys() == plain.keys()
    for name, grad in plain.items():
        np.testing.assert_allclose(grads[name], grad, atol=1e-5 * np.abs(grad).max() + 1e-6, rtol=0, err_msg=name)


def sampled(rollout: Rollout, problems: int, each: int) -> list[Group]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(60, 320, 1 + 3 * n % 40).tolist() for n in range(problems)]
    return rollout.sample([Problem(i, "", [], tokens, "") for i, tokens in enumerate(prompts)], each, GREEDY, 0, 0)


@pytest.mark.parametrize("arch", ["qwen3", "llama", "qwen3_moe"])
def test_many_rows_are_decoded_by_looking_back_to_the_same_tokens(
    models: Path, calls: Counter[str], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 rows of two heads and 64 columns are 16,384 scores, as many as are worth it."""
    raw = {"model": str(folder_of(models, arch)), "data": "none", "num_layers": -1, "beta": 0}
    policy = load_policy(parse(raw))
    rollout = Rollout(policy, 12)
    assert rollout.has_continuous_batching
    calls.clear()
    fast = sampled(rollout, 32, 4)
    assert calls["look_back"] > 0 and not calls["attend"], "sampling does not learn"
    calls.clear()
    sampled(rollout, 3, 2)
    assert not calls["look_back"] and not calls["attend"], "few rows are mlx-lm's own"
    monkeypatch.setattr(patches, "WORTH_A_LOOK", math.inf)
    calls.clear()
    plain = sampled(Rollout(policy, 12), 32, 4)
    assert not calls["look_back"]
    for a, b in zip(fast, plain, strict=True):
        for one, other in zip(a.completions, b.completions, strict=True):
            assert one.tokens == other.tokens
            np.testing.assert_allclose(one.logps, other.logps, atol=1e-4)


# ---- what is handed on -----------------------------------------------------------------------------------------

HEADS, KEY_HEADS, SIZE = 4, 2, 8


def arrays(rows: int, queries: int, columns: int) -> list[mx.array]:
    rng = np.random.default_rng(rows + queries)
    shapes = [(rows, HEADS, queries, SIZE), *[(rows, KEY_HEADS, columns, SIZE)] * 2]
    return [mx.array(rng.normal(size=shape), mx.float32) for shape in shapes]


def assert_handed_on(
    calls: Counter[str], ours: bool, q: mx.array, keys: mx.array, values: mx.array, cache: Any, mask: Any, **how: Any
) -> None:
    """Whoever answers, the numbers are mlx's for just these arrays and this mask."""
    calls.clear()
    out = patches.scaled_dot_product_attention(q, keys, values, cache=cache, scale=0.3, mask=mask, **how)
    assert bool(calls) == ours
    plain = mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.3, mask=mask, **how)
    np.testing.assert_allclose(np.array(out), np.array(plain), atol=1e-5)


def test_prompts_being_read_are_ours_only_as_they_were_given_out(calls: Counter[str]) -> None:
    q, keys, values = arrays(2, 5, 5)
    cache = PrefixRecorder()
    given = cache.update_and_fetch(keys, values)
    assert_handed_on(calls, True, q, *given, cache, cache.make_mask(5))
    assert_handed_on(calls, False, q, *given, cache, cache.make_mask(5, return_array=True))
    near = mx.abs(mx.arange(5)[:, None] - mx.arange(5)) < 2
    assert_handed_on(calls, False, q, *given, cache, near)
    assert_handed_on(calls, False, q, given[0] * 2, given[1], cache, "causal")
    assert_handed_on(calls, False, q, given[0], given[1] * 2, cache, "causal")
    assert_handed_on(calls, False, q, *given, cache, "causal", sinks=mx.array([0.5, -1.0, 2.0, 0.0]))
    with pytest.raises(ValueError, match="sliding window"):
        cache.make_mask(5, window_size=3)


@pytest.mark.parametrize("ragged", [True, False], ids=["ragged", "alike"])
@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
def test_completions_are_ours_only_as_they_were_given_out(calls: Counter[str], even: bool, ragged: bool) -> None:
    prompt_of = [0, 0, 1, 1] if even else [0, 1, 1, 1]
    length_B: Any = mx.array([[5, 3][p] for p in prompt_of]) if ragged else 5
    _, before_keys, before_values = arrays(2, 1, 5)
    for tokens in (1, 6):
        q, keys, values = arrays(4, tokens, tokens)
        cache = PrefixReader(before_keys, before_values, PrefixMask(mx.array(prompt_of), 2 if even else 0, length_B))
        given = cache.update_and_fetch(keys, values)
        assert given[0].shape == (4, KEY_HEADS, 5 + tokens, SIZE)
        mask = cache.make_mask(tokens)
        assert_handed_on(calls, True, q, *given, cache, mask)
        as_array = cache.make_mask(tokens, return_array=True)
        assert_handed_on(calls, True, q, *given, cache, as_array)
        assert_handed_on(calls, False, q, *given, cache, mx.array(np.array(as_array)))
        assert_handed_on(calls, False, q, *given, cache, as_array & (mx.arange(5 + tokens) > 0))
        assert_handed_on(calls, False, q, given[0] * 2, given[1], cache, mask)
        assert_handed_on(calls, False, q, given[0], given[1] * 2, cache, mask)
        assert_handed_on(calls, False, q, *given, cache, mask, sinks=mx.array([0.5, -1.0, 2.0, 0.0]))


def test_rows_read_whole_are_ours_where_they_look_at_all_that_came_before(calls: Counter[str]) -> None:
    q, keys, values = arrays(2, 5, 5)
    assert_handed_on(calls, True, q, keys, values, None, "causal")
    assert_handed_on(calls, False, q, keys, values, None, mx.tril(mx.ones((5, 5), mx.bool_)))
    assert_handed_on(calls, False, q, keys, values, None, None)
    assert_handed_on(calls, False, q, keys, values, None, "causal", sinks=mx.zeros(HEADS))
    assert_handed_on(calls, False, q[:, :, :1], keys[:, :, :1], values[:, :, :1], None, None)


def test_a_decoding_step_is_ours_where_there_is_enough_to_do(calls: Counter[str]) -> None:
    def step(rows: int, columns: int = 64) -> tuple[list[mx.array], SlotCache]:
        q, keys, values = arrays(rows, 1, columns)
        mask = mx.broadcast_to((mx.arange(columns) < 40)[None, None, None], (rows, 1, 1, columns))
        return [q, keys, values], SlotCache(keys, values, mx.array([39]), mask, mx.full((rows,), 39))

    enough = patches.WORTH_A_LOOK // (HEADS * 64)
    some, cache = step(enough)
    assert_handed_on(calls, True, *some, cache, cache.mask)
    assert_handed_on(calls, False, *some, cache, mx.array(np.array(cache.mask)))
    assert_handed_on(calls, False, *some, cache, cache.mask, sinks=mx.zeros(HEADS))
    fewer, cache = step(enough - 1)
    assert_handed_on(calls, False, *fewer, cache, cache.mask)


def test_elsewhere_mlx_has_vectors_of_its_own(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "spelled_out", lambda: False)
    gate, up = mx.random.normal((2, 64, 64)), mx.random.normal((2, 64, 64))
    patches.swiglu(gate, up)
    assert not calls


def test_a_small_gated_unit_is_mlx_lms(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(patches, "spelled_out", lambda: True)
    monkeypatch.setattr(swiglu, "swiglu", lambda gate, up: calls.update(["swiglu"]) or up)
    worth = patches.WORTH_A_GATE
    for size, up, ours in ((worth - 1, worth - 1, False), (worth, worth, True), (worth, 1, False)):
        calls.clear()
        x = [mx.array(np.random.default_rng(0).normal(size=n), mx.float32) for n in (size, up)]
        found = patches.swiglu(*x)
        assert bool(calls) == ours
        if not ours:
            assert mx.array_equal(found, patches.THEIR_SWIGLU(*x))
