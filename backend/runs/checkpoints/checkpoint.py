"""Checkpoints of a run: weights, optimizer and training state, written completely or not at all, and rotated.

A checkpoint is a folder `checkpoints/000100/`. It is written as `.000100`, synced to disk and renamed (`whole_folder`), and loses its
name before its files when it is deleted, so a folder with a number for a name is complete. There is no random state to save: each random
number is a function of the seed and of its position in the run.

How a killed run continues. The trainer appends to two files, `events.jsonl` (the event log) and `completions.jsonl`, which at a
crash are ahead of the newest checkpoint: steps 101 … 107 are in them, the weights are those of step 100. `state.json` holds
the byte length of both files at the moment of the checkpoint. Resuming truncates each file to that length (`cut_back`), then
appends: steps 101 … are done again with the same prompts and the same random numbers, and every step is in the event log once.
So that the length always points at bytes that exist, the files are synced to disk before the checkpoint's folder is
renamed. Without any checkpoint the lengths are 0 and the run starts over. The `checkpoint` event itself is written after the
folder exists, beyond the recorded length, and is therefore written again after a resume. Readers that had read beyond
the new end notice that the last line they read is no longer where it was, and read again from the start
(`backend.runs.events.Follower`).
"""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import mlx.core as mx

from backend.models.saving import Arrays, HostArrays, save_arrays
from backend.runs.checkpoints.file_sums import file_sums
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.runs.run_format import RUN_FORMAT
from backend.runs.saved_weights import OPTIMIZER_FILE, best_of, has_optimizer, saved_weights
from backend.trainer.machine import gpu_error
from backend.utils.disk_faults import writing
from backend.utils.errors import UserError
from backend.utils.files import read_regular
from backend.utils.whole_file import clear_drafts, remove_folder, whole_folder


@dataclass(slots=True)
class TrainingState:
    """The state of a run between two steps beside its arrays. Saved as state.json, with these names as keys."""

    step: int = 0
    """Steps done."""
    updates: int = 0
    """Optimizer updates done (`num_iterations` of them a step)."""
    cursor: int = 0
    """Rows of the prompt stream consumed so far, including those that were skipped as too long."""
    stream_first: int = 0
    """The cursor at which the present stage's rows began, where earlier stages had others."""
    num_tokens: int = 0
    """Prompt and completion tokens so far."""
    began: float | None = None
    """When the run's first process began, in unix seconds, as its event log has it: a checkpoint of another run has another."""
    elapsed_s: float = 0.0
    """Seconds of training, loading and pauses not counted."""
    score: float | None = None
    """Held-out reward at the last evaluation, else mean training reward since the last checkpoint; of another metric with `best_metric`."""
    score_metric: str = ""
    """Which metric the score is; "" for the reward."""
    best_is_lowest: bool = False
    """Whether a lower score is a better one."""
    score_series: int = 0
    """Scores of one series are compared with one another; another begins where a stage has other rewards."""
    evaluated: int = -1
    """The step of the last evaluation."""
    best_score: float | None = None
    best_step: int = 0
    """The best score so far, and its step."""
    gain: float | None = None
    """The last score that counted as a gain for early stopping."""
    scores_without_gain: int = 0
    """Scores since then."""
    bonus: list[float | None] = field(default_factory=list)
    """State of the entropy bonus."""
    reward_weights: list[dict[str, Any]] = field(default_factory=list)
    """State of adaptive reward weights, one entry a stage."""
    gpu_errors_told: int = 0
    """How many lines of gpu_errors.jsonl have their note in the event log, as far as `events_bytes`."""
    events_bytes: int = 0
    completions_bytes: int = 0
    """Lengths of events.jsonl and completions.jsonl when this was saved: resuming truncates them to these."""


NEUTRAL = ("began", "score_metric", "best_is_lowest", "score_series", "stream_first")
"""Fields that a state of an earlier version lacks, and whose values at the beginning of a run are what it had."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    state: TrainingState
    filled_in: tuple[str, ...] = ()
    """Fields of the state that an earlier version has not written; they have the values of a run that begins."""

    @property
    def weights_file(self) -> Path:
        return next(file for file in _weight_files(self.path) if file.exists())

    def weights(self) -> Arrays:
        return _load(self.weights_file)

    @property
    def has_reference(self) -> bool:
        return (self.path / "reference.safetensors").exists()

    def reference(self) -> Arrays:
        """The reference policy's arrays, of a run whose reference moves (`sync_ref_model`)."""
        return _load(self.path / "reference.safetensors")

    @property
    def has_optimizer(self) -> bool:
        """Whether it was saved with the optimizer's state (not so with `save_only_model`)."""
        return (self.path / OPTIMIZER_FILE).exists()

    def optimizer(self) -> Arrays:
        return _load(self.path / OPTIMIZER_FILE)


def _weight_files(folder: Path) -> tuple[Path, Path]:
    return folder / "adapters.safetensors", folder / "model.safetensors"


def _load(path: Path) -> Arrays:
    try:
        arrays = mx.load(str(path))
    except RuntimeError as error:
        if gpu_error(error) is not None:
            raise
        raise UserError("checkpoint", f"{path} is damaged: {error}.") from error
    assert isinstance(arrays, dict)
    return arrays


def save(
    run: RunFolder,
    state: TrainingState,
    weights: Arrays | HostArrays,
    optimizer: Arrays | HostArrays | None,
    reference: Arrays | HostArrays | None = None,
    *,
    is_full_model: bool,
    keep: int,
) -> Path:
    """Write a checkpoint of `state`, and delete those that are neither among the newest `keep` nor the best.

    Raises DiskError when it cannot be written; the run's other checkpoints are untouched then.
    """
    final = run.checkpoints / f"{state.step:06d}"
    with writing(final):
        run.path.stat()  # a run's folder that is gone must not come back half
    with whole_folder(final) as draft:
        adapters, model = _weight_files(draft)
        save_arrays(model if is_full_model else adapters, weights)
        if optimizer is not None:
            save_arrays(draft / OPTIMIZER_FILE, optimizer)
        if reference is not None:
            save_arrays(draft / "reference.safetensors", reference)
        write_state(draft, state)
    # After the new checkpoint is on disk: until then the run can only be resumed from an older one.
    rotate(run, keep)
    return final


def write_state(folder: Path, state: TrainingState) -> None:
    """Write state.json beside a checkpoint's arrays, with their sums: by these damage is noticed, and whether it has an optimizer is known."""
    arrays = (file for file in folder.iterdir() if file.name != "state.json")
    content = {"v": RUN_FORMAT} | asdict(state) | {"files": file_sums(arrays)}
    (folder / "state.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def first_start(run: RunFolder) -> float | None:
    """When the run's first process began, in unix seconds, by its event log; None before."""
    return next((event.get("t") for event in read_events(run.events) if event.get("kind") == "started"), None)


def all_checkpoints(run: RunFolder) -> list[Checkpoint]:
    """Every complete checkpoint, oldest first."""
    checkpoints = [saved for saved in map(read_checkpoint, run.checkpoints.glob("[0-9]*")) if saved is not None]
    return sorted(checkpoints, key=lambda saved: saved.state.step)


def newest(run: RunFolder) -> Checkpoint | None:
    """The newest complete one, whether or not its files are as they were written (`backend.runs.checkpoints.checkpoint_integrity`)."""
    checkpoints = all_checkpoints(run)
    return checkpoints[-1] if checkpoints else None


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint in a folder; None where a file is missing or state.json is not a state."""
    try:
        saved = json.loads(read_regular(folder / "state.json"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(saved, dict) or (has_optimizer(saved) and not (folder / OPTIMIZER_FILE).exists()):
        return None
    if not any(file.exists() for file in _weight_files(folder)):
        return None
    state, filled_in = state_of(saved)
    return None if state is None else Checkpoint(folder, state, filled_in)


def state_of(saved: dict[str, Any]) -> tuple[TrainingState | None, tuple[str, ...]]:
    """The state in the object of a state.json, and the names of the fields that it lacks, from before they were recorded; None for one
    with a value of another type."""
    state = TrainingState()
    missing = tuple(field.name for field in fields(state) if field.name not in saved and field.name not in NEUTRAL)
    if "step" in missing:
        return None, missing
    for known in fields(state):
        if known.name not in saved:
            continue
        value = saved[known.name]
        if not _fits(value, known.type):
            return None, missing
        setattr(state, known.name, value)
    return state, missing


def _fits(value: Any, type_: Any) -> bool:
    """Whether a value of JSON has the type that a field of TrainingState is annotated with."""
    if value is None:
        return type_.endswith("| None")
    if type_ in ("str", "bool"):
        return isinstance(value, str if type_ == "str" else bool)
    if type_.startswith("list"):
        items = (int, float, type(None)) if "float" in type_ else dict
        return isinstance(value, list) and all(isinstance(item, items) for item in value)
    return isinstance(value, int if type_ == "int" else (int, float)) and not isinstance(value, bool)


def rotate(run: RunFolder, keep: int) -> None:
    """Delete all but the newest `keep` and the best."""
    checkpoints = saved_weights(run)
    best = best_of(checkpoints)
    for saved in checkpoints[:-keep]:
        if saved != best:
            remove_folder(saved.path)
    clear_leftovers(run)


def clear_leftovers(run: RunFolder) -> None:
    """Delete what a process left that was killed while it saved, or deleted a checkpoint. What cannot be deleted does no harm."""
    for folder in (run.path, run.adapters):
        with contextlib.suppress(OSError):
            clear_drafts(folder)
    for leftover in run.checkpoints.glob(".[0-9]*"):
        shutil.rmtree(leftover, ignore_errors=True)
