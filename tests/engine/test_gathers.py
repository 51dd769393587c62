"""Gathers as on a GPU: the same values and gradients as mlx's own, without a scatter-add."""

import io
import re
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import switch_layers

from backend.engine import layers, patches
from backend.utils.machine import TREAT_CPU_AS

Take = Callable[[mx.array, mx.array], mx.array]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TREAT_CPU_AS, "gpu")


def primitives(*arrays: mx.array) -> list[str]:
    """The names of the operations that these arrays are computed with."""
    dot = io.StringIO()
    mx.export_to_dot(dot, *arrays)
    return re.findall(r'label ?="([^"]*)"', dot.getvalue())


def value_and_gradient(take: Take, source: mx.array, index: mx.array) -> tuple[mx.array, mx.array]:
    """The rows, and the gradient of a sum that weighs every number of them differently."""
    weight = mx.random.normal(take(source, index).shape, key=mx.random.key(1))
    return take(source, index), mx.grad(lambda x: (take(x, index) * weight).sum())(source)


TAKES = [(layers.take_distinct, [4, 0, 2]), (layers.gather_with_repeats, [4, 0, 4, 4, 2, 0])]


@pytest.mark.parametrize(("take", "index"), [*TAKES, (layers.embed, [[4, 0, 4], [4, 2, 0]])])
@pytest.mark.parametrize("axes", [1, 3])
def test_values_and_gradients_are_those_of_a_plain_gather(take: Take, index: list, axes: int) -> None:
    if take is layers.embed and axes > 1:
        pytest.skip("embeddings have one axis")
    source = mx.random.normal((6, 5, 4, 3)[: 1 + axes], key=mx.random.key(0))
    mx.eval(source)
    index_array = mx.array(index)
    value, gradient = value_and_gradient(take, source, index_array)
    plain_value, plain_gradient = value_and_gradient(lambda x, i: x[i], source, index_array)
    assert "Scatter Sum" in primitives(plain_gradient), "the test would not notice an atomic sum"
    assert not [name for name in primitives(gradient) if name.endswith("Sum") and "catter" in name]
    assert mx.array_equal(value, plain_value)
    np.testing.assert_allclose(np.array(gradient), np.array(plain_gradient), atol=1e-6)


def test_the_gradient_of_many_tokens_is_summed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "BLOCK", 7)
    weight = mx.random.normal((11, 8), key=mx.random.key(0))
    tokens = mx.array(np.random.default_rng(0).integers(0, 9, (4, 10)))
    _, gradient = value_and_gradient(layers.embed, weight, tokens)
    _, plain = value_and_gradient(lambda x, i: x[i], weight, tokens)
    np.testing.assert_allclose(np.array(gradient), np.array(plain), atol=1e-5)
    assert not np.array(gradient)[9:].any(), "tokens that do not occur"


def test_experts_get_the_same_inputs_and_gradients() -> None:
    patches.uninstall()
    mx.random.seed(0)
    x, indices = mx.random.normal((10, 1, 1, 6)), mx.random.randint(0, 5, (10, 3))
    assert all(
        mx.array_equal(a, b)
        for a, b in zip(layers.gather_sort(x, indices), switch_layers._gather_sort(x, indices), strict=True)
    )

    def loss(sort: Callable, unsort: Callable) -> Callable[[mx.array], mx.array]:
        def of(x: mx.array) -> mx.array:
            ordered, experts, inverse = sort(x, indices)
            return (unsort(ordered * (experts[:, None, None] + 1), inverse, indices.shape) ** 3).sum()

        return of

    ours = mx.grad(loss(layers.gather_sort, layers.scatter_unsort))(x)
    plain = mx.grad(loss(switch_layers._gather_sort, switch_layers._scatter_unsort))(x)
    assert "Scatter Sum" in primitives(plain) and "Scatter Sum" not in primitives(ours)
    np.testing.assert_allclose(np.array(ours), np.array(plain), rtol=1e-5)
