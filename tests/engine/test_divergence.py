"""The divergence from a teacher: TRL 1.16's numbers (its `ChunkedDivergenceFunction` and `generalized_jsd_loss` under
PyTorch, in golden/divergence.json), whichever way the head is learned."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import cohere, gemma2, qwen3
from mlx_lm.utils import load_model

from backend.engine.caches import new_prompt_cache
from backend.engine.lm_head import Teacher, TokenScores, token_logps
from backend.engine.model_probe import split
from tests.support import random_models
from tests.support.architectures.tiny_configs import tiny_config
from tests.support.forward_cases import Case, assert_same_gradients, gradients, model_of

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "divergence.json").read_text())
HIDDEN, HEAD, TEACHER_HIDDEN, TEACHER_HEAD = (
    mx.array(GOLDEN[name], mx.float32) for name in ("hidden", "head", "teacher_hidden", "teacher_head")
)
MASK = mx.array(GOLDEN["mask"], mx.float32).reshape(-1)
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def head_of(weight: mx.array, *, frozen: bool) -> nn.Linear:
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    head.weight = weight
    if frozen:
        head.freeze()
    return head


def scored(head: nn.Linear | None, hidden: mx.array, case: dict[str, Any], **options: Any) -> TokenScores:
    teacher_head = options.pop("teacher_head", TEACHER_HEAD)
    teacher = Teacher(lambda x: x @ teacher_head.T, TEACHER_HIDDEN, case["beta"], options.pop("alone", True))
    project = (lambda logits: logits) if head is None else head
    targets = mx.arange(len(hidden)) % HEAD.shape[0]
    options = {"temperature": case["temperature"], "chunk": 3} | options
    return token_logps(project, head, hidden, targets, teacher=teacher, **options)


def mean(scores: TokenScores) -> mx.array:
    assert scores.divergence_N is not None
    return (scores.divergence_N * MASK).sum() / MASK.sum()


@pytest.mark.parametrize("head_is", ["frozen", "trained", "in the model"])
@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"beta {case['beta']}, T {case['temperature']}")
def test_divergence_and_gradients_equal_trls(case: dict[str, Any], head_is: str) -> None:
    head = head_of(HEAD, frozen=head_is == "frozen")

    def loss(hidden: mx.array, weight: mx.array) -> mx.array:
        head.weight = weight
        return mean(scored(None, hidden @ weight.T, case) if head_is == "in the model" else scored(head, hidden, case))

    value, (d_hidden, d_head) = mx.value_and_grad(loss, argnums=[0, 1])(HIDDEN, HEAD)
    np.testing.assert_allclose(value.item(), case["loss"], **CLOSE)
    np.testing.assert_allclose(d_hidden, case["d_hidden"], **CLOSE)
    if head_is != "frozen":
        np.testing.assert_allclose(d_head, case["d_head"], **CLOSE)
    plain = scored(head_of(HEAD, frozen=True), HIDDEN, case, with_gradient=False)
    np.testing.assert_allclose(plain.divergence_N, case["divergence"], **CLOSE)


@pytest.mark.parametrize("frozen", [True, False])
def test_the_other_scores_keep_their_gradient_beside_it(frozen: bool) -> None:
    head, case = head_of(HEAD, frozen=frozen), {"beta": 0.5, "temperature": 0.7}

    def loss(hidden: mx.array, alone: bool) -> mx.array:
        scores = scored(head, hidden, case, alone=alone, entropy_gradient=True)
        return mean(scores) + (scores.logp_N + scores.entropy_N).sum()

    def without(hidden: mx.array) -> mx.array:
        scores = token_logps(head, head, hidden, mx.arange(8), temperature=0.7, entropy_gradient=True)
        return (scores.logp_N + scores.entropy_N).sum()

    of_divergence = mx.grad(lambda hidden: mean(scored(head, hidden, case)))(HIDDEN)
    np.testing.assert_allclose(mx.grad(loss)(HIDDEN, False), mx.grad(without)(HIDDEN) + of_divergence, **CLOSE)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rows", [11, 15])
def test_paddings_of_another_size_are_left_out(beta: float, rows: int) -> None:
    """The rows that embeddings have beyond the tokenizer's vocabulary, as in Qwen2.5 0.5B and 7B."""
    widened = mx.concatenate([TEACHER_HEAD, mx.ones((2, TEACHER_HEAD.shape[1]))])
    common, case = min(rows, HEAD.shape[0]), {"beta": beta, "temperature": 0.7}

    def loss(hidden: mx.array, head: mx.array, teacher: mx.array) -> mx.array:
        scores = scored(head_of(head, frozen=True), hidden, case, teacher_head=teacher)
        in_model = mean(scored(None, hidden @ head.T, case, teacher_head=teacher))
        np.testing.assert_allclose(mx.stop_gradient(in_model), mx.stop_gradient(mean(scores)), **CLOSE)
        return mean(scores) + in_model

    actual = mx.value_and_grad(loss)(HIDDEN, HEAD, widened[:rows])
    expected = mx.value_and_grad(loss)(HIDDEN, HEAD[:common], widened[:common])
    for ours, plain in zip(actual, expected, strict=True):  # value and gradient
        np.testing.assert_allclose(ours, plain, **CLOSE)


UNSPLIT = "The vocabulary is computed for every token, prompts included, instead of for completions alone: "
UNSHARED = "Prompts are read once per completion instead of once per group: "

SIZES = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "rms_norm_eps": 1e-6}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}


def capped(cap: float, **own: Any) -> nn.Module:
    sizes = SIZES | {"model_type": "gemma2", "final_logit_softcapping": cap} | own
    return gemma2.Model(gemma2.ModelArgs.from_dict(sizes))


def scaled() -> nn.Module:
    return cohere.Model(cohere.ModelArgs.from_dict(SIZES | {"model_type": "cohere", "logit_scale": 0.0625}))


@pytest.mark.parametrize(
    "build", [lambda: capped(30.0), lambda: capped(1000.0), scaled], ids=["cap", "mild cap", "scale"]
)
def test_what_a_model_does_with_its_logits_behind_the_head_is_part_of_it(build: Callable[[], nn.Module]) -> None:
    """A soft cap of 1000 changes logits of this size by a millionth; it is still part of the model."""
    mx.random.seed(0)
    model, case = build(), Case()
    model.eval()
    split_model = split(model)
    assert split_model.head is not None and split_model.hidden(case.tokens_BL).shape[-1] == 32
    assert not [sentence for sentence in split_model.slow_paths if sentence.startswith(UNSPLIT)]
    np.testing.assert_allclose(np.array(case.logps(split_model)[0]), np.array(case.plain(model, 1.0)[0]), atol=1e-5)
    _, actual = gradients(model, lambda: case.logps(split_model, 0.7, 5)[0])
    _, plain = gradients(model, lambda: case.plain(model, 0.7)[0])
    assert_same_gradients(actual, plain)


def test_layers_that_find_each_others_keys_in_the_caches_get_caches_in_learning(models: Path) -> None:
    """Without a cache Gemma 3n computes keys that it otherwise shares: another model than is sampled from."""
    folder = random_models.tiny_model(models / "gemma3n", "gemma3n", own=tiny_config("gemma3n"), noise=0.05)
    model, tokens = load_model(folder)[0], mx.array([[5, 6, 70, 8, 33, 100, 5, 6, 250, 11, 12, 13]])
    decoded = mx.concatenate(
        [model(tokens[:, t : t + 1], cache) for cache in [new_prompt_cache(model)] for t in range(12)], 1
    )
    split_model = split(model)
    np.testing.assert_allclose(np.array(split_model.hidden(tokens)), np.array(decoded), atol=1e-4)
    assert not mx.allclose(model(tokens), decoded, atol=0.1)


def test_a_model_wrong_with_a_shared_prompt_reads_whole_rows(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that does not take its positions from the cache's offset raises nothing; only its numbers are wrong."""
    plain = qwen3.Attention.__call__

    def from_the_start(layer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if cache is not None:
            cache.offset = 0
        return plain(layer, x, mask, cache)

    monkeypatch.setattr(qwen3.Attention, "__call__", from_the_start)
    split_model = split(model_of(models))
    assert split_model.prefix_layers == 0
    assert split_model.slow_paths == [UNSHARED + "with a shared prompt the model gives other numbers."]
