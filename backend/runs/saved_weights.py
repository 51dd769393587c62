"""The weights that a run folder holds: those of its end, and its checkpoints with their step and score.

Reads state.json of each checkpoint; opens no arrays (`backend.runs.checkpoints.checkpoint` does).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from backend.runs.events import is_number, is_step
from backend.runs.run_folder import RunFolder
from backend.utils.documents import read_json
from backend.utils.errors import UserError

WEIGHT_FILES = ("adapters.safetensors", "model.safetensors")
"""A checkpoint's trained arrays: those of adapters, or of full fine-tuning."""
OPTIMIZER_FILE = "optimizer.safetensors"


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """A complete checkpoint. `score` is the run's held-out reward at that step, else the mean training reward before it, or another metric
    that the settings name; None where it is not known."""

    path: Path
    step: int
    score: float | None
    metric: str = ""
    """Which metric the score is; "" for the reward."""
    is_lowest_best: bool = False
    series: int = 0
    """Scores of different series are of different rewards, and not compared."""

    @property
    def arrays(self) -> Path:
        """The file of trained arrays."""
        return next(file for name in WEIGHT_FILES if (file := self.path / name).exists())


def saved_weights(run: RunFolder) -> list[SavedWeights]:
    """Every complete checkpoint, oldest first."""
    found = [saved for folder in run.checkpoints.glob("[0-9]*") if (saved := _read(folder)) is not None]
    return sorted(found, key=lambda saved: saved.step)


def _read(folder: Path) -> SavedWeights | None:
    try:
        state = read_json(folder / "state.json", "checkpoint")
    except UserError:
        return None
    has_arrays = any((folder / name).exists() for name in WEIGHT_FILES)
    if not has_arrays or not isinstance(state, dict):
        return None
    state = cast("dict[str, Any]", state)
    if not (folder / OPTIMIZER_FILE).exists() and has_optimizer(state):
        return None
    step, score = state.get("step", 0), state.get("score")
    if not is_step(step):
        return None
    metric, series = str(state.get("score_metric", "")), state.get("score_series", 0)
    known = float(score) if is_number(score) else None
    return SavedWeights(
        folder, step, known, metric, state.get("best_is_lowest") is True, series if is_step(series) else 0
    )


def has_optimizer(state: Mapping[str, Any]) -> bool:
    """Whether a checkpoint with this state.json was written with the optimizer's arrays (not so with `save_only_model`)."""
    files = state.get("files")  # absent in the checkpoints of earlier versions, which always wrote them
    return not isinstance(files, dict) or OPTIMIZER_FILE in files


def best_of(checkpoints: Iterable[SavedWeights]) -> SavedWeights | None:
    """The one with the best score of the newest series of scores; None where none has one.

    The score of an evaluation is repeated until the next one: the checkpoint that was evaluated is the first that has it.
    """
    scored = [(saved, saved.score) for saved in checkpoints if saved.score is not None]
    newest = max((saved.series for saved, _ in scored), default=0)
    of_series = [
        (-score if saved.is_lowest_best else score, -saved.step, saved)
        for saved, score in scored
        if saved.series == newest
    ]
    return max(of_series, key=lambda entry: entry[:2])[2] if of_series else None


def find_checkpoint(run: RunFolder, which: str) -> SavedWeights:
    """The checkpoint that `which` names: "best", "last" or a step. Raises UserError, with the steps that there are."""
    checkpoints = saved_weights(run)
    if not checkpoints:
        raise UserError("checkpoint", f"The run {run.name} has no checkpoint.")
    if which == "last":
        return checkpoints[-1]
    if which == "best":
        if (best := best_of(checkpoints)) is None:
            raise UserError("checkpoint", f"No checkpoint of the run {run.name} has a score; name a step, or last.")
        return best
    found = next((saved for saved in checkpoints if str(saved.step) == (which.strip().lstrip("0") or "0")), None)
    if found is None:
        steps = ", ".join(str(saved.step) for saved in checkpoints)
        raise UserError(
            "checkpoint", f"The run {run.name} has no checkpoint {which}; there are {steps}, best and last."
        )
    return found


def has_end(run: RunFolder) -> bool:
    """Whether the run has weights to export without naming a checkpoint: adapters, or the model of full fine-tuning."""
    adapters = all((run.adapters / name).is_file() for name in ("adapters.safetensors", "adapter_config.json"))
    return adapters or (run.model / "config.json").is_file()
