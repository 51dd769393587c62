"""What can be chosen of a run's weights: its end, its best checkpoint, each checkpoint. Names and sizes, for a menu and a command line.

Which checkpoints are complete, and which is the best, is `backend.runs.saved_weights`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from backend.runs.events import step_of_end
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import WEIGHT_FILES, SavedWeights, best_of, saved_weights
from backend.utils.errors import UserError

END, BEST = "end", "best"


@dataclass(frozen=True, slots=True)
class WeightChoice:
    """Weights of one step. `key` selects them (end, best, or the step's number); `path` is a file of trained arrays, or the folder of a
    whole model; `step` is None where only what a run leaves beside its checkpoints is there."""

    key: str
    path: Path
    step: int | None = None

    @property
    def label(self) -> str:
        """“End, step 32”, “Best, step 24”, “Step 16”."""
        named = {END: "End", BEST: "Best"}.get(self.key)
        if self.step is None:
            return named or self.key
        return f"{named}, step {self.step}" if named else f"Step {self.step}"

    @property
    def bytes(self) -> int:
        """Size of the weights on disk; 0 where they are gone."""
        files = self.path.glob("model*.safetensors") if self.path.is_dir() else [self.path]
        return sum(file.stat().st_size for file in files if file.exists())


def choices(run: RunFolder) -> list[WeightChoice]:
    """Everything that can be chosen: the end, the best checkpoint, then every checkpoint, newest first. Empty where nothing is saved."""
    saved = saved_weights(run)
    best = best_of(saved)
    named = [_end(run, saved), replace(_of(best), key=BEST) if best is not None else None]
    return [*(choice for choice in named if choice is not None), *map(_of, reversed(saved))]


def find_choice(run: RunFolder, key: str = END) -> WeightChoice:
    """The weights that `key` selects: end (also last), best, or the number of a step. Raises UserError naming what there is."""
    offered = choices(run)
    if not offered:
        raise UserError("run", f"The run {run.name} has no trained weights yet.")
    wanted = {"last": END}.get(key.strip().lower(), key.strip().lower().lstrip("0") or "0")
    found = next((choice for choice in offered if choice.key == wanted), None)
    if found is None:
        keys = ", ".join(choice.key for choice in offered)
        raise UserError("checkpoint", f"The run {run.name} has no checkpoint {key}; choose one of {keys}.")
    return found


def _of(saved: SavedWeights) -> WeightChoice:
    return WeightChoice(str(saved.step), saved.arrays, saved.step)


def _end(run: RunFolder, saved: list[SavedWeights]) -> WeightChoice | None:
    """The checkpoint that the run has left as its end, the newest as a rule; where a person has deleted it, what the run has left beside
    its checkpoints."""
    left = step_of_end(run)
    if found := [each for each in saved if left in (None, each.step)]:
        return replace(_of(found[-1]), key=END)
    adapters = run.adapters / WEIGHT_FILES[0]
    if adapters.is_file():
        return WeightChoice(END, adapters)
    return WeightChoice(END, run.model) if (run.model / "config.json").is_file() else None
