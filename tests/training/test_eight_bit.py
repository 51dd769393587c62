"""Optimizer states in 8 bits: their codes, their size, and updates beside those of 32 bits."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from backend.config.settings.training import EIGHT_BIT
from backend.training.optimizers import BLOCK, SIGNED, UNSIGNED, Code, optimizer, pack, restore, state_arrays, unpack

every_optimizer = pytest.mark.parametrize("name", EIGHT_BIT)


@pytest.fixture
def one_compiled(request: pytest.FixtureRequest, name: str) -> None:
    """Of all optimizers adamw alone is compiled: the others' kernels would cost g++ runs and show nothing else."""
    if name == "adamw":
        request.getfixturevalue("compiled")


def spread(size: int, *, signed: bool, seed: int = 0) -> np.ndarray:
    """Numbers over eight orders of magnitude, with zeros."""
    rng = np.random.default_rng(seed)
    x = 10 ** rng.uniform(-8, 0, size) * (rng.choice([-1, 1], size) if signed else 1)
    x[::17] = 0
    return x.astype(np.float32)


@pytest.mark.parametrize("code", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
def test_packing_keeps_the_mean_and_the_largest(code: Code) -> None:
    x = spread(3 * BLOCK + 5, signed=code is SIGNED)
    rng, total = np.random.default_rng(1), np.zeros_like(x, np.float64)
    for _ in range(100):
        codes, largest = pack(mx.array(x), code, mx.array(rng.random(x.size, np.float32)))
        total += np.array(unpack(codes, largest, code))
    assert codes.dtype == mx.uint8 and codes.shape == x.shape and largest.shape == (4,)
    blocks = np.abs(np.pad(x, (0, -x.size % BLOCK))).reshape(-1, BLOCK).max(axis=1)
    np.testing.assert_array_equal(np.array(largest), blocks)
    np.testing.assert_array_equal(np.array(unpack(codes, largest, code))[x == 0], 0)
    size = np.repeat(blocks, BLOCK)[: x.size]
    power = 2**code.squarings
    # A step of the codes around x, and so five standard errors of the mean of 100 draws.
    step = size * ((np.abs(x) / size) ** (1 / power) + 1 / code.most) ** power - np.abs(x)
    floor = size * (1 / code.most) ** power if code is UNSIGNED else 0  # squares are not rounded to 0
    bound = 5 * 0.5 * step / 10 + 1e-6 * size + floor
    assert (np.abs(total / 100 - x) <= bound).all()


def parameters() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    matrix, vector = rng.normal(size=(24, 50)), rng.normal(size=(7,))
    return {"layers": [{}, {"w": mx.array(matrix.astype(np.float32))}], "small": mx.array(vector.astype(np.float32))}


def updates(name: str, bits: int, steps: int, tuned: Any = None, start: int = 0, params: Any = None) -> tuple[Any, Any]:
    """(optimizer, parameters) after updates whose gradients have scales from 1e-4 to 1, each compiled as the
    learner's."""
    tuned = tuned or optimizer(name, learning_rate=1e-3, bits=bits)
    params = params or parameters()
    if start == 0:
        tuned.init(params)
    scale = mx.array(10.0 ** np.linspace(-4, 0, 50).astype(np.float32))

    def apply(gradient: Any, params: Any, rate: mx.array) -> Any:
        tuned.learning_rate = rate
        return tuned.apply_gradients(gradient, params)

    compiled = mx.compile(apply, inputs=[tuned.state], outputs=[tuned.state])
    for step in range(start, start + steps):
        rng = np.random.default_rng(step)
        noise = rng.normal(size=(24, 50)).astype(np.float32), rng.normal(size=(7,)).astype(np.float32)
        gradient = {"layers": [{}, {"w": scale * (mx.array(noise[0]) + 0.3)}], "small": mx.array(noise[1])}
        params = compiled(gradient, params, mx.array(1e-3 * (step + 1) / 40))
        mx.eval(params, tuned.state)
    return tuned, params


def length(x: mx.array) -> float:
    return float(mx.linalg.norm(x))


@every_optimizer
def test_updates_are_close_to_those_of_32_bits(name: str) -> None:
    (_, ours), (_, exact) = updates(name, 8, 40), updates(name, 32, 40)
    begin = parameters()["layers"][1]["w"]
    moved, error = exact["layers"][1]["w"] - begin, ours["layers"][1]["w"] - exact["layers"][1]["w"]
    assert length(error) < 0.15 * length(moved)
    assert mx.array_equal(ours["small"], exact["small"])  # less than a block: kept in 32 bits


@pytest.mark.usefixtures("one_compiled")
@every_optimizer
def test_state_is_small_and_resumes_bit_for_bit(name: str) -> None:
    first, params = updates(name, 8, 5)
    large = sum(x.nbytes for key, x in state_arrays(first).items() if ".w." in key)
    exact = optimizer(name, learning_rate=1e-3)
    exact.init(parameters())
    assert large <= 0.3 * sum(x.nbytes for key, x in state_arrays(exact).items() if ".w." in key)
    second = optimizer(name, learning_rate=1.0, bits=8)
    second.init(parameters())
    restore(second, dict(state_arrays(first)))
    begun = params
    (_, a), (_, b) = (updates(name, 8, 4, tuned, 5, begun) for tuned in (first, second))
    ours, theirs = (dict[str, mx.array](tree_flatten(tree)) for tree in (a, b))
    assert all(mx.array_equal(x, theirs[name]) for name, x in ours.items())
    with pytest.raises(ValueError, match="checkpoint and"):
        restore(exact, state_arrays(first))
