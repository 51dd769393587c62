"""Sliced matrix products equal the plain ones, and slices keep to the sizes that OpenBLAS multiplies without packing."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.cpu import small_matmul
from backend.engine.cpu.small_matmul import (
    MAX_ROWS,
    MAX_WIDTH,
    MIN_WIDTH,
    UNPACKED_FLOPS,
    UNPACKED_SIZE,
    matmul_transposed,
    slice_width,
)

SIZES = {"in slices": (48, 1024), "of three factors": (40, 3 * 320), "undivided": (48, 1021), "small": (48, 32)}


@pytest.fixture(autouse=True)
def sliced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Slice as on x86 on every processor, and record the slice widths."""
    widths: list[int] = []

    def recorded(rows: int, inner: int, outer: int) -> int:
        widths.append(slice_width(rows, inner, outer))
        return widths[-1]

    monkeypatch.setattr(small_matmul, "on_x86", lambda: True)
    monkeypatch.setattr(small_matmul, "slice_width", recorded)
    return widths


def factors(before: tuple[int, ...], size: str, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    inner, outer = SIZES[size]
    rng = np.random.default_rng(0)
    shapes = ((*before, inner), (outer, inner))
    x, weight = (mx.array(rng.normal(size=shape), mx.float32).astype(dtype) for shape in shapes)
    return x, weight


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 2))
def test_the_product_is_the_plain_one(sliced: list[int], rows: int, size: str) -> None:
    for before in ((rows,), (rows, 1), (1, rows)):
        x, weight = factors(before, size)
        product = matmul_transposed(x, weight)
        assert product.shape == (*before, weight.shape[0])
        np.testing.assert_allclose(np.array(product), np.array(x @ weight.T), atol=1e-4)
    is_sliced = size in ("in slices", "of three factors") and rows <= MAX_ROWS
    assert all(bool(width) == is_sliced for width in sliced)


def test_several_leading_axes_keep_their_order(sliced: list[int]) -> None:
    x, weight = factors((2, 3), "in slices")
    np.testing.assert_allclose(np.array(matmul_transposed(x, weight)), np.array(x @ weight.T), atol=1e-4)
    assert sliced[0] > 0


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_sixteen_bits_are_left_to_mlx(sliced: list[int], dtype: mx.Dtype) -> None:
    x, weight = factors((4,), "in slices", dtype)
    assert mx.array_equal(matmul_transposed(x, weight), x @ weight.T)
    mixed = matmul_transposed(x.astype(mx.float32), weight)
    assert mx.array_equal(mixed, x.astype(mx.float32) @ weight.T)
    assert not sliced


def test_other_processors_are_left_to_mlx(sliced: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_matmul, "on_x86", lambda: False)
    x, weight = factors((4,), "in slices")
    assert mx.array_equal(matmul_transposed(x, weight), x @ weight.T)
    assert not sliced


@pytest.mark.parametrize("before", [(3,), (2, 2)], ids=str)
def test_gradients_are_the_plain_ones(sliced: list[int], before: tuple[int, ...]) -> None:
    x, weight = factors(before, "in slices")
    cotangent = mx.array(np.random.default_rng(1).normal(size=(*before, weight.shape[0])), mx.float32)
    actual = mx.vjp(matmul_transposed, [x, weight], [cotangent])[1]
    plain = mx.vjp(lambda x, weight: x @ weight.T, [x, weight], [cotangent])[1]
    for grad, plain_grad in zip(actual, plain, strict=True):
        np.testing.assert_allclose(np.array(grad), np.array(plain_grad), atol=1e-4)
    assert sliced[0] > 0


@settings(deadline=None, derandomize=True)
@given(rows=st.integers(1, 40), inner=st.integers(1, 20_000), outer=st.integers(1, 400).map(lambda n: 32 * n))
def test_slices_keep_to_their_limits(rows: int, inner: int, outer: int) -> None:
    width = slice_width(rows, inner, outer)
    fitting = [
        w for w in (MAX_WIDTH, MAX_WIDTH // 2, MAX_WIDTH // 4, MAX_WIDTH // 8, MIN_WIDTH)
        if outer % w == 0 and rows * w <= UNPACKED_SIZE and rows * w * inner <= UNPACKED_FLOPS
    ]  # fmt: skip
    if rows > MAX_ROWS or not fitting:
        assert width == 0
    else:
        assert width == (fitting[0] if fitting[0] < outer else 0), "the widest that fits; 0 where it is all of W"


@settings(deadline=None, derandomize=True)
@given(rows=st.integers(MAX_ROWS + 1, 10**6), inner=st.integers(1, 100), outer=st.integers(1, 10**6))
def test_many_rows_are_never_sliced(rows: int, inner: int, outer: int) -> None:
    assert slice_width(rows, inner, outer) == 0
