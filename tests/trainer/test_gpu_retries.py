"""After a GPU error a run goes on where it was, with smaller steps, and says so once; after too many it ends with a
sentence.

Here "the next process" is the next call of `train`, which takes over the lock like a program after an exec;
tests/cli/test_restart.py has real ones.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend.runs.events import read_events
from backend.runs.run_folder import LOCK_VARIABLE, RunFolder
from backend.trainer.control import STOP_SIGNALS
from backend.trainer.machine import MEMORY, TIMEOUT, GpuErrorLog
from backend.trainer.trainer import RESTART
from tests.support import failing_gpu, small_run
from tests.support.failing_gpu import OUT_OF_MEMORY
from tests.support.small_run import events, weights

SETTINGS: dict[str, Any] = {"iters": 4, "batch_size": 2, "group_size": 4, "num_iterations": 2, "beta": 0.05}
SETTINGS |= {"learning_rate": 1e-3, "dropout": 0.1, "save_every": 2, "max_completion_length": 6}


@pytest.fixture(autouse=True)
def _nothing_handed_on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A test that ends with a RESTART leaves a lock and blocked signals to a process that never comes."""
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if LOCK_VARIABLE in os.environ:
        os.close(int(os.environ.pop(LOCK_VARIABLE)))


def settings(inputs: Path, **changes: Any) -> dict[str, Any]:
    return small_run.settings_for(inputs, **SETTINGS | small_run.low_half(inputs) | changes)


def train_until_it_ends(raw: dict[str, Any], run: RunFolder, failures: failing_gpu.Failures) -> Any:
    """Train in one "process" after another, each with a GPU that fails at the first of `failures` it comes to."""
    while True:
        with pytest.MonkeyPatch.context() as monkeypatch:
            failing_gpu.install(monkeypatch, failures)
            ending = small_run.train_here(raw, run, may_restart=True)
        if ending.kind != RESTART:
            return ending
        assert run.is_locked(), "no other process, and no window, may see the run as ended"


def warnings(run: RunFolder) -> list[str]:
    return [event["sentence"] for event in events(run, "note") if event["level"] == "warning"]


def assert_whole(run: RunFolder, steps: int = 4) -> None:
    """Every step once in both files, and no gap in the event log."""
    assert small_run.steps(run) == list(range(1, steps + 1))
    lines = [json.loads(line)["step"] for line in run.completions.read_text().splitlines()]
    assert lines == [step for step in range(1, steps + 1) for _ in range(2)]
    numbers = [event["seq"] for event in read_events(run.events)]
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize(
    ("place", "step", "resumed_from"),
    # An update that fails half-way leaves weights of no step: the run goes back to its checkpoint.
    [
        pytest.param("sampling", 4, 3, marks=pytest.mark.proof),
        pytest.param("learning", 4, 3, marks=pytest.mark.proof),
        ("update", 4, 2),
        pytest.param("saving", 2, 2, marks=pytest.mark.proof),
        pytest.param("update", 1, None, marks=pytest.mark.proof),
    ],
)
def test_a_retried_run_equals_one_that_was_resumed_by_hand_with_the_smaller_micro_batch(
    inputs: Path, run: RunFolder, tmp_path: Path, place: str, step: int, resumed_from: int | None
) -> None:
    raw = settings(inputs)
    assert train_until_it_ends(raw, run, [[place, step, OUT_OF_MEMORY]]).kind == "finished"
    assert_whole(run)
    assert [event["resumed_from"] for event in events(run, "started")][-1] == resumed_from
    (told,) = warnings(run)
    assert told.startswith(MEMORY.happened) and told.endswith(MEMORY.advice)
    assert "half the micro-batch (retry 1 of 3)" in told
    (logged,) = GpuErrorLog(run).errors
    assert logged.rows == 4 and logged.text == OUT_OF_MEMORY

    by_hand = RunFolder(tmp_path / "by_hand")
    if resumed_from:
        stopped = small_run.train_here(raw, by_hand, small_run.stop_after(by_hand, resumed_from))
        assert stopped.step == resumed_from
    by_hand.path.mkdir(exist_ok=True, parents=True)
    shutil.copy(run.gpu_errors, by_hand.gpu_errors)
    assert small_run.train_here(raw, by_hand).kind == "finished"
    assert all(np.array_equal(x, weights(by_hand)[name]) for name, x in weights(run).items())
    assert run.completions.read_text() == by_hand.completions.read_text()


@pytest.mark.parametrize("step", [0, pytest.param(1, marks=pytest.mark.proof)])
def test_a_timeout_before_the_first_checkpoint_is_retried(inputs: Path, run: RunFolder, step: int) -> None:
    timeout = failing_gpu.METAL + "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)."
    raw, failures = settings(inputs, steps_per_eval=4, validation_split=0.25), [["sampling", step, timeout]]
    ending = train_until_it_ends(raw, run, failures)
    assert ending.kind == "finished" and not failures, ending.sentence
    (told,) = warnings(run)
    assert "(retry 1 of 3)" in told and told.endswith(TIMEOUT.advice)
    assert [event["step"] for event in events(run, "eval")] == [0, 4]
    assert_whole(run)


def test_the_last_retry_ends_the_run_and_a_resume_has_new_ones(inputs: Path, run: RunFolder) -> None:
    raw = settings(inputs, retry_on_gpu_error=2, iters=2)
    ending = train_until_it_ends(raw, run, [["sampling", 2, OUT_OF_MEMORY]] * 4)
    assert (ending.kind, ending.step, ending.exit_code) == ("failed", 1, 2)
    assert ending.sentence == f"{MEMORY.happened} 2 retries in a new process did not help. {MEMORY.advice}"
    assert events(run, "failed")[-1]["sentence"] == ending.sentence and not run.is_locked()
    assert all(f"retry {number} of 2" in told for number, told in enumerate(warnings(run), 1))
    assert len(warnings(run)) == 2
    sizes = [error.micro_batch_tokens or 0 for error in GpuErrorLog(run).errors]
    assert train_until_it_ends(raw, run, [["sampling", 2, OUT_OF_MEMORY]]).kind == "finished"
    assert_whole(run, 2)
    assert len(warnings(run)) == 4 and GpuErrorLog(run).errors[-1].is_retried
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


@pytest.mark.parametrize("how", ["word", pytest.param("signal", marks=pytest.mark.proof)])
def test_a_stop_between_the_two_processes_is_obeyed_by_the_next(inputs: Path, run: RunFolder, how: str) -> None:
    raw = settings(inputs)
    with pytest.MonkeyPatch.context() as monkeypatch:
        failing_gpu.install(monkeypatch, [["sampling", 2, OUT_OF_MEMORY]])
        assert small_run.train_here(raw, run, may_restart=True).kind == RESTART
    run.say("stop") if how == "word" else os.kill(os.getpid(), signal.SIGTERM)
    ending = small_run.train_here(raw, run, may_restart=True)
    assert (ending.kind, ending.step) == ("stopped", 1)
