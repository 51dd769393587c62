"""Optimizers and clipping against numbers computed independently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from backend.training.optimizers import OPTIMIZERS, clip_by_norm, optimizer, restore, state_arrays

every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def parameters() -> dict[str, Any]:
    """Shapes a model has: lists with gaps (LoRA on the last layers only), matrices, vectors, a scalar, half
    precision."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.normal(size=shape).astype(np.float32))

    layer = {"lora_a": normal(4, 3), "bias": normal(3), "scale": mx.array(0.5), "kernel": normal(2, 3, 4)}
    return {"layers": [{}, layer], "head": normal(3, 3).astype(mx.bfloat16)}


def gradients(step: int) -> Any:
    rng = np.random.default_rng(step + 1)
    return tree_map(lambda x: mx.array(rng.normal(size=x.shape).astype(np.float32)).astype(x.dtype), parameters())


def adamw_reference(w: np.ndarray, grads: list[np.ndarray], lr: float, decay: float, betas: Any) -> np.ndarray:
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(grads, 1):
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        w = w - lr * decay * w
        w = w - lr * (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + 1e-8)
    return w


@pytest.mark.parametrize(("name", "decay"), [("adamw", 0.1), ("adamw", 0.0), ("adam", 0.1)])
def test_adam_corrects_its_bias_and_adamw_decouples_weight_decay(name: str, decay: float) -> None:
    # MLX's default leaves the correction out: the first update would be about three times too long.
    rng = np.random.default_rng(1)
    w, grads = rng.normal(size=(5,)), [rng.normal(size=(5,)) for _ in range(12)]
    expected = adamw_reference(w, grads, 0.05, decay if name == "adamw" else 0.0, (0.8, 0.95))
    tuned, params = optimizer(name, learning_rate=0.05, weight_decay=decay, betas=(0.8, 0.95)), {"w": mx.array(w)}
    for g in grads:
        params = tuned.apply_gradients({"w": mx.array(g)}, params)
    np.testing.assert_allclose(np.array(params["w"]), expected, rtol=1e-4)


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
