"""Checkpoints written beside the run: the next step samples while the last one goes to disk.

Arrays do not change once they are evaluated, so what is written is the step it was begun at, whatever comes after. It
must have ended before the weights change: until then it holds no memory of its own, later it would hold a second copy.
Decides neither when to save nor what a checkpoint is.
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

from backend.models.policy import Policy, adapter_config
from backend.run import checkpoint
from backend.run.checkpoint import Arrays, TrainingState
from backend.spec.config import Config
from backend.spec.events import JsonLines
from backend.spec.faults import Mistake
from backend.spec.places import RunFolder
from backend.training.learner import Learner


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that stands."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run between two steps, every array of it evaluated."""

    state: TrainingState
    weights: Arrays
    optimizer: Arrays
    reference: Arrays | None
    adapter_config: dict[str, Any] | None
    """What mlx-lm needs beside the adapters; None where the whole model learns."""


def snapshot(state: TrainingState, policy: Policy, learner: Learner, config: Config) -> Snapshot:
    """References to all that a checkpoint holds; nothing is copied."""
    full = config.train_type == "full"
    arrays = policy.trainable(), learner.state_arrays(), policy.reference_arrays() if config.sync_ref_model else None
    mx.eval(arrays)  # what is not yet worked out can be worked out in this thread alone
    return Snapshot(replace(state), *arrays, None if full else adapter_config(policy, config))


class CheckpointWriter:
    """Writes one checkpoint at a time. What is begun ends with `wait`."""

    def __init__(self, run: RunFolder, keep: int) -> None:
        self._run, self._keep = run, keep
        # One thread for all of them: mlx gives every thread that touches an array a stream, and keeps it.
        self._writer = ThreadPoolExecutor(1, "checkpoints")
        self._pending: Future[Saved] | None = None

    def begin(self, shot: Snapshot, diaries: Sequence[JsonLines]) -> None:
        """Write `shot`, once what the diaries say up to it is on disk. The one before must have ended."""
        assert self._pending is None
        self._pending = self._writer.submit(self._write, [shot], diaries)

    @property
    def has_ended(self) -> bool:
        """Whether what was begun has come to its end, well or not, so that `wait` returns at once."""
        return self._pending is not None and self._pending.done()

    def wait(self) -> Saved | None:
        """What was begun, once it stands; None where nothing was. Raises Mistake on `save_every` when the disk refused."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def close(self) -> None:
        self._writer.shutdown()

    def _write(self, only: list[Snapshot], diaries: Sequence[JsonLines]) -> Saved:
        shot = (
            only.pop()
        )  # the executor keeps its arguments a moment longer than this; the arrays must not be among them
        for lines in diaries:
            lines.sync()
        path = checkpoint.save(
            self._run, shot.state, shot.weights, shot.optimizer, shot.reference,
            whole_model=shot.adapter_config is None, keep=self._keep,
        )  # fmt: skip
        if shot.adapter_config is not None:
            self._publish(path, shot)
        return Saved(shot.state.step, path)

    def _publish(self, path: Path, shot: Snapshot) -> None:
        """The adapters beside the checkpoints as mlx-lm loads them, each file whole or as it was before."""
        folder = self._run.adapters
        try:
            folder.mkdir(parents=True, exist_ok=True)
            draft = folder / ".draft.safetensors"
            shutil.copyfile(path / "adapters.safetensors", draft)
            draft.replace(folder / "adapters.safetensors")
            text = json.dumps(shot.adapter_config, indent=2)
            (folder / "adapter_config.json").write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            where = f"The adapters of step {shot.state.step} cannot be written to {folder}"
            raise Mistake("save_every", f"{where}: {error}.") from error
