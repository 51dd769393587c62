"""When a run evaluates and saves, by the number of the step. Does neither."""

from __future__ import annotations

from backend.run.checkpoints.checkpoint import TrainingState
from backend.spec.config import Config


def evaluation_is_due(config: Config, step: int, steps: int) -> bool:
    """Whether held-out prompts are answered after `step`, of a run of `steps` that has such prompts."""
    is_turn = step % config.steps_per_eval == 0 and (step == 0 or step >= config.eval_delay)
    return is_turn or step == steps


def is_best_worth_saving(config: Config, state: TrainingState, step: int) -> bool:
    """Whether the weights of `step` are the best so far and asked for by name: early stopping names them, and a run may end with them."""
    wants_best = config.early_stopping_patience > 0 or config.load_best_at_end
    return wants_best and state.best_step == step
