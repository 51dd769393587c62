"""Checkpoints written by a thread: the next step samples while the last one goes to disk.

An evaluated mlx array is immutable: an update makes new arrays. So a snapshot is a set of references, the thread writes the
step it was taken at whatever the run does meanwhile, and nothing is copied. The trainer waits for the thread before
the next update all the same: after it the snapshot alone would keep the old weights alive, a second copy of the model.
Decides neither when to save nor what a checkpoint contains.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from backend.models.policy import Policy
from backend.models.saving import adapter_config
from backend.run import checkpoint
from backend.run.checkpoint import Arrays, TrainingState
from backend.run.not_finite import weights_fault
from backend.spec.config import Config
from backend.spec.events import JsonLines
from backend.spec.faults import Mistake
from backend.spec.places import RunFolder
from backend.training.learner import Learner
from backend.training.not_finite import not_finite_arrays


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """A checkpoint that is complete on disk."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state and arrays of a run between two steps, every array evaluated."""

    state: TrainingState
    weights: Arrays
    optimizer: Arrays
    reference: Arrays | None
    adapter_config: dict[str, Any] | None
    """adapter_config.json, as mlx-lm reads it beside the adapters; None under full fine-tuning."""


def snapshot(state: TrainingState, policy: Policy, learner: Learner, config: Config) -> Snapshot:
    """References to everything that a checkpoint holds; nothing is copied. Raises Mistake for an array that is not finite."""
    full = config.train_type == "full"
    arrays = policy.trainable(), learner.state_arrays(), policy.reference_arrays() if config.sync_ref_model else None
    mx.eval(arrays)  # a lazy array can be evaluated only in the thread that made its graph
    if odd := not_finite_arrays((name, x) for named in arrays for name, x in (named or {}).items()):
        raise weights_fault(config, state.step, odd)
    # `replace` makes a copy: the trainer sets fields of its own state while this one is written.
    return Snapshot(replace(state), *arrays, None if full else adapter_config(policy, config))


class CheckpointWriter:
    """Writes one checkpoint at a time: `begin`, then `wait`."""

    def __init__(self, run: RunFolder, keep: int) -> None:
        self.run, self._keep = run, keep
        # One thread for all of them: mlx gives every thread that touches an array a stream, and keeps it.
        self._writer = ThreadPoolExecutor(1, "checkpoints")
        self._pending: Future[WrittenCheckpoint] | None = None

    def begin(self, taken: Snapshot, logs: Sequence[JsonLines]) -> None:
        """Start writing a snapshot, after syncing `logs` (diary and completions) to disk. Call `wait` for the previous one first."""
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
        """The checkpoint begun last, once written; None if there is none. Raises Mistake on `save_every` if that failed."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def close(self) -> None:
        self._writer.shutdown()

    def _write(self, only: list[Snapshot], logs: Sequence[JsonLines]) -> WrittenCheckpoint:
        # Popped from a list, because the executor keeps its arguments until after `wait` returns: the arrays would live on.
        taken = only.pop()
        # Before the checkpoint exists: state.json holds the lengths of these files, and a resume truncates them to it. After
        # a power cut, bytes that were never synced could be missing below that length.
        for log in logs:
            log.sync()
        path = checkpoint.save(
            self.run, taken.state, taken.weights, taken.optimizer, taken.reference,
            is_full_model=taken.adapter_config is None, keep=self._keep,
        )  # fmt: skip
        if taken.adapter_config is not None:
            self._publish_adapters(path, taken)
        return WrittenCheckpoint(taken.state.step, path)

    def _publish_adapters(self, path: Path, taken: Snapshot) -> None:
        """Copy the adapters to `adapters/`, where mlx-lm loads them; a file is replaced completely or not at all."""
        folder = self.run.adapters
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Weights before config: readers need both files, so a first checkpoint appears only once its weights are complete.
            draft = folder / ".draft.safetensors"
            shutil.copyfile(path / "adapters.safetensors", draft)
            draft.replace(folder / "adapters.safetensors")
            text = json.dumps(taken.adapter_config, indent=2)
            (folder / "adapter_config.json").write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            where = f"The adapters of step {taken.state.step} cannot be written to {folder}"
            raise Mistake("save_every", f"{where}: {error}.") from error
