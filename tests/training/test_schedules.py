"""Learning rates against transformers' and mlx's own numbers, and the settings that they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.optimizers import schedulers

from backend.config.config import parse
from backend.training.schedules import learning_rates, schedule
from tests.support.cases import cases

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
    rate = schedule(case["kind"], case["peak"], updates, warmup_updates=warmup, **ours)
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
    rate = schedule(
        kind, peak, steps, warmup_updates=warmup, warmup_init=init, decay_fraction=0.8, final=final, cycles=4
    )
    for update in (0, 1, 2, 20, 39, 40, 41, 42, 100, 159, 160):
        assert rate(update) == pytest.approx(float(fall(mx.array(update))), rel=1e-4), update
    assert rate(500) == pytest.approx(final)  # mlx's factors go on falling


def test_a_schedule_at_its_ends() -> None:
    rate = schedule("cosine", 1.0, 100, warmup_updates=10, warmup_init=0.1, decay_fraction=0.5, final=0.2)
    assert (rate(0), rate(10), rate(61), rate(99)) == pytest.approx((0.1, 1.0, 0.2, 0.2))
    assert rate(11 + 25) == pytest.approx(0.6)
    assert all(rate(u) >= rate(u + 1) for u in range(10, 99)) and all(rate(u) < rate(u + 1) for u in range(10))
    with pytest.raises(ValueError, match="lr_schedule is one of constant"):
        schedule("plateau", 1.0, 10)
