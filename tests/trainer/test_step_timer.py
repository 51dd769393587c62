"""The seconds of a step add up, and peak memory is measured by phase."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.trainer.telemetry import TIMED_PHASES, StepTimer
from tests.support import small_run


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


def test_a_phase_that_raises_is_timed_too() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    with pytest.raises(KeyError), timer.phase("reward"):
        clock.now += 2
        raise KeyError
    assert timer.metrics()["time/reward"] == 2


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


def test_phases_add_up_to_steps_and_steps_to_the_time_between_their_events(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    raw = small_run.settings_for(tmp_path, iters=5, save_every=3, beta=0.1, group_size=4)
    assert small_run.train_here(raw, run).kind == "finished"
    steps = [event for event in read_events(run.events) if event["kind"] == "step"]
    for event in steps:
        phases: dict[str, Any] = event["metrics"]
        parts = sum(phases[f"time/{part}"] for part in (*TIMED_PHASES, "other"))
        assert parts == pytest.approx(phases["time/step"], rel=0.01, abs=0.002)
        assert all(phases[f"time/{part}"] >= 0 for part in (*TIMED_PHASES, "other"))
        assert max(phases["peak_memory_gb/rollout"], phases["peak_memory_gb/train"]) <= phases["peak_memory_gb"]
        assert min(phases["peak_memory_gb/rollout"], phases["peak_memory_gb/train"]) > 0
    between_s = [
        after["t"] - before["t"] - after["metrics"]["time/step"] for before, after in itertools.pairwise(steps)
    ]
    # Control file, health rules, beginning a checkpoint. The median: another program may come between some of the steps.
    assert -0.002 <= statistics.median(between_s) <= 0.01


def test_a_run_sets_the_wired_limit_once_where_the_device_recommends_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a Mac, where memory that is not wired may be paged out."""
    limits: list[int] = []
    monkeypatch.setattr(mx, "device_info", lambda *_: {"max_recommended_working_set_size": 12_345})
    monkeypatch.setattr(mx, "set_wired_limit", limits.append)
    assert (
        small_run.train_here(small_run.settings_for(tmp_path, iters=1), RunFolder(tmp_path / "run")).kind == "finished"
    )
    assert limits == [12_345]
