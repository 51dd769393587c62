"""Checkpoints written by a thread: the next step samples while the last one goes to disk.

An evaluated mlx array is immutable, so a snapshot is a set of references, and nothing is copied. The trainer waits for
the thread before the next update: after it the snapshot alone would keep a second copy of the model alive.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from backend.config.config import Config
from backend.models.policy import Policy
from backend.models.saving import Arrays, HostArrays, adapter_config, on_host
from backend.runs import checkpoint
from backend.runs.events import EventLog, JsonLines
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import Checkpoint, TrainingState
from backend.trainer.not_finite import weights_error
from backend.training.learner import Learner
from backend.training.not_finite import not_finite_arrays
from backend.utils.disk import replace_file, writing


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state and arrays of a run between two steps, every array evaluated."""

    state: TrainingState
    weights: Arrays | HostArrays
    optimizer: Arrays | HostArrays | None  # None with `save_only_model`
    reference: Arrays | HostArrays | None
    adapter_config: dict[str, Any] | None  # None under full fine-tuning
    pass_rates: HostArrays | None = None


def snapshot(
    state: TrainingState, policy: Policy, learner: Learner, config: Config, pass_rates: HostArrays | None = None
) -> Snapshot:
    """References to everything that a checkpoint holds. Raises UserError for an array that is not finite."""
    weights, optimizer = policy.trainable(), None if config.save_only_model else learner.state_arrays()
    reference = policy.reference_arrays() if config.moves_reference else None
    mx.eval(weights, optimizer, reference)  # a lazy array can be evaluated only in the thread that made its graph
    if policy.is_sharded:
        # A pass that a lost rank has left hanging may hold all the work that mlx takes on at once: asking it for more
        # would hang too.
        weights = on_host(weights)
        optimizer, reference = optimizer and on_host(optimizer), reference and on_host(reference)
    named = (pair for arrays in (weights, optimizer or {}, reference or {}) for pair in arrays.items())
    if odd := not_finite_arrays(named):
        raise weights_error(config, state.step, odd)
    about = None if config.train_type == "full" else adapter_config(policy, config)
    # `replace` makes a copy: the trainer sets fields of its own state while this one is written.
    return Snapshot(replace(state), weights, optimizer, reference, about, pass_rates)


class CheckpointWriter:
    """Writes one checkpoint of a run at a time, and its event once it is complete: `begin`, then `wait`."""

    def __init__(
        self,
        run: RunFolder,
        event_log: EventLog,
        completions: JsonLines,
        keep: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run = run
        self.saved_step: int | None = None
        self._event_log, self._completions, self._keep, self._clock = event_log, completions, keep, clock
        # One thread for all of them: mlx gives every thread that touches an array a stream, and keeps it.
        self._writer = ThreadPoolExecutor(1, "checkpoints")
        self._pending: Future[tuple[int, Path]] | None = None
        self._seconds = 0.0

    def begin(self, take: Callable[[], Snapshot]) -> None:
        """Take a snapshot and begin to write it. Raises DiskError if the checkpoint before could not be written, and
        the errors of `take`."""
        self.wait()
        began = self._clock()
        self._pending = self._writer.submit(self._write, [take()])
        self._seconds += self._clock() - began

    @property
    def is_done(self) -> bool:
        """True if `wait` has an event to write and does not block."""
        return self._pending is not None and self._pending.done()

    def wait(self) -> None:
        """Wait for the checkpoint that was begun, and write its event. Raises DiskError if it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            began = self._clock()
            self.tell(*pending.result())
            self._seconds += self._clock() - began

    def write_here(self, taken: Snapshot) -> None:
        """In the calling thread and on its stream."""
        assert self._pending is None
        self.tell(*self._write([taken]))

    def tell(self, step: int, path: Path) -> None:
        self.saved_step = step
        self._event_log.write("checkpoint", step=step, path=str(path.relative_to(self.run.path)))

    def take_seconds(self) -> float:
        """Seconds that saving has held the run up since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        self._writer.shutdown()

    def _write(self, only: list[Snapshot]) -> tuple[int, Path]:
        # Popped from a list, because the executor keeps its arguments until after `wait`: the arrays would live on.
        taken = only.pop()
        # Before the checkpoint exists: a resume truncates these files to the lengths in state.json, and after a power
        # cut, bytes that were never synced could be missing below them.
        self._event_log.sync()
        self._completions.sync()
        arrays = (taken.weights, taken.optimizer, taken.reference, taken.pass_rates)
        is_full_model = taken.adapter_config is None
        path = checkpoint.save(self.run, taken.state, *arrays, is_full_model=is_full_model, keep=self._keep)
        if taken.adapter_config is not None:
            publish_adapters(self.run, path / "adapters.safetensors", taken.adapter_config)
        return taken.state.step, path


def publish_adapters(run: RunFolder, arrays: Path, about: Mapping[str, Any]) -> None:
    """Put the adapters of a checkpoint into `adapters/`, where mlx-lm loads them. Raises DiskError."""
    folder = run.adapters
    with writing(folder):
        folder.mkdir(exist_ok=True)  # without parents: a run's folder that is gone must not come back half
    # Weights before config: readers need both files.
    published = folder / "adapters.safetensors"
    with writing(published), arrays.open("rb") as file:
        replace_file(published, iter(partial(file.read, 1 << 20), b""))
    replace_file(folder / "adapter_config.json", json.dumps(about, indent=2) + "\n")


def refresh_adapters(run: RunFolder, saved: Checkpoint, policy: Policy, config: Config) -> None:
    """Publish the newest checkpoint's adapters, where a process was killed before it did. Raises DiskError."""
    if config.train_type == "full":
        return
    published = run.adapters / "adapters.safetensors"
    is_whole = published.exists() and (run.adapters / "adapter_config.json").exists()
    if not is_whole or _digest(saved.weights_file) != _digest(published):
        publish_adapters(run, saved.weights_file, adapter_config(policy, config))


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
