"""Optimizers and clipping against numbers computed independently."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.optimizers import schedulers
from mlx.utils import tree_flatten, tree_map

from backend.config.config import parse
from backend.config.settings.training import EIGHT_BIT
from backend.training.optimizers import (
    BLOCK,
    OPTIMIZERS,
    SIGNED,
    UNSIGNED,
    Code,
    clip_by_norm,
    optimizer,
    pack,
    restore,
    state_arrays,
    unpack,
)
from backend.training.schedules import Schedule, learning_rates
from tests.support.cases import cases

every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def parameters() -> dict[str, Any]:
    """Shapes a model has: lists with gaps (LoRA on last layers only), matrices, vectors, a scalar, half precision."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.normal(size=shape).astype(np.float32))

    layer = {"lora_a": normal(4, 3), "bias": normal(3), "scale": mx.array(0.5), "kernel": normal(2, 3, 4)}
    return {"layers": [{}, layer], "head": normal(3, 3).astype(mx.bfloat16)}


def gradients(step: int) -> Any:
    rng = np.random.default_rng(step + 1)
    return tree_map(lambda x: mx.array(rng.normal(size=x.shape).astype(np.float32)).astype(x.dtype), parameters())


@every_optimizer
def test_every_optimizer_handles_every_shape_and_uses_the_learning_rate(name: str) -> None:
    # Adafactor's own default would ignore the learning rate; a rate of 0 must move nothing, in any of them.
    tuned, before = optimizer(name, learning_rate=10.0), parameters()  # bfloat16 does not feel small updates
    for step in range(3):
        after = tuned.apply_gradients(gradients(step), before)
    moved = [
        (name, (a != b).any().item()) for (name, a), (_, b) in zip(*map(tree_flatten, (before, after)), strict=True)
    ]
    assert all(changed for _, changed in moved), moved
    assert all(mx.isfinite(x).all().item() for _, x in tree_flatten(after))
    tuned.learning_rate = 0.0
    still = tuned.apply_gradients(gradients(4), before)
    assert all((a == b).all().item() for (_, a), (_, b) in zip(*map(tree_flatten, (before, still)), strict=True))


@every_optimizer
def test_weight_decay_betas_and_epsilon_reach_the_optimizers_that_have_them(name: str) -> None:
    def updated(**settings: Any) -> list[Any]:
        tuned, params = optimizer(name, learning_rate=1e-2, **settings), parameters()
        for step in range(3):
            params = tuned.apply_gradients(gradients(step), params)
        return [x.astype(mx.float32).tolist() for _, x in tree_flatten(params)]

    takes = OPTIMIZERS[name].takes
    assert (updated(weight_decay=0.3) != updated(weight_decay=0.0)) == ("weight_decay" in takes)
    assert (updated(betas=(0.5, 0.6)) != updated(betas=(0.9, 0.999))) == ("betas" in takes)
    assert (updated(epsilon=0.1) != updated(epsilon=1e-8)) == ("eps" in takes)


@every_optimizer
def test_state_survives_a_file_bit_for_bit(name: str, tmp_path: Path) -> None:
    first, params = optimizer(name, learning_rate=1e-2), parameters()
    for step in range(3):
        params = first.apply_gradients(gradients(step), params)
    mx.save_safetensors(str(tmp_path / "optimizer.safetensors"), state_arrays(first), metadata={"format": "mlx"})
    second = optimizer(name, learning_rate=1.0)
    second.init(params)
    held = second.state
    arrays = mx.load(str(tmp_path / "optimizer.safetensors"))
    assert isinstance(arrays, dict)
    restore(second, arrays)
    assert second.state is held  # a compiled step holds this very object
    saved, loaded = state_arrays(first), state_arrays(second)
    assert saved.keys() == loaded.keys()
    assert all(saved[k].dtype == loaded[k].dtype and (saved[k] == loaded[k]).all().item() for k in saved)
    for step in range(3, 5):
        a, b = first.apply_gradients(gradients(step), params), second.apply_gradients(gradients(step), params)
        assert all((x == y).all().item() for (_, x), (_, y) in zip(*map(tree_flatten, (a, b)), strict=True))


def test_clipping_scales_all_gradients_together_and_only_above_the_limit() -> None:
    grads = {"a": mx.array([3.0, 0.0]), "b": [mx.array([[4.0]], mx.bfloat16)]}
    clipped, norm = clip_by_norm(grads, 1.0)
    assert norm.item() == 5
    np.testing.assert_allclose(np.array(clipped["a"]), [0.6, 0], rtol=1e-5)
    assert clipped["b"][0].dtype == mx.bfloat16 and clipped["b"][0].item() == pytest.approx(0.8, rel=1e-2)
    for longest in (10.0, 0, None):
        same, norm = clip_by_norm(grads, longest)
        assert norm.item() == 5 and same["a"].tolist() == [3, 0]


every_eight_bit = pytest.mark.parametrize("name", EIGHT_BIT)


@pytest.fixture
def one_compiled(request: pytest.FixtureRequest, name: str) -> None:
    """Of all optimizers adamw alone is compiled: the others' kernels would cost g++ runs and show nothing else."""
    if name == "adamw":
        request.getfixturevalue("compiled")


def spread(size: int, *, signed: bool) -> np.ndarray:
    """Numbers over eight orders of magnitude, with zeros."""
    rng = np.random.default_rng(0)
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


def large_parameters() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    matrix, vector = rng.normal(size=(24, 50)), rng.normal(size=(7,))
    return {"layers": [{}, {"w": mx.array(matrix.astype(np.float32))}], "small": mx.array(vector.astype(np.float32))}


def updates(name: str, bits: int, steps: int, tuned: Any = None, start: int = 0, params: Any = None) -> tuple[Any, Any]:
    """(optimizer, parameters) after updates with gradients of scales from 1e-4 to 1, each compiled as the learner's."""
    tuned = tuned or optimizer(name, learning_rate=1e-3, bits=bits)
    params = params or large_parameters()
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


@every_eight_bit
def test_updates_are_close_to_those_of_32_bits(name: str) -> None:
    (_, ours), (_, exact) = updates(name, 8, 40), updates(name, 32, 40)
    begin = large_parameters()["layers"][1]["w"]
    moved, error = exact["layers"][1]["w"] - begin, ours["layers"][1]["w"] - exact["layers"][1]["w"]
    assert length(error) < 0.15 * length(moved)
    assert mx.array_equal(ours["small"], exact["small"])  # less than a block: kept in 32 bits


@pytest.mark.usefixtures("one_compiled")
@every_eight_bit
def test_state_is_small_and_resumes_bit_for_bit(name: str) -> None:
    first, params = updates(name, 8, 5)
    large = sum(x.nbytes for key, x in state_arrays(first).items() if ".w." in key)
    exact = optimizer(name, learning_rate=1e-3)
    exact.init(large_parameters())
    assert large <= 0.3 * sum(x.nbytes for key, x in state_arrays(exact).items() if ".w." in key)
    second = optimizer(name, learning_rate=1.0, bits=8)
    second.init(large_parameters())
    restore(second, dict(state_arrays(first)))
    begun = params
    (_, a), (_, b) = (updates(name, 8, 4, tuned, 5, begun) for tuned in (first, second))
    ours, theirs = (dict[str, mx.array](tree_flatten(tree)) for tree in (a, b))
    assert all(mx.array_equal(x, theirs[name]) for name, x in ours.items())
    with pytest.raises(ValueError, match="checkpoint and"):
        restore(exact, state_arrays(first))


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_states_are_unpacked_one_after_the_other(name: str) -> None:
    tuned = optimizer(name, learning_rate=1e-3, bits=8)
    params, gradient = ({str(i): mx.full((128, 256), i * scale) for i in range(200)} for scale in (0.1, 0.01))
    tuned.init(params)
    compiled = mx.compile(tuned.apply_gradients, inputs=[tuned.state], outputs=[tuned.state])
    mx.eval(params, gradient, tuned.state)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    params = compiled(gradient, params)
    mx.eval(params, tuned.state)
    assert mx.get_peak_memory() - before < 0.7 * 200 * 128 * 256 * 4


GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "schedules.json").read_text())


def config_of(**settings: Any) -> Any:
    return parse({"model": "m", "data": "d", "num_iterations": 1} | settings)


def rates(steps: int, **settings: Any) -> list[float]:
    rate = learning_rates(config_of(**settings), steps)
    return [rate(update) for update in range(steps)]


@cases("case", GOLDEN["cases"])
def test_the_rates_are_those_of_transformers(case: dict[str, Any]) -> None:
    warmup, updates = case["warmup"], case["updates"]
    ours = {"decay_fraction": (updates - warmup) / updates} | case["ours"]
    rate = Schedule(case["kind"], case["peak"], updates, warmup_updates=warmup, **ours)
    # mlx-lm, whose join we have, stays at the peak for one update more than transformers, where there is a warm-up.
    # What falls at the end of the run is counted from there.
    late = 1 if warmup and case["kind"] != "warmup_stable_decay" else 0
    for update, theirs in enumerate(case["rates"][:updates]):
        assert rate(update if update <= warmup else update + late) == pytest.approx(theirs, rel=1e-6, abs=1e-12), update


@pytest.mark.parametrize("warmup", [0, 1, 40])
@pytest.mark.parametrize("kind", ["linear", "cosine", "exponential", "step"])
def test_the_rates_are_those_of_mlx_lm(kind: str, warmup: int) -> None:
    peak, init, final, steps = 1e-3, 1e-5, 2e-4, 200
    fall: Any = {
        "cosine": lambda: schedulers.cosine_decay(peak, 160, final),
        "linear": lambda: schedulers.linear_schedule(peak, final, 160),
        "exponential": lambda: schedulers.exponential_decay(peak, (final / peak) ** (1 / 160)),
        "step": lambda: schedulers.step_decay(peak, (final / peak) ** (1 / 4), 40),
    }[kind]()
    if warmup:
        rise = schedulers.linear_schedule(init, peak, warmup)
        fall = schedulers.join_schedules([rise, fall], [warmup + 1])
    rate = Schedule(
        kind, peak, steps, warmup_updates=warmup, warmup_init=init, decay_fraction=0.8, final=final, cycles=4
    )
    for update in (0, 1, 2, 20, 39, 40, 41, 42, 100, 159, 160):
        assert rate(update) == pytest.approx(float(fall(mx.array(update))), rel=1e-4), update
    assert rate(500) == pytest.approx(final)  # mlx's factors go on falling
