"""A run folder with checkpoints of noise, made without training."""

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from backend.config.config import Config, parse
from backend.models.policy import Policy, load_policy
from backend.runs.checkpoint import Snapshot, save
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import TrainingState
from tests.support import small_run


def make_run(folder: Path, models: Path, scores: tuple[float, ...] = (1.0,), **changes: Any) -> RunFolder:
    """A run in `folder` with a checkpoint for each of `scores`, at steps 8, 16, …; `models` takes model and rows."""
    raw = small_run.settings_for(models, **changes)
    run = RunFolder(folder)
    small_run.write_config(run.config, raw)
    for number, score in enumerate(scores, 1):
        policy = shaken_policy(parse(raw), seed=number)
        state, is_full = TrainingState(step=8 * number, score=score), raw.get("train_type") == "full"
        arrays = {"step": mx.array(8 * number)}
        save(run, Snapshot(state, policy.trainable(), arrays, None, None if is_full else {}), len(scores))
    return run


def shaken_policy(config: Config, seed: int) -> Policy:
    """The policy of these settings, with noise on everything that learns."""
    policy = load_policy(config.model_copy(update={"beta": 0.0}))
    mx.random.seed(seed)
    policy.set_parameters(tree_map(lambda x: x + 0.1 * mx.random.normal(x.shape), policy.parameters()))
    mx.eval(policy.arrays())
    return policy
