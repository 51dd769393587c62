"""Stand-ins for x86: sliced matrix products and swiglu equal the plain ones."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.activations import swiglu as mlx_lm_swiglu

from backend.engine import cpu
from backend.engine.cpu import MAX_ROWS, matmul_transposed, slice_width, swiglu
from backend.engine.graph import compiled_by_shape, compiled_in_gradients
from backend.engine.layers import PLAIN_ROPE, rope

pytestmark = pytest.mark.usefixtures("compiled")

SIZES = {"in slices": (48, 1024), "of three factors": (40, 3 * 320), "undivided": (48, 1021), "small": (48, 32)}


@pytest.fixture(autouse=True)
def sliced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Slice as on x86 on every processor, and record the slice widths."""
    widths: list[int] = []

    def recorded(rows: int, inner: int, outer: int) -> int:
        widths.append(slice_width(rows, inner, outer))
        return widths[-1]

    monkeypatch.setattr(cpu, "on_x86", lambda: True)
    monkeypatch.setattr(cpu, "slice_width", recorded)
    return widths


def factors(before: tuple[int, ...], size: str) -> tuple[mx.array, mx.array]:
    inner, outer = SIZES[size]
    rng = np.random.default_rng(0)
    shapes = ((*before, inner), (outer, inner))
    x, weight = (mx.array(rng.normal(size=shape), mx.float32) for shape in shapes)
    return x, weight


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 2))
def test_the_product_is_the_plain_one(sliced: list[int], rows: int, size: str) -> None:
    for before in ((rows,), (rows, 1), (1, rows)):
        x, weight = factors(before, size)
        product = matmul_transposed(x, weight)
        assert product.shape == (*before, weight.shape[0])
        np.testing.assert_allclose(np.array(product), np.array(x @ weight.T), atol=1e-4)
        stored = cpu.sliced(weight)
        assert stored.ndim == (2 if weight.shape[0] % cpu.STORED_WIDTH else 3)
        np.testing.assert_allclose(np.array(matmul_transposed(x, stored)), np.array(product), atol=1e-4)
    is_sliced = size in ("in slices", "of three factors") and rows <= MAX_ROWS
    assert sliced and all(bool(width) == is_sliced for width in sliced)


@pytest.mark.parametrize("before", [(3,), (2, 2)], ids=str)
def test_gradients_are_the_plain_ones(sliced: list[int], before: tuple[int, ...]) -> None:
    x, weight = factors(before, "in slices")
    cotangent = mx.array(np.random.default_rng(1).normal(size=(*before, weight.shape[0])), mx.float32)
    actual = mx.vjp(matmul_transposed, [x, weight], [cotangent])[1]
    plain = mx.vjp(lambda x, weight: x @ weight.T, [x, weight], [cotangent])[1]
    for grad, plain_grad in zip(actual, plain, strict=True):
        np.testing.assert_allclose(np.array(grad), np.array(plain_grad), atol=1e-4)
    assert sliced[0] > 0


def gate_and_up(dtype: mx.Dtype = mx.float32, shape: tuple[int, ...] = (3, 7, 64)) -> list[mx.array]:
    rng = np.random.default_rng(0)
    return [mx.array(4 * rng.normal(size=shape), mx.float32).astype(dtype) for _ in range(2)]


def value_and_gradients(function: Callable[..., mx.array], gate: mx.array, up: mx.array) -> list[mx.array]:
    """The value, and the gradients in gate and up of a loss that weighs every element differently."""
    weight = mx.array(np.random.default_rng(1).normal(size=up.shape), mx.float32).astype(up.dtype)
    out, grads = mx.vjp(function, [gate, up], [weight])
    return [*out, *grads]


@pytest.mark.parametrize("shape", [(1,), (5, 64), (3, 7, 64), (2, 3, 1, 16)], ids=str)
def test_value_and_gradients_are_mlx_lms(shape: tuple[int, ...]) -> None:
    arrays = gate_and_up(shape=shape)
    for ours, plain in zip(
        value_and_gradients(swiglu, *arrays), value_and_gradients(mlx_lm_swiglu, *arrays), strict=True
    ):
        assert ours.dtype == mx.float32
        np.testing.assert_allclose(np.array(ours), np.array(plain), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_x86", [True, False], ids=["in vectors", "of mlx's exp"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_sixteen_bits_stay_within_their_own_rounding(
    dtype: mx.Dtype, is_x86: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "on_x86", lambda: is_x86)
    arrays = gate_and_up(dtype, (3 + is_x86, 7, 64))  # a shape has one trace
    exact = value_and_gradients(mlx_lm_swiglu, *(x.astype(mx.float32) for x in arrays))
    for ours, plain, truth in zip(
        value_and_gradients(swiglu, *arrays), value_and_gradients(mlx_lm_swiglu, *arrays), exact, strict=True
    ):
        assert ours.dtype == dtype
        noise, allowed = (float(mx.linalg.norm(x.astype(mx.float32) - truth)) for x in (ours, plain))
        assert noise < 1.5 * allowed


@pytest.mark.usefixtures("as_on_a_cpu")
def test_functions_are_compiled_where_a_gradient_is_traced() -> None:
    runs: list[tuple[int, ...]] = []

    @compiled_by_shape
    def squared(x: mx.array) -> mx.array:
        runs.append(x.shape)
        if x.ndim != 1:
            raise ValueError("one axis")
        return mx.contiguous(x * x)

    def gradients() -> list[Any]:
        function = mx.custom_function(lambda x: squared(x))
        function.vjp(lambda x, d_out, _: squared(x) * d_out)
        return mx.grad(lambda x: function(x).sum())(mx.array([1.0, 3.0])).tolist()

    assert gradients() == [1.0, 9.0]
    assert len(runs) == 2  # operation by operation, in both passes
    with compiled_in_gradients():
        assert gradients() == gradients() == [1.0, 9.0]
        assert len(runs) == 3  # one trace
        with pytest.raises(ValueError, match="one axis"):
            squared(mx.zeros((2, 2)))
    gradients()
    assert len(runs) == 6


@pytest.mark.parametrize("offset", [3, mx.array([0, 5])], ids=["equal prompts", "prompts of unequal length"])
def test_rotary_embeddings_in_learning_are_mlxs_to_the_bit(offset: Any) -> None:
    embedding, rng = nn.RoPE(6, base=100.0), np.random.default_rng(0)  # of a part of each head
    x, d_out = (mx.array(rng.normal(size=(2, 3, 4, 8)), mx.float32) for _ in range(2))
    plain = mx.vjp(lambda x: PLAIN_ROPE(embedding, x, offset), [x], [d_out])
    with compiled_in_gradients():
        learned = mx.vjp(lambda x: rope(embedding, x, offset), [x], [d_out])
    for expected, actual in zip(plain, learned, strict=True):
        np.testing.assert_array_equal(np.array(actual[0]), np.array(expected[0]))


@pytest.mark.parametrize("shape", [(8, 512), (3, 40, 64)], ids=str)
def test_norms_are_mlxs(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x, weight = mx.array(rng.normal(size=shape), mx.float32), mx.array(rng.normal(size=shape[-1]), mx.float32)
    normed = compiled_by_shape(lambda x: cpu.rms_norm(x, weight, 1e-6))(x)
    np.testing.assert_allclose(np.array(normed), np.array(mx.fast.rms_norm(x, weight, 1e-6)), rtol=1e-5, atol=1e-6)
