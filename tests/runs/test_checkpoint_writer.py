"""Checkpoints are written beside training and appear whole; which of a folder's are kept, newest and best."""

import gc
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from backend.config.config import parse
from backend.runs import checkpoint
from backend.runs.checkpoint import CheckpointWriter, Snapshot, arrays_of, newest, newest_whole, snapshot
from backend.runs.events import EventLog, JsonLines, read_events
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import TrainingState, all_checkpoints
from backend.sampling.rollout import Sampler
from backend.trainer.machine import MEMORY, gpu_error
from backend.training.learner import Learner
from backend.utils import disk
from backend.utils.errors import UserError
from tests.support import failing_gpu, small_run

PATIENCE_S = 20


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def writer_of(run: RunFolder) -> CheckpointWriter:
    return CheckpointWriter(run, EventLog(run.events), JsonLines(run.completions), keep=3)


def snapshot_of(step: int, weights: dict[str, mx.array]) -> Snapshot:
    mx.eval(weights)
    return Snapshot(TrainingState(step=step), weights, {"step": mx.array(step)}, None, {"fine_tune_type": "lora"})


def slowed(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[int]]:
    """Make the writer wait for an event. Returns the event and the list of threads that wrote."""
    go, threads, write = threading.Event(), [], mx.save_safetensors

    def slow(*args: Any, **more: Any) -> None:
        threads.append(threading.get_ident())
        assert go.wait(PATIENCE_S)
        write(*args, **more)

    monkeypatch.setattr(mx, "save_safetensors", slow)
    return go, threads


def test_later_updates_do_not_reach_a_checkpoint(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    go, threads = slowed(monkeypatch)
    checkpoint_writer = writer_of(run)
    assert not checkpoint_writer.is_done
    weights = {"layer.lora_a": mx.arange(6.0).reshape(2, 3).T, "layer.lora_b": mx.ones((2, 2)) * 3}
    held = dict(weights)
    for step in (1, 2):
        taken = snapshot_of(step, dict(weights))
        checkpoint_writer.begin(lambda taken=taken: taken)
        weights = {name: x + 1 for name, x in weights.items()}  # an update, while it is being written
        mx.eval(weights)
        assert not checkpoint_writer.is_done or go.is_set()
        go.set()
        checkpoint_writer.wait()
        assert checkpoint_writer.saved_step == step and (run.checkpoints / f"00000{step}").is_dir()
    checkpoint_writer.close()
    assert kinds_and_steps(run) == [("checkpoint", 1), ("checkpoint", 2)]
    first, second = checkpoint.all_checkpoints(run)
    for name, x in held.items():
        assert mx.array_equal(arrays_of(first, "weights")[name], x)
        assert mx.array_equal(arrays_of(second, "weights")[name], x + 1)
        assert mx.array_equal(mx.load(str(run.adapters / "adapters.safetensors"))[name], x + 1)
    assert len(set(threads)) == 1 and threads[0] != threading.get_ident()


def snapshot_from(*arrays: dict[str, mx.array], is_sharded: bool = False, **settings: Any) -> Snapshot:
    """A snapshot of weights, an optimizer's state and, where a third is given, the weights of a reference."""
    mx.eval(*arrays)
    weights, optimizer, *reference = arrays
    learner: Any = SimpleNamespace(state_arrays=lambda: optimizer)
    policy: Any = SimpleNamespace(trainable=lambda: weights, is_sharded=is_sharded)
    if reference:
        policy.reference_arrays = lambda: reference[0]
        settings |= {"sync_ref_model": True, "beta": 0.1}
    config = parse({"model": "m", "data": "d", "train_type": "full", **settings})
    return snapshot(TrainingState(step=1), policy, learner, config)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_snapshot_copies_nothing_and_is_independent_of_mlx_where_processes_share_the_model(is_sharded: bool) -> None:
    arrays = [{"x": mx.ones(3) * number} for number in (1, 2, 3)]
    taken = snapshot_from(*arrays, is_sharded=is_sharded)
    for held, array in zip((taken.weights, taken.optimizer, taken.reference), arrays, strict=True):
        assert held is not None and np.array_equal(np.array(held["x"]), np.array(array["x"]))
        assert isinstance(held["x"], np.ndarray) if is_sharded else held["x"] is array["x"]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_snapshot_with_an_array_that_is_not_finite_is_refused(which: int) -> None:
    arrays = [{f"array {number}": mx.ones(3)} for number in range(3)]
    arrays[which] = {f"array {which}": mx.array([1.0, mx.nan])}
    with pytest.raises(UserError, match=f"array {which}"):
        snapshot_from(*arrays)


def test_a_failed_write_is_raised_and_the_next_may_succeed(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_writer = writer_of(run)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "sync", lambda path: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        checkpoint_writer.begin(lambda: snapshot_of(1, {"x": mx.ones(2)}))
        with pytest.raises(UserError, match=r"disk: .*/000001 cannot be written: the disk is full\."):
            checkpoint_writer.wait()
    assert checkpoint_writer.saved_step is None and not list(run.checkpoints.iterdir())
    checkpoint_writer.begin(lambda: snapshot_of(1, {"x": mx.ones(2)}))
    checkpoint_writer.wait()
    assert checkpoint_writer.saved_step == 1
    checkpoint_writer.close()


def kinds_and_steps(run: RunFolder) -> list[tuple[str, int]]:
    return [(event["kind"], event["step"]) for event in read_events(run.events) if "step" in event]


def test_a_step_samples_during_a_save_and_updates_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer is held back until sampling is over: a run that waited for it before would never end."""
    raw = small_run.settings_for(tmp_path, iters=3, save_every=1)
    go, _ = slowed(monkeypatch)
    run, sample, learn = RunFolder(tmp_path / "run"), Sampler.sample, Learner.learn
    complete: list[int] = []

    def sampled(*args: Any) -> Any:
        groups = sample(*args)
        if small_run.steps(run)[-1:] == [1]:
            go.set()
        return groups

    def learned(*args: Any) -> Any:
        complete.append(len(checkpoint.all_checkpoints(run)))
        return learn(*args)

    monkeypatch.setattr(Sampler, "sample", sampled)
    monkeypatch.setattr(Learner, "learn", learned)
    assert small_run.train_here(raw, run).kind == "finished"
    assert complete == [0, 1, 2]
    events = [pair for pair in kinds_and_steps(run) if pair[0] in ("step", "checkpoint")]
    assert events == [(kind, step) for step in (1, 2, 3) for kind in ("step", "checkpoint")]
    metrics = small_run.metrics(run)
    assert "time/save" not in metrics[0] and metrics[1]["time/save"] > 0


def stop_when(run: RunFolder, matches: Callable[[dict[str, Any]], bool]) -> Callable[[dict[str, Any]], None]:
    return lambda event: run.say("stop") if matches(event) else None


def test_a_stop_waits_for_the_checkpoint_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, run = small_run.settings_for(tmp_path, iters=3, save_every=1), RunFolder(tmp_path / "run")
    go, threads = slowed(monkeypatch)
    threading.Timer(0.3, go.set).start()
    ending = small_run.train_here(raw, run, stop_when(run, lambda event: event.get("phase") == "saving"))
    assert (ending.kind, ending.step) == ("stopped", 1)
    assert [saved.state.step for saved in checkpoint.all_checkpoints(run)] == [1] and len(threads) == 2, "written once"
    assert kinds_and_steps(run)[-2:] == [("checkpoint", 1), ("stopped", 1)]
    assert small_run.train_here(raw, run).kind == "finished" and small_run.steps(run) == [1, 2, 3]


def test_a_stop_writes_a_failed_checkpoint_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, run = small_run.settings_for(tmp_path, iters=3, save_every=1), RunFolder(tmp_path / "run")
    write, fails = mx.save_safetensors, iter([True])

    def first_fails(*args: Any, **more: Any) -> None:
        if next(fails, False):
            raise RuntimeError("[write] Unable to write 8 bytes to file.")
        write(*args, **more)

    monkeypatch.setattr(mx, "save_safetensors", first_fails)
    ending = small_run.train_here(raw, run, stop_when(run, lambda event: event.get("phase") == "saving"))
    assert (ending.kind, ending.step) == ("stopped", 1)
    assert [saved.state.step for saved in checkpoint.all_checkpoints(run)] == [1]


@pytest.mark.parametrize("damage", ["no adapters", "no config", "older adapters"])
def test_a_resume_publishes_the_adapters_of_its_checkpoint(tmp_path: Path, damage: str) -> None:
    """A process was killed between its checkpoint and the copy in adapters/."""
    raw, run = small_run.settings_for(tmp_path, iters=2), RunFolder(tmp_path / "run")
    assert small_run.train_here(raw, run).kind == "finished"
    weights, config = run.adapters / "adapters.safetensors", run.adapters / "adapter_config.json"
    expected = weights.read_bytes(), config.read_bytes()
    if damage == "older adapters":
        weights.write_bytes(b"of step 1")
    else:
        (weights if damage == "no adapters" else config).unlink()
    assert small_run.train_here(raw, run).kind == "finished"
    assert (weights.read_bytes(), config.read_bytes()) == expected and small_run.steps(run) == [1, 2]


def test_saving_holds_no_second_copy_of_the_model_in_full_fine_tuning(tmp_path: Path) -> None:
    from tests.support.random_models import tiny_model

    tiny_model(tmp_path / "model", hidden=256, layers=2)
    small_run.write_rows(tmp_path / "rows.jsonl")

    def peak(name: str, save_every: int) -> float:
        gc.collect()
        run, before = RunFolder(tmp_path / name), mx.get_active_memory() / 1e9
        raw = small_run.settings_for(tmp_path, iters=3, save_every=save_every, train_type="full")
        assert small_run.train_here(raw, run).kind == "finished"
        steps = small_run.metrics(run)
        return max(metrics["peak_memory_gb"] for metrics in steps) - before

    never, always = peak("never", 100), peak("always", 1)
    size = sum(np.prod(x.shape) * 4 for x in mx.load(str(tmp_path / "model" / "model.safetensors")).values()) / 1e9
    assert size > 0.005 and always < never + size / 2


WEIGHTS = {"layers.0.lora_a": mx.array([[1.0, -0.0]]), "layers.0.lora_b": mx.array([3.0])}
MOMENTS = {"step": mx.array(7, mx.uint64), "layers.0.lora_a.m": mx.array([[0.5, 0.25]])}


def save(run: RunFolder, step: int, keep: int = 3) -> Path:
    return checkpoint.save(run, Snapshot(TrainingState(step=step), WEIGHTS, MOMENTS, None, {"rank": 8}), keep)


def steps(run: RunFolder) -> list[int]:
    return [saved.state.step for saved in all_checkpoints(run)]


def test_an_incomplete_folder_is_no_checkpoint_and_one_of_a_later_version_is(run: RunFolder) -> None:
    assert newest(run) is None
    file = save(run, 1) / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"of_tomorrow": 1}))
    for step, missing in ((2, "adapters.safetensors"), (3, "optimizer.safetensors"), (4, "state.json")):
        (save(run, step, keep=9) / missing).unlink()
    for step, text in ((5, ""), (6, "[]"), (7, '{"step": 7'), (8, '{"cursor": 3}'), (9, '{"step": 9}')):
        (save(run, step, keep=9) / "state.json").write_text(text)
    assert steps(run) == [1]


def test_leftovers_of_a_killed_process_are_ignored_and_deleted_by_the_next_save(run: RunFolder) -> None:
    path = save(run, 1)
    for name in (".000002", ".000001.old"):
        path.rename(run.checkpoints / name) if name == ".000002" else (run.checkpoints / name).mkdir()
    assert newest(run) is None
    save(run, 2)
    assert [folder.name for folder in run.checkpoints.iterdir()] == ["000002"]
    (run.checkpoints / "000002").rename(run.checkpoints / ".000002.old")  # killed while it saved step 2 again
    assert newest_whole(run)[0] == newest(run) and steps(run) == [2]


def test_a_gpu_error_while_saving_is_not_taken_for_a_full_disk(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are RuntimeErrors of mlx; one is mended by a new process, the other by the user."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(failing_gpu.OUT_OF_MEMORY)

    monkeypatch.setattr(mx, "save_safetensors", refuse)
    with pytest.raises(RuntimeError, match="Insufficient Memory") as raised:
        save(run, 1)
    assert gpu_error(raised.value) is MEMORY
    assert not list(run.checkpoints.iterdir())
