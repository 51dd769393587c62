"""The divergence from a teacher: TRL 1.16's numbers (its `ChunkedDivergenceFunction` and `generalized_jsd_loss` under
PyTorch, in golden/divergence.json), whichever way the head is learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from backend.engine.lm_head import Teacher, TokenScores, token_logps

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
