"""Checkpoints written by a thread: the next step samples while the last one goes to disk.

An evaluated mlx array is immutable: an update makes new arrays. So a snapshot is a set of references, the thread writes
the step it was taken at whatever the run does meanwhile, and nothing is copied. The trainer waits for the thread before
the next update all the same: after it the snapshot alone would keep the old weights alive, a second copy of the model.
Decides neither when to save nor what a checkpoint contains.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from backend.config.config import Config
from backend.models.policy import Policy
from backend.models.saving import Arrays, HostArrays, adapter_config, on_host
from backend.runs.checkpoints import checkpoint
from backend.runs.checkpoints.checkpoint import Checkpoint, TrainingState
from backend.runs.events import EventLog, JsonLines
from backend.runs.run_folder import RunFolder
from backend.trainer.not_finite import weights_error
from backend.training.learner import Learner
from backend.training.not_finite import not_finite_arrays
from backend.utils.disk_faults import writing
from backend.utils.whole_file import copy_file, replace_file


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """A checkpoint that is complete on disk."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state and arrays of a run between two steps, every array evaluated."""

    state: TrainingState
    weights: Arrays | HostArrays
    optimizer: Arrays | HostArrays | None
    """None with `save_only_model`."""
    reference: Arrays | HostArrays | None
    adapter_config: dict[str, Any] | None
    """adapter_config.json, as mlx-lm reads it beside the adapters; None under full fine-tuning."""


def snapshot(state: TrainingState, policy: Policy, learner: Learner, config: Config) -> Snapshot:
    """References to everything that a checkpoint holds; nothing is copied. Raises UserError for an array that is not
    finite."""
    full = config.train_type == "full"
    weights, optimizer = policy.trainable(), None if config.save_only_model else learner.state_arrays()
    reference = policy.reference_arrays() if config.sync_ref_model else None
    mx.eval(weights, optimizer, reference)  # a lazy array can be evaluated only in the thread that made its graph
    # A pass that a lost rank has left hanging may hold all the work that mlx takes on at once: asking it for more
    # would hang too.
    hold = on_host if policy.is_sharded else _as_it_is
    weights, optimizer, reference = hold(weights), optimizer and hold(optimizer), reference and hold(reference)
    held = (weights, optimizer or {}, reference or {})
    if odd := not_finite_arrays((name, x) for named in held for name, x in named.items()):
        raise weights_error(config, state.step, odd)
    about = None if full else adapter_config(policy, config)
    # `replace` makes a copy: the trainer sets fields of its own state while this one is written.
    return Snapshot(replace(state), weights, optimizer, reference, about)


def _as_it_is(arrays: Arrays) -> Arrays:
    return arrays


class CheckpointWriter:
    """Writes one checkpoint at a time: `begin`, then `wait`."""

    def __init__(self, run: RunFolder, keep: int) -> None:
        self.run, self._keep = run, keep
        # One thread for all of them: mlx gives every thread that touches an array a stream, and keeps it.
        self._writer = ThreadPoolExecutor(1, "checkpoints")
        self._pending: Future[WrittenCheckpoint] | None = None

    def begin(self, taken: Snapshot, logs: Sequence[JsonLines]) -> None:
        """Start writing a snapshot, after syncing `logs` (event log and completions) to disk. Call `wait` for the
        previous one first."""
        assert self._pending is None
        self._pending = self._writer.submit(self._write, [taken], logs)

    def write_here(self, taken: Snapshot, logs: Sequence[JsonLines]) -> WrittenCheckpoint:
        """As `begin` and `wait`, in the calling thread and on its stream."""
        assert self._pending is None
        return self._write([taken], logs)

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint begun last has been written or has failed, so that `wait` does not block."""
        return self._pending is not None and self._pending.done()

    def wait(self) -> WrittenCheckpoint | None:
        """The checkpoint begun last, once written; None if there is none. Raises DiskError if that failed."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def close(self) -> None:
        self._writer.shutdown()

    def _write(self, only: list[Snapshot], logs: Sequence[JsonLines]) -> WrittenCheckpoint:
        # Popped from a list, because the executor keeps its arguments until after `wait` returns: the arrays
        # would live on.
        taken = only.pop()
        # Before the checkpoint exists: state.json holds the lengths of these files, and a resume truncates
        # them to it. After
        # a power cut, bytes that were never synced could be missing below that length.
        for log in logs:
            log.sync()
        path = checkpoint.save(
            self.run,
            taken.state,
            taken.weights,
            taken.optimizer,
            taken.reference,
            is_full_model=taken.adapter_config is None,
            keep=self._keep,
        )
        if taken.adapter_config is not None:
            publish_adapters(self.run, path / "adapters.safetensors", taken.adapter_config)
        return WrittenCheckpoint(taken.state.step, path)


def publish_adapters(run: RunFolder, arrays: Path, about: Mapping[str, Any]) -> None:
    """Put the adapters of a checkpoint into `adapters/`, where mlx-lm loads them. Raises DiskError.

    Each file is replaced completely or not at all, and any two of a run fit together: its adapters keep their shapes.
    Weights before config: readers need both files, so a first checkpoint appears only once its weights are complete.
    """
    folder = run.adapters
    with writing(folder):
        folder.mkdir(exist_ok=True)  # without parents: a run's folder that is gone must not come back half
    copy_file(arrays, folder / "adapters.safetensors")
    replace_file(folder / "adapter_config.json", json.dumps(about, indent=2) + "\n")


def refresh_adapters(run: RunFolder, saved: Checkpoint, policy: Policy, config: Config) -> None:
    """Make `adapters/` those of the newest checkpoint, where a process was killed between writing the one and the
    other. Raises DiskError."""
    if config.train_type == "full":
        return
    published = run.adapters / "adapters.safetensors"
    is_whole = published.exists() and (run.adapters / "adapter_config.json").exists()
    if not is_whole or _digest(saved.weights_file) != _digest(published):
        publish_adapters(run, saved.weights_file, adapter_config(policy, config))


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


# The saving of a run as its event log tells it: one checkpoint at a time in the background, its event once it is
# complete, the seconds it took.


class RunSaver:
    """The checkpoints of one run. `clock` is the trainer's, in seconds."""

    def __init__(
        self, run: RunFolder, event_log: EventLog, completions: JsonLines, keep: int, clock: Callable[[], float]
    ) -> None:
        self.saved_step: int | None = None
        """The step of the newest checkpoint that is complete; None before there is one."""
        self._run, self._event_log, self._logs = run, event_log, (event_log, completions)
        self._writer = CheckpointWriter(run, keep)
        self._clock = clock
        self._seconds = 0.0

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint begun last needs no more waiting for, and has no event yet."""
        return self._writer.is_done

    def begin(self, take: Callable[[], Snapshot]) -> None:
        """Take a snapshot and begin to write it; `wait` writes its event. Raises DiskError if the checkpoint before
        could not be written, and what `take` raises."""
        self.wait()
        began = self._clock()
        self._writer.begin(take(), self._logs)
        self._seconds += self._clock() - began

    def wait(self) -> None:
        """Wait until the checkpoint that was begun is complete, and write its event. Raises DiskError if it could not
        be written."""
        began = self._clock()
        if (written := self._writer.wait()) is not None:
            self.tell(written.step, written.path)
            self._seconds += self._clock() - began

    def write_here(self, taken: Snapshot) -> None:
        """As `begin` and `wait`, in the calling thread and on its stream."""
        written = self._writer.write_here(taken, self._logs)
        self.tell(written.step, written.path)

    def tell(self, step: int, path: Path) -> None:
        """Write the event of a complete checkpoint."""
        self.saved_step = step
        self._event_log.write("checkpoint", step=step, path=str(path.relative_to(self._run.path)))

    def take_seconds(self) -> float:
        """Seconds that saving has held the run up since this was asked last."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def move_to(self, run: RunFolder) -> None:
        """Write to another place from now on: the run's folder was moved there."""
        self._run = self._writer.run = run

    def close(self) -> None:
        self._writer.close()
