"""The vectorised swiglu and its exponential equal mlx-lm's: in value, in both gradients, and at the limits of float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.activations import swiglu as mlx_lm_swiglu

from backend.engine.compiled import compiled_by_shape
from backend.engine.cpu.swiglu import swiglu
from backend.engine.cpu.vector_exp import exp_clipped
from backend.engine.swiglu import swiglu_16

EXTREMES = [-1000.0, -104.0, -88.0, -87.0, -20.0, -1e-6, 0.0, 1e-6, 20.0, 87.0, 88.0, 104.0, 1000.0]


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


def test_extreme_gates_stay_finite_and_right() -> None:
    gate, up = mx.array(np.repeat(EXTREMES, 2), mx.float32), mx.array(np.tile([-1000.0, 1000.0], len(EXTREMES)))
    for ours, plain in zip(
        value_and_gradients(swiglu, gate, up), value_and_gradients(mlx_lm_swiglu, gate, up), strict=True
    ):
        assert np.isfinite(np.array(ours)).all()
        np.testing.assert_allclose(np.array(ours), np.array(plain), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("swiglu", [swiglu, swiglu_16], ids=["in vectors", "rounded once"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_sixteen_bits_stay_within_their_own_rounding(dtype: mx.Dtype, swiglu: Any) -> None:
    arrays = gate_and_up(dtype)
    exact = value_and_gradients(mlx_lm_swiglu, *(x.astype(mx.float32) for x in arrays))
    for ours, plain, truth in zip(
        value_and_gradients(swiglu, *arrays), value_and_gradients(mlx_lm_swiglu, *arrays), exact, strict=True
    ):
        assert ours.dtype == dtype
        noise, allowed = (float(mx.linalg.norm(x.astype(mx.float32) - truth)) for x in (ours, plain))
        assert noise < 1.5 * allowed


# ---- the exponential -------------------------------------------------------------------------------------------


def test_exp_clipped_is_the_exponential() -> None:
    x = np.random.default_rng(0).uniform(-87, 87, 100_000).astype(np.float32)
    actual, expected = np.array(exp_clipped(mx.array(x)), np.float64), np.exp(x.astype(np.float64))
    assert (np.abs(actual / expected - 1) < 1.5e-7 + 1e-7 * np.abs(x)).all(), "no more than x's own rounding"


@pytest.mark.parametrize("x", [1000.0, 88.8, 1e30, np.inf])
def test_beyond_its_limits_exp_clipped_is_constant(x: float) -> None:
    low, high = exp_clipped(mx.array([-x, x])).tolist()
    assert 0 <= low <= 2.0**-126 and high == 2.0**127


# ---- traces ----------------------------------------------------------------------------------------------------


def test_traces_of_the_last_64_shapes_are_kept() -> None:
    traced: list[tuple[int, ...]] = []

    @compiled_by_shape
    def plus_one(x: mx.array) -> mx.array:
        traced.append(tuple(x.shape))
        return x + 1

    sizes = range(1, 101)
    for size in sizes:
        assert plus_one(mx.zeros(size)).tolist() == [1.0] * size
    assert len(traced) == len(sizes)
    for size in sizes[-64:]:
        assert plus_one(mx.full((size,), 2.0)).tolist() == [3.0] * size
    assert len(traced) == len(sizes), "each was traced once, and is still kept"
    plus_one(mx.zeros(1))
    assert len(traced) == len(sizes) + 1, "the oldest was dropped"
    assert plus_one(mx.zeros(1, mx.int32)).dtype == mx.int32
    assert len(traced) == len(sizes) + 2, "another type is another trace"
