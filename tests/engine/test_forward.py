"""Log-probabilities and entropies with shared prompts and chunked logits equal the definition."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from backend.engine.gradient_checkpointing import gradient_checkpointing
from backend.engine.lm_head import token_logps
from backend.engine.model_probe import split
from tests.support import random_models
from tests.support.architectures.tiny_configs import tiny_config
from tests.support.forward_cases import LAYOUTS, Case, assert_same_gradients, gradients, lora_policy, model_of

# Every layout meets a tied and an untied head; chunks of one token, of some, of more than there are, and none.
VALUES = [
    *[(layout, True, 5, 0.6) for layout in LAYOUTS],
    *[(layout, False, None, 1.8) for layout in LAYOUTS],
    ("uneven", True, None, 1.0),
    ("uneven", False, 1, 1.0),
    ("even", True, 1000, 1.0),
]


@pytest.mark.parametrize(("layout", "tie", "chunk", "temperature"), VALUES)
def test_logps_and_entropies(models: Path, layout: str, tie: bool, chunk: int | None, temperature: float) -> None:
    model, case = model_of(models, tie=tie), Case(LAYOUTS[layout])
    scores, expected = case.logps(split(model), temperature, chunk), case.plain(model, temperature)
    for actual, plain in zip(scores, expected, strict=True):
        np.testing.assert_allclose(np.array(actual), np.array(plain), atol=1e-5)
        assert not np.array(actual)[~case.mask_BT].any(), "masked tokens are 0"


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize(("layout", "tie"), [("uneven", True), ("uneven", False), ("one token", False)])
def test_every_weight_gets_its_gradient_the_head_too(models: Path, layout: str, tie: bool, chunk: int | None) -> None:
    """The checkpointed function of a chunk once closed over the head: no gradient reached it, and full fine-tuning of
    any model with a real vocabulary never changed its output layer."""
    model, case = model_of(models, tie=tie), Case(LAYOUTS[layout])
    model.unfreeze()
    split_model = split(model)
    loss, actual = gradients(model, lambda: case.logps(split_model, 0.7, chunk)[0])
    plain_loss, plain = gradients(model, lambda: case.plain(model, 0.7)[0])
    assert loss == pytest.approx(plain_loss, abs=1e-4)
    assert_same_gradients(actual, plain)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_get_the_gradient_of_the_definition(models: Path, layout: str) -> None:
    policy, case = lora_policy(models), Case(LAYOUTS[layout])
    _, actual = gradients(policy.model, lambda: case.logps(policy.split_model, 0.7, 5)[0])
    _, plain = gradients(policy.model, lambda: case.plain(policy.model, 0.7)[0])
    assert_same_gradients(actual, plain)


@pytest.mark.parametrize("trained", ["adapters", "everything"])
@pytest.mark.parametrize("chunk", [None, 5], ids=["at once", "in chunks"])
def test_the_entropy_carries_a_gradient_where_it_is_asked_for(models: Path, chunk: int | None, trained: str) -> None:
    model, case = lora_policy(models).model, Case()
    if trained == "everything":
        model.unfreeze()
    split_model = split(model)
    _, actual = gradients(model, lambda: sum(case.logps(split_model, 0.7, chunk, entropy_gradient=True)))
    _, plain = gradients(model, lambda: sum(case.plain(model, 0.7)))
    assert_same_gradients(actual, plain)


@pytest.mark.parametrize(("arch", "layers"), [("qwen3", 2), ("qwen3_moe", 2), ("gemma3_text", 0), ("mamba", 0)])
def test_a_prompt_is_prefilled_once_where_layers_only_cache_keys(models: Path, arch: str, layers: int) -> None:
    model, case = model_of(models, arch), Case()
    split_model = split(model)
    assert split_model.prefix_layers == layers
    shapes = []
    hidden = split_model.hidden
    split_model.hidden = lambda tokens, cache=None: shapes.append(tokens.shape) or hidden(tokens, cache)
    logps = case.logps(split_model)[0]
    assert shapes == ([(3, 7), (5, 8)] if layers else [(5, 15)])
    np.testing.assert_allclose(np.array(logps), np.array(case.plain(model, 1.0)[0]), atol=1e-5)


def test_a_batch_whose_tokens_are_all_masked_gives_zeros(models: Path) -> None:
    case = Case()
    rows = case.rows
    blank = type(rows)(**{name: getattr(rows, name) for name in rows.__slots__} | {"active_N": mx.array([], mx.int32)})
    case.rows = blank
    for scores in case.logps(split(model_of(models))):
        assert scores.shape == case.completion_BT.shape and not np.array(scores).any()


def test_half_precision_logits_are_normalised_in_float32(tmp_path: Path) -> None:
    """In bfloat16 the softmax alone would be wrong by 0.02 a token."""
    split_model = split(model_of(tmp_path, dtype="bfloat16"))
    hidden_NH = split_model.hidden(mx.array([[3, 1, 4, 1, 5, 9, 2, 6]]))[0]
    target_N = mx.array([1, 4, 1, 5, 9, 2, 6, 5])
    scores = token_logps(split_model.logits, split_model.head, hidden_NH, target_N, temperature=0.7)
    assert hidden_NH.dtype == mx.bfloat16 and scores.logp_N.dtype == scores.entropy_N.dtype == mx.float32
    logits_NV = np.array(split_model.logits(hidden_NH).astype(mx.float32), np.float64) / 0.7
    logp_NV = logits_NV - np.log(np.exp(logits_NV).sum(-1, keepdims=True))
    np.testing.assert_allclose(scores.logp_N, logp_NV[np.arange(8), np.array(target_N)], atol=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logits_whose_exponentials_overflow_float32_are_scored(temperature: float) -> None:
    rng = np.random.default_rng(0)
    logits_NV, target = 200 * rng.normal(size=(6, 50)), np.arange(6)
    logits_NV[target, target] = logits_NV.max(axis=-1) - [0, 1, 2, 3, 300, 600]
    scaled_NV = logits_NV / temperature
    logp_NV = scaled_NV - np.logaddexp.reduce(scaled_NV, axis=-1, keepdims=True)
    entropy_N = -(np.exp(logp_NV) * logp_NV).sum(-1)
    hidden_NV = mx.array(logits_NV, mx.float32)
    for with_gradient in (True, False):
        scores = token_logps(
            lambda x: x, None, hidden_NV, mx.array(target), temperature=temperature, with_gradient=with_gradient
        )
        np.testing.assert_allclose(scores.logp_N, logp_NV[target, target], rtol=1e-5, atol=2e-4)
        np.testing.assert_allclose(scores.entropy_N, entropy_N, atol=2e-4)


@pytest.mark.parametrize("trained", ["adapters", "everything"])
def test_gradient_checkpointing_changes_no_gradient(models: Path, trained: str) -> None:
    case = Case()
    model = lora_policy(models).model if trained == "adapters" else model_of(models)
    if trained == "everything":
        model.unfreeze()
    split_model = split(model)
    results = []
    for on in (False, True):
        with gradient_checkpointing(model, on):
            results.append(gradients(model, lambda: case.logps(split_model, 0.7, 5)[0]))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    assert_same_gradients(results[1][1], results[0][1], rtol=1e-6)


def test_the_second_pass_samples_the_same_dropout_mask(models: Path) -> None:
    """With another mask the gradient would be another function's: compared with its loss's finite difference."""
    policy, case = lora_policy(models, dropout=0.5), Case()
    policy.model.train()

    def loss_and_gradient() -> tuple[float, dict[str, np.ndarray]]:
        mx.random.seed(11)
        with gradient_checkpointing(policy.model, True):
            return gradients(policy.model, lambda: case.logps(policy.split_model)[0])

    def loss_at(distance: float, direction: dict[str, np.ndarray]) -> float:
        start = policy.trainable()
        policy.assign({name: x + distance * mx.array(direction[name]) for name, x in start.items()})
        loss = loss_and_gradient()[0]
        policy.assign(start)
        return loss

    loss, grads = loss_and_gradient()
    assert loss == loss_and_gradient()[0]
    norm = np.sqrt(sum((grad**2).sum() for grad in grads.values()))
    direction = {name: grad / norm for name, grad in grads.items()}
    difference = (loss_at(1e-3, direction) - loss_at(-1e-3, direction)) / 2e-3
    assert difference == pytest.approx(norm, rel=2e-2)


@pytest.mark.parametrize("arch", ["gemma4_text", "gemma3n"])
def test_layers_that_read_an_earlier_layers_keys_send_their_gradient_there(models: Path, arch: str) -> None:
    """Gemma 4 hands them on as an argument, Gemma 3n in a cache; both have an embedding per layer."""
    folder = random_models.tiny_model(models / arch, arch, own=tiny_config(arch), noise=0.05)
    model, case = load_model(folder)[0], Case()
    split_model, results = split(model), []
    for on in (False, True):
        with gradient_checkpointing(model, on):
            results.append(gradients(model, lambda: case.logps(split_model, 0.7, 5)[0])[1])
    assert_same_gradients(results[1], results[0], rtol=1e-4, floor=1e-5)
    assert np.abs(next(grad for name, grad in results[1].items() if "layers.0.self_attn.k_proj" in name)).max() > 1e-3
