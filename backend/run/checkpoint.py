"""Checkpoints of a run: weights, optimizer and place, written whole or not at all; rotated; found again.

A checkpoint is a folder `checkpoints/000100/`. It is written under another name, put on disk, and renamed, so a folder
with that name is whole. There is no random state to save: every draw follows from the seed and the place in the run.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import mlx.core as mx

from backend.spec.faults import Mistake
from backend.spec.places import RunFolder

Arrays = dict[str, mx.array]


@dataclass(slots=True)
class TrainingState:
    """Where a run is, between two steps. Kept in state.json beside the weights."""

    step: int = 0
    """Steps done."""
    updates: int = 0
    """Optimizer updates done (`num_iterations` of them a step)."""
    cursor: int = 0
    """Rows of the deck gone through, the ones left out counted."""
    num_tokens: int = 0
    """Prompt and completion tokens so far."""
    elapsed_s: float = 0.0
    """Seconds of training, loading and pauses not counted."""
    score: float | None = None
    """Held-out reward at the last evaluation, else mean training reward since the last checkpoint."""
    evaluated: int = -1
    """The step of the last evaluation."""
    bonus: list[float | None] = field(default_factory=list)
    """State of the entropy bonus."""
    reward_weights: list[dict[str, Any]] = field(default_factory=list)
    """State of adaptive reward weights, a stage each."""
    events_bytes: int = 0
    completions_bytes: int = 0
    """Lengths of both diaries when this was saved: resuming cuts them back to here."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    state: TrainingState

    def weights(self) -> Arrays:
        return _load(next(file for file in _weight_files(self.path) if file.exists()))

    @property
    def has_reference(self) -> bool:
        return (self.path / "reference.safetensors").exists()

    def reference(self) -> Arrays:
        """The reference of a run that moves it."""
        return _load(self.path / "reference.safetensors")

    def optimizer(self) -> Arrays:
        return _load(self.path / "optimizer.safetensors")


def _weight_files(folder: Path) -> tuple[Path, Path]:
    return folder / "adapters.safetensors", folder / "model.safetensors"


def _load(path: Path) -> Arrays:
    arrays = mx.load(str(path))
    assert isinstance(arrays, dict)
    return arrays


def save(
    run: RunFolder,
    state: TrainingState,
    weights: Arrays,
    optimizer: Arrays,
    reference: Arrays | None = None,
    *,
    whole_model: bool,
    keep: int,
) -> Path:
    """Write a checkpoint of `state` and drop the ones that are neither among the newest `keep` nor the best.

    Raises Mistake on `save_every` when the disk refuses; the run's other checkpoints are untouched then.
    """
    final = run.checkpoints / f"{state.step:06d}"
    draft = run.checkpoints / f".{final.name}"
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        adapters, model = _weight_files(draft)
        mx.save_safetensors(str(model if whole_model else adapters), weights, metadata={"format": "mlx"})
        mx.save_safetensors(str(draft / "optimizer.safetensors"), optimizer, metadata={"format": "mlx"})
        if reference is not None:
            mx.save_safetensors(str(draft / "reference.safetensors"), reference, metadata={"format": "mlx"})
        (draft / "state.json").write_text(json.dumps(asdict(state), indent=1) + "\n", encoding="utf-8")
        for file in draft.iterdir():
            _sync(file)
        _sync(draft)
        _replace_folder(draft, final)
        _sync(run.checkpoints)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise Mistake(
            "save_every", f"The checkpoint of step {state.step} cannot be written to {final}: {error}."
        ) from error
    _rotate(run, keep)
    return final


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace_folder(new: Path, final: Path) -> None:
    """Rename `new` to `final`; a folder that stands there goes only once the new one is in its place."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    new.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def all_checkpoints(run: RunFolder) -> list[Checkpoint]:
    """Every whole checkpoint, oldest first."""
    found = [one for one in map(_read, run.checkpoints.glob("[0-9]*")) if one is not None]
    return sorted(found, key=lambda one: one.state.step)


def newest(run: RunFolder) -> Checkpoint | None:
    found = all_checkpoints(run)
    return found[-1] if found else None


def _read(folder: Path) -> Checkpoint | None:
    """The checkpoint in a folder; None where a file of it is missing or its state is not one."""
    try:
        saved = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(saved, dict) or not (folder / "optimizer.safetensors").exists():
        return None
    if not any(file.exists() for file in _weight_files(folder)):
        return None
    known = {field.name for field in fields(TrainingState)}
    return Checkpoint(folder, TrainingState(**{key: value for key, value in saved.items() if key in known}))


def _rotate(run: RunFolder, keep: int) -> None:
    found = all_checkpoints(run)
    scored = [one for one in found if one.state.score is not None]
    # Between two evaluations a score is carried along: the checkpoint that was evaluated is the first that has it.
    best = max(scored, key=lambda one: (one.state.score, -one.state.step), default=None)
    for one in found[:-keep]:
        if one is not best:
            shutil.rmtree(one.path, ignore_errors=True)
    for leftover in run.checkpoints.glob(".[0-9]*"):  # of a process that was killed while it saved
        shutil.rmtree(leftover, ignore_errors=True)
