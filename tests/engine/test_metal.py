"""Kernels of our own compute what plain mlx does: on Metal as they are, elsewhere their bodies compiled as C++."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from backend.engine import metal
from backend.engine.caches import Rotations, StepContext
from backend.engine.device import has_metal
from backend.engine.metal import HeadNorms, Heads, MetalKernel
from tests.support import metal_shim

needs_a_compiler = pytest.mark.skipif(metal_shim.COMPILER is None, reason="no g++ compiles the kernels' bodies")
needs_metal = pytest.mark.skipif(not has_metal(), reason="there is no Metal")


@pytest.fixture(
    params=[pytest.param(False, marks=needs_a_compiler, id="C++"), pytest.param(True, marks=needs_metal, id="Metal")]
)
def kernels(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(
            MetalKernel, "__call__", lambda kernel, *args, **named: metal_shim.run(kernel, tmp_path, *args, **named)
        )


def assert_equal(actual: mx.array, expected: mx.array) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    # One unit in the last place of the largest number: sums in another order may round to the other side.
    tolerance = {mx.float32: 2e-5, mx.float16: 2**-10, mx.bfloat16: 2**-7}[actual.dtype]
    difference = mx.abs(actual.astype(mx.float32) - expected.astype(mx.float32)).max()
    assert difference.item() <= tolerance * mx.abs(expected).max().item()  # pyright: ignore


@pytest.mark.parametrize(
    ("after", "K", "N", "R", "dtype"),
    [
        pytest.param(metal.NOTHING, 96, 1030, 24, mx.bfloat16, marks=pytest.mark.proof),
        pytest.param(metal.NOTHING, 100, 64, 3, mx.float32, marks=pytest.mark.proof),
        (metal.GATE, 64, 2060, 16, mx.float16),
    ],
)
def test_an_adapter(after: int, K: int, N: int, R: int, dtype: mx.Dtype, kernels: None) -> None:
    """Sizes beyond a tile, below a simdgroup, and not a multiple of either."""
    inputs: Any = (*adapter_arrays(K, N, R, dtype), after)
    assert_equal(metal.adapted(*inputs), metal_shim.adapted_plain(*inputs))


def adapter_arrays(K: int, N: int, R: int, dtype: mx.Dtype) -> list[mx.array]:
    """base, x, A and B of three rows."""
    shapes = {"base": (3, N), "x": (3, K), "a": (R, K), "b": (R, N)}
    base, x, a, b = (mx.random.normal(s, key=mx.random.key(i)) for i, s in enumerate(shapes.values()))
    return [array.astype(dtype) for array in (base, x, a / K**0.5, b)]


@pytest.mark.parametrize(
    ("stream", "dtype"),
    [(mx.float32, mx.bfloat16), pytest.param(mx.float16, mx.float16, marks=pytest.mark.proof)],
    ids=str,
)  # before the first sum the stream is as the model makes it
def test_an_adapter_added_to_the_residual_stream(stream: mx.Dtype, dtype: mx.Dtype, kernels: None) -> None:
    inputs: Any = (
        (100 * mx.random.normal((3, 1030), key=mx.random.key(9))).astype(stream),
        *adapter_arrays(96, 1030, 3, dtype),
    )
    for out, expected in zip(metal.added(*inputs), metal_shim.added_plain(*inputs), strict=True):
        assert_equal(out, expected)
    residual, y = inputs[:2]
    total, rounded = metal.summed(residual, y)
    expected = residual.astype(mx.float32) + y
    assert_equal(total, expected)
    assert_equal(rounded, expected.astype(dtype))


@pytest.mark.parametrize(
    ("shape", "has_norms", "dtype"),
    [
        pytest.param(Heads(4, 2, 128), True, mx.bfloat16, marks=pytest.mark.proof),
        pytest.param(Heads(3, 1, 80), False, mx.float16, marks=pytest.mark.proof),
        (Heads(2, 2, 64), True, mx.float32),
    ],
)
def test_heads(shape: Heads, has_norms: bool, dtype: mx.Dtype, kernels: None) -> None:
    qkv = mx.random.normal((3, 1, shape.all * shape.size), key=mx.random.key(0)).astype(dtype)
    step = StepContext(mx.array(40), mx.array([0, 7, 40]), mx.arange(64))
    rotation = step.rotation(Rotations(nn.RoPE(shape.size, base=1e4), shape.size))
    q_weight, k_weight = (1 + 0.3 * mx.random.normal((2, shape.size), key=mx.random.key(1))).astype(dtype)
    weights = mx.stack([q_weight] * shape.queries + [k_weight] * shape.keys)[:, None]
    norms = HeadNorms(weights, 1e-6) if has_norms else None
    queries, kv = metal.rotated_heads(qkv, rotation, shape, norms)
    expected, *new = metal.rotated_heads_plain(qkv.reshape(3, -1, 1, shape.size), rotation, shape, norms)
    assert_equal(queries, expected)
    assert_equal(kv, mx.stack(new, axis=2))


@pytest.mark.parametrize(("H", "J"), [(2, 2), (4, 2), (6, 2), (7, 1), (1, 1)])
@pytest.mark.parametrize("has_norms", [True, False])
def test_rotated_heads_are_those_of_a_norm_and_a_rotary_embedding(H: int, J: int, has_norms: bool) -> None:
    """The plain form against mlx's own norm and rotation, which the policy uses; every cut into windows."""
    size = 64
    qkv = mx.random.normal((3, 1, (H + 2 * J) * size), key=mx.random.key(0))
    weights = 1 + 0.3 * mx.random.normal((2, size), key=mx.random.key(1))
    rope: Any = nn.RoPE(size, base=1e4)
    step = StepContext(mx.array(40), mx.array([0, 7, 40]), mx.arange(64))
    queries, *new = metal.rotated_heads_plain(
        qkv.reshape(3, -1, 1, size),
        step.rotation(Rotations(rope, size)),
        Heads(H, J, size),
        HeadNorms(mx.stack([weights[0]] * H + [weights[1]] * J)[:, None], 1e-6) if has_norms else None,
    )
    parts = [part.reshape(3, -1, 1, size) for part in mx.split(qkv, [H * size, (H + J) * size], axis=-1)]
    for i, part in enumerate(parts[:2]):
        parts[i] = rope(mx.fast.rms_norm(part, weights[i], 1e-6) if has_norms else part, offset=step.position_B)
    assert_equal(queries, parts[0])
    for found, part in zip(new, parts[1:], strict=True):
        assert_equal(found, part)
