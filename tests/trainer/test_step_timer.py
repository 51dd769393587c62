"""The seconds of a step add up, and peak memory is measured by phase."""

from __future__ import annotations

import mlx.core as mx
import pytest

from backend.trainer.telemetry import StepTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_and_the_rest_add_up_to_the_step() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    for phase, inside, after in (
        ("rollout", 3.0, 0.5),
        ("reward", 1.0, 0.0),
        ("rollout", 2.0, 0.25),
        ("train", 4.0, 1.0),
    ):
        with timer.phase(phase):
            clock.now += inside
        clock.now += after
    seconds = timer.metrics()
    assert (seconds["time/rollout"], seconds["time/reward"], seconds["time/train"]) == (5.0, 1.0, 4.0)
    assert (seconds["time/other"], seconds["time/step"], timer.elapsed()) == (1.75, 11.75, 11.75)
    assert timer.rate(50, "rollout") == 10


def megabytes(count: int) -> None:
    mx.eval(mx.zeros((count, 250_000)) + 1)


def test_peak_memory_is_measured_by_phase_and_overall() -> None:
    timer = StepTimer(Clock())
    before = mx.get_active_memory() / 1e9
    with timer.phase("rollout"):
        megabytes(20)
    megabytes(60)
    with timer.phase("train"):
        megabytes(40)
    with timer.phase("rollout"):
        megabytes(10)
    peaks = {name: value - before for name, value in timer.metrics().items() if name.startswith("peak")}
    assert peaks["peak_memory_gb/rollout"] == pytest.approx(0.020, abs=0.003)
    assert peaks["peak_memory_gb/train"] == pytest.approx(0.040, abs=0.003)
    assert peaks["peak_memory_gb"] == pytest.approx(0.060, abs=0.003)
