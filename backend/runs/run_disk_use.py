"""How much disk a run takes, from its settings and its model's shape, before it begins."""

from __future__ import annotations

from backend.config.config import Config
from backend.trainer.memory.model_shape import ModelShape
from backend.trainer.memory.phases import MemoryModel

RESERVE = 16 << 20
"""Bytes that are kept free for the event log, the completions and the log."""


def run_bytes(config: Config, shape: ModelShape) -> int:
    """About the bytes of a run's checkpoints, adapters and model, the most that there are at once; the event log and its completions apart.

    The newest `keep_checkpoints`, one that is being written beside them, and the best. A model at the end takes its size twice only where it
    replaces one, which a new run does not.
    """
    memory = MemoryModel(config, shape, prompt=1, gpu=False)
    trainable = memory.trainable()
    sizes = {allocation.name: allocation.bytes for allocation in memory.persistent()}
    checkpoint = (
        trainable
        + (0 if config.save_only_model else sizes.get("optimizer", 0))
        + (trainable if config.sync_ref_model else 0)
    )
    saves = -(-config.iters // config.save_every)
    checkpoints = min(saves, config.keep_checkpoints + 2) * checkpoint
    full = config.train_type == "full"
    writes_model = full or config.fuse
    return checkpoints + (0 if full else trainable) + (shape.weights if writes_model else 0)
