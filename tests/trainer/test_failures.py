"""What ends or holds up a run: GPU errors, which are told from every other exception and retried with smaller steps;
numbers that are not finite; a full or broken disk.

After a GPU error the next process is here the next call of `train`, which takes over the lock like a program after an
exec; tests/cli/test_steer_verbs.py has real ones.
"""

import errno
import json
import math
import os
import re
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from backend.cli.training import new_run
from backend.export import writer
from backend.runs import checkpoint, guards
from backend.runs import events as events_module
from backend.runs.events import read_events
from backend.runs.run_folder import LOCK_VARIABLE, RunFolder
from backend.trainer.control import STOP_SIGNALS
from backend.trainer.machine import BUFFERS, DISCARDED, INTERACTIVITY, MEMORY, OTHER, TIMEOUT, GpuErrorLog, gpu_error
from backend.trainer.trainer import RESTART
from backend.training.learner import Learner
from backend.utils import disk
from backend.utils.disk import LONGEST_PLACE
from backend.utils.errors import UserError
from backend.utils.text import quote
from tests.support import failing_gpu, small_run
from tests.support.cases import cases
from tests.support.failing_gpu import OUT_OF_MEMORY
from tests.support.small_run import check, events, weights

METAL = failing_gpu.METAL
TEXTS = {
    failing_gpu.INTERACTIVITY: INTERACTIVITY,
    failing_gpu.OUT_OF_MEMORY: MEMORY,
    METAL + "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout).": TIMEOUT,
    METAL + "Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)": TIMEOUT,
    failing_gpu.IGNORED: DISCARDED,
    METAL
    + "Discarded (victim of GPU error/recovery) (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)": DISCARDED,
    METAL + "Caused GPU Address Fault Error (0000000b:kIOGPUCommandBufferCallbackErrorPageFault)": OTHER,
    METAL + "Internal Error (0000010a:Internal Error)": OTHER,
    "[metal::malloc] Resource limit (499000) exceeded.": BUFFERS,
    "[metal::malloc] Attempting to allocate 18253611008 bytes which is greater than the maximum allowed buffer size of "
    "17179869184 bytes.": MEMORY,
    "[malloc] Unable to allocate 1073741824 bytes.": MEMORY,
    "[malloc_async] Unable to allocate 1073741824 bytes.": MEMORY,
    "cudaMallocAsync failed: out of memory": MEMORY,
    "cudaMallocAsync(&data, size, stream) failed: out of memory": MEMORY,
    "cudaGraphInstantiate(&graph_exec_, graph_, nullptr, nullptr, 0) failed: out of memory": MEMORY,
}


@cases("text", TEXTS)
def test_texts_as_mlx_and_metal_write_them(text: str) -> None:
    error = gpu_error(RuntimeError(text))
    assert error is TEXTS[text]
    assert all(sentence.endswith(".") for sentence in (error.happened, error.advice))


def test_a_run_without_memory_is_saved(tmp_path: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    learn = Learner.learn

    def hungry(learner: Learner, *arguments: Any) -> dict[str, float]:
        if learner.updates == 2:
            raise MemoryError
        return learn(learner, *arguments)

    monkeypatch.setattr(Learner, "learn", hungry)
    ending = small_run.train_here(small_run.settings_for(tmp_path, iters=5), run)
    assert (ending.kind, ending.exit_code, ending.step) == ("failed", 2, 2)
    assert ending.sentence.startswith("There was not enough memory for the arrays of a step.")
    saved = checkpoint.newest(run)
    assert saved is not None and saved.state.step == 2


@cases(
    "error",
    [
        RuntimeError(f"the judge said: {failing_gpu.OUT_OF_MEMORY}"),
        RuntimeError("[save_safetensors] Failed to open checkpoint"),
        RuntimeError("cudaLaunchKernel failed: an illegal memory access was encountered"),
        RuntimeError("[metal::Device] Unable to build metal library from source"),
        ValueError(failing_gpu.OUT_OF_MEMORY),
        NotImplementedError(failing_gpu.OUT_OF_MEMORY),  # a RuntimeError too, which mlx does not raise
        UserError("save_every", failing_gpu.OUT_OF_MEMORY),
    ],
)
def test_nothing_else_is_a_gpu_error(error: Exception) -> None:
    assert gpu_error(error) is None


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
    lines = [row["step"] for row in small_run.rows(run)]
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


def raw(inputs: Path, **changes: Any) -> dict[str, Any]:
    return small_run.settings_for(inputs, **small_run.low_half(inputs) | {"iters": 9, "learning_rate": 1e-5} | changes)


def saved_arrays_are_finite(run: RunFolder) -> bool:
    files = [*run.checkpoints.glob("*/*.safetensors"), *run.adapters.glob("*.safetensors")]
    arrays = [array for file in files for array in mx.load(str(file)).values()]  # pyright: ignore
    return bool(files) and all(np.isfinite(np.array(x.astype(mx.float32))).all() for x in arrays)


def test_an_infinite_gradient_ends_the_run(inputs: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = Learner._apply  # pyright: ignore[reportPrivateUsage]

    def poisoned(learner: Learner, gradient: Any, loss: mx.array) -> dict[str, float]:
        if learner.updates == 2:
            gradient = _with_infinity(gradient)
        return apply(learner, gradient, loss)

    monkeypatch.setattr(Learner, "_apply", poisoned)
    ending = small_run.train_here(raw(inputs, beta=0.01), run)
    assert (ending.kind, ending.exit_code, ending.step) == ("failed", 2, 2)
    assert ending.sentence == (
        "learning_rate: Step 3 was not applied, for its gradient is not finite (a norm of inf). The likely "
        "cause is the learning rate of "
        "1e-05; go on with learning_rate=1e-06, from an earlier checkpoint if it comes again. What it computed is in "
        "inspection/step-000003."
    )
    assert small_run.steps(run) == [1, 2] and saved_arrays_are_finite(run)
    saved = checkpoint.newest(run)
    assert saved is not None and saved.state.step == 2
    folder = run.inspection / "step-000003"
    summary = (folder / "summary.txt").read_text()
    rows = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    assert "Optimizer update 3." in summary and "not finite in 1 of them" in summary
    assert len(rows) == 2 and rows[0]["prompt"].startswith("What is") and rows[0]["advantage"] == -rows[1]["advantage"]
    for row in rows:
        counts = {len(values) for values in row["tokens"].values()}
        assert counts == {len(row["completion_tokens"])}
        assert row["tokens"].keys() == {"sampled_logp", "learned_logp", "old_logp", "reference_logp", "weight"}
        assert row["tokens"]["learned_logp"] == pytest.approx(row["tokens"]["sampled_logp"], abs=1e-4)
    table = (folder / "gradients.tsv").read_text().splitlines()
    assert len(table) > 2 and table[1].split("\t")[1:2] + table[1].split("\t")[3:4] == ["inf", "1"]
    # With the cause gone it goes on from there.
    monkeypatch.undo()
    assert small_run.train_here(raw(inputs, beta=0.01, iters=4), run).kind == "finished"
    assert small_run.steps(run) == [1, 2, 3, 4]


def _with_infinity(tree: Any) -> Any:
    """The same gradients, with one infinity in the first array."""
    leaves: Any = tree_flatten(tree)
    (name, first), *others = leaves
    flat = mx.concatenate([mx.array([math.inf], first.dtype), first.reshape(-1)[1:]])
    return tree_unflatten([(name, flat.reshape(first.shape)), *others])


def test_infinite_weights_are_never_saved(inputs: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update can overflow although its gradient has not: the step is in the event log, its weights are nowhere."""
    apply = Learner._apply  # pyright: ignore[reportPrivateUsage]

    def overflowing(learner: Learner, gradient: Any, loss: mx.array) -> dict[str, float]:
        metrics = apply(learner, gradient, loss)
        if learner.updates == 2:
            learner.policy.set_parameters(_with_infinity(learner.policy.parameters()))
        return metrics

    monkeypatch.setattr(Learner, "_apply", overflowing)
    ending = small_run.train_here(raw(inputs, save_every=1, iters=3), run)
    assert (ending.kind, ending.exit_code) == ("failed", 2)
    assert ending.sentence.startswith("learning_rate: The weights of step 2 are not finite (")
    assert ending.sentence.count("are not finite") == 1  # the last attempt to save says the same
    assert [saved.state.step for saved in checkpoint.all_checkpoints(run)] == [1] and saved_arrays_are_finite(run)
    assert [event["kind"] for event in read_events(run.events)][-1] == "failed"


FULL = partial(OSError, errno.ENOSPC, "No space left on device")


def disk_settings(inputs: Path, **changes: Any) -> dict[str, Any]:
    return small_run.settings_for(inputs, **({"iters": 3, "save_every": 2, "learning_rate": 1e-2} | changes))


@pytest.fixture(scope="module")
def unbroken(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    run = RunFolder(tmp_path_factory.mktemp("unbroken") / "run")
    assert small_run.train_here(disk_settings(inputs), run).kind == "finished"
    return run


@pytest.mark.parametrize(
    ("name", "nth", "for_good"),
    [("events.jsonl", 5, False), ("completions.jsonl", 3, False), ("events.jsonl", 10, True)],
)
def test_a_line_that_cannot_be_written_ends_the_run_and_resuming_equals_never_having_stopped(
    inputs: Path,
    unbroken: RunFolder,
    run: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    nth: int,
    for_good: bool,
) -> None:
    write_all, count = events_module.write_all, 0

    def full(file: Any, data: bytes) -> None:
        nonlocal count
        count += (is_it := Path(file.name).name == name)
        if is_it and (count == nth or (for_good and count > nth)):
            write_all(file, data[:7])
            raise FULL()
        write_all(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(events_module, "write_all", full)
        ending = small_run.train_here(disk_settings(inputs), run)
    assert (ending.kind, ending.exit_code) == ("failed", 2)
    place = quote(run.path / name, LONGEST_PLACE)
    assert ending.sentence == f"disk: {place} cannot be written: the disk is full." and place.endswith(f"/{name}")
    last = list(read_events(run.events))[-1]
    assert (last["kind"] == "failed" and last["sentence"] == ending.sentence) != for_good, "for want of a last line"
    assert last["kind"] != "finished" and "traceback" not in last and not run.is_locked()
    assert small_run.train_here(disk_settings(inputs), run).kind == "finished"
    small_run.assert_same_run(run, unbroken)


def test_an_unwritable_model_leaves_the_old(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path / "run")
    raw = disk_settings(inputs, train_type="full", iters=2)
    run.model.mkdir(parents=True)
    (run.model / "config.json").write_text("old")

    def full(*_: Any, **__: Any) -> None:
        raise FULL()

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_model", full)
        ending = small_run.train_here(raw, run)
    place = quote(run.model, LONGEST_PLACE)
    assert (ending.exit_code, ending.sentence) == (2, f"disk: {place} cannot be written: the disk is full.")
    assert os.listdir(run.model) == ["config.json"] and not (run.path / ".model").exists()
    assert small_run.train_here(raw, run).kind == "finished"
    assert json.loads((run.model / "config.json").read_text()) and (run.model / "model.safetensors").exists()


def rooms(monkeypatch: pytest.MonkeyPatch, *free: int | None) -> list[int | None]:
    """The disk has these rooms at its next looks, the last of them for good."""
    left = list(free)
    monkeypatch.setattr(guards, "room_on", lambda path: left.pop(0) if len(left) > 1 else left[0])
    return left


def notes(run: RunFolder) -> list[str]:
    return [sentence for sentence in small_run.notes(run) if "disk" in sentence.lower()]


def test_waiting_for_room(inputs: Path, unbroken: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, plenty, none = RunFolder(tmp_path / "run"), 10**12, 3_000_000
    rooms(monkeypatch, plenty, none, none, none, plenty)
    assert small_run.train_here(disk_settings(inputs), run).kind == "finished"
    lacks, again = notes(run)
    where = quote(run.path, LONGEST_PLACE)
    assert lacks == f"The disk of {where} has 3 MB free, and 16.8 MB are needed. The run is paused until there is room."
    assert again == "There is space on the disk again; the run continues."
    assert [event.get("sentence") for event in read_events(run.events) if event.get("phase") == "paused"] == [lacks]
    assert run.completions.read_bytes() == unbroken.completions.read_bytes()


def test_a_waiting_run_obeys(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rooms(monkeypatch, 3_000_000)
    for word, kind in (("stop", "stopped"), ("resume", "finished")):
        run = RunFolder(tmp_path / word)

        def on_pause(event: Any, run: RunFolder = run, word: str = word) -> None:
            if event.get("phase") == "paused":
                run.say(word)

        ending = small_run.train_here(disk_settings(inputs, iters=2), run, on_pause)
        assert ending.kind == kind and len(notes(run)) == 1
    assert "3 MB free" in notes(run)[0]


def test_a_run_without_room_is_refused(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = disk_settings(inputs)
    monkeypatch.setattr(disk, "room_on", lambda folder: 5_000_000)
    (fault,) = check(raw)
    assert fault.setting == "disk"
    assert re.fullmatch(r"The run needs 1[67]\.?\d* MB on the disk of .*, which has 5 MB free\.", fault.sentence)
    with pytest.raises(UserError, match="disk: The run needs"):
        new_run(raw, tmp_path / "runs", "a")
    assert not (tmp_path / "runs").exists()
    monkeypatch.setattr(disk, "room_on", lambda folder: None)
    assert check(raw) == []
