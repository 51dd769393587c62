"""The weights that a run has on disk: those of its end, of its best checkpoint, of each checkpoint.

Reads names, sizes and state.json; opens no weights. What is in a checkpoint is `backend.run.checkpoint`'s.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from backend.spec.faults import Mistake
from backend.spec.places import RunFolder

END, BEST = "end", "best"
WEIGHT_FILES = ("adapters.safetensors", "model.safetensors")


@dataclass(frozen=True, slots=True)
class RunWeights:
    """Weights of one step. `key` selects them (end, best, or the step's number); `path` is a file of a checkpoint or of adapters/, or
    the folder of a whole model; `score` is the held-out reward (without evaluations the training reward) at that step."""

    key: str
    path: Path
    step: int | None = None
    score: float | None = None

    @property
    def label(self) -> str:
        """“End, step 32”, “Best, step 24”, “Step 16”."""
        named = {END: "End", BEST: "Best"}.get(self.key)
        if self.step is None:
            return named or self.key
        return f"{named}, step {self.step}" if named else f"Step {self.step}"

    @property
    def bytes(self) -> int:
        """Size of the weights on disk."""
        files = self.path.glob("model*.safetensors") if self.path.is_dir() else [self.path]
        return sum(file.stat().st_size for file in files)


def saved_weights(run: RunFolder) -> list[RunWeights]:
    """The weights of every complete checkpoint, oldest first."""
    found = (_of_checkpoint(folder) for folder in run.checkpoints.glob("[0-9]*"))
    return sorted((weights for weights in found if weights is not None), key=lambda weights: weights.step or 0)


def choices(run: RunFolder) -> list[RunWeights]:
    """What can be chosen of a run: its end, its best checkpoint, then every checkpoint, newest first. Empty where nothing is saved."""
    saved = saved_weights(run)
    named = [weights for weights in (_end(run, saved), _best(saved)) if weights is not None]
    return [*named, *reversed(saved)]


def find_weights(run: RunFolder, key: str = END) -> RunWeights:
    """The weights that `key` selects: end (also last), best, or the number of a step. Raises Mistake naming what there is."""
    offered = choices(run)
    if not offered:
        raise Mistake("run", f"The run {run.name} has no trained weights yet.")
    wanted = {"last": END}.get(key.strip().lower(), key.strip().lower().lstrip("0") or "0")
    found = next((weights for weights in offered if weights.key == wanted), None)
    if found is None:
        keys = ", ".join(weights.key for weights in offered)
        raise Mistake("checkpoint", f"The run {run.name} has no checkpoint {key}; choose one of {keys}.")
    return found


def _end(run: RunFolder, saved: list[RunWeights]) -> RunWeights | None:
    """The newest checkpoint; where a person has deleted the checkpoints, what the run has left beside them."""
    if saved:
        return replace(saved[-1], key=END)
    adapters = run.adapters / WEIGHT_FILES[0]
    if adapters.is_file():
        return RunWeights(END, adapters)
    return RunWeights(END, run.model) if (run.model / "config.json").is_file() else None


def _best(saved: list[RunWeights]) -> RunWeights | None:
    # The score of an evaluation is repeated until the next one: the checkpoint that was evaluated is the first that has it.
    scored = [weights for weights in saved if weights.score is not None]
    best = max(scored, key=lambda weights: (weights.score or 0.0, -(weights.step or 0)), default=None)
    return None if best is None else replace(best, key=BEST)


def _of_checkpoint(folder: Path) -> RunWeights | None:
    """The weights in a checkpoint's folder; None where it is not complete."""
    file = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    state = _state(folder / "state.json")
    step, score = state.get("step"), state.get("score")
    if file is None or not isinstance(step, int):
        return None
    return RunWeights(str(step), file, step, float(score) if isinstance(score, int | float) else None)


def _state(file: Path) -> dict[str, Any]:
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", state) if isinstance(state, dict) else {}
