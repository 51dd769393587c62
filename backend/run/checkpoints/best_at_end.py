"""The end of a run with its best checkpoint: what it leaves is of that step, and its checkpoints stay as they are.

A run that goes on later goes on from its newest checkpoint all the same.
"""

from __future__ import annotations

from collections.abc import Callable

from backend.models.policy import Policy
from backend.models.saving import adapter_config
from backend.run.checkpoints.checkpoint import TrainingState, read_checkpoint
from backend.run.checkpoints.checkpoint_writer import publish_adapters
from backend.spec.config import Config
from backend.spec.run_folder import RunFolder
from backend.spec.runs.saved_weights import best_of, saved_weights


def load_best(
    run: RunFolder, policy: Policy, config: Config, state: TrainingState, note: Callable[[str], None]
) -> int | None:
    """Give the policy, and `adapters/`, the weights of the best checkpoint. → its step; None where that is the last, or none has a score.
    `note` takes the sentence for the diary. Raises DiskFault, and Mistake for a damaged checkpoint."""
    best = best_of(saved_weights(run))
    saved = read_checkpoint(best.path) if best is not None else None
    if best is None or saved is None:
        note("No checkpoint of this run has a score, so it ends with the weights of its last step.")
        return None
    metric, score = best.metric or "reward", f"{best.score:.4g}"
    if best.step == state.step:
        note(f"The last step is the best, with {metric} {score}: the run ends with its weights.")
        return None
    policy.assign(saved.weights())
    if config.train_type != "full":
        publish_adapters(run, saved.weights_file, adapter_config(policy, config))
    before = ""
    if state.best_step == 0 and state.best_score is not None:
        before = f" The model before training had {state.best_score:.4g}."
    note(f"The run ends with the weights of step {best.step}, its best checkpoint, with {metric} {score}.{before}")
    return best.step
