"""Which settings may have other values from a step of a run on: by a change while it trains or when it is resumed, or in one of
its stages."""

from __future__ import annotations

from backend.config.row_settings import DATASET_KEYS

STEERABLE: tuple[str, ...] = (
    "iters",
    "learning_rate",
    "lr_final",
    "max_grad_norm",
    "beta",
    "epsilon",
    "epsilon_high",
    "delta",
    "entropy_coef",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "reward_weights",
    "reward_weights_final",
    "scale_rewards",
    "mask_truncated_completions",
    "dynamic_sampling",
    "save_every",
    "steps_per_eval",
    "stop_when",
    "early_stopping_patience",
    "early_stopping_min_delta",
)
"""Keys of the settings that may change during a run, in the order in which they are offered. The others decide the shape of the model,
the rows, or how much memory a step takes: they are fixed once the model is loaded, and a clone of the run changes them."""

AT_RESUME = ("hosts", "distributed_backend", "on_lost_rank", "parallelism")
"""Keys of the settings that a resumed run may have others of, and a run that trains may not: where it runs, and nothing that it learns."""

STAGE_OWN = ("iters", "reward_functions", "reward_weights")
"""Keys of a stage that are its own: its length, and how it is scored (`backend.trainer.scoring`)."""
STAGE_SETTINGS = (
    *(key for key in STEERABLE if key not in (*STAGE_OWN, "reward_weights_final")),
    *("batch_size", "group_size", "max_completion_length"),
)
"""Settings that a stage may have of its own: those that may change during a run, and those that decide the memory of a step, since the
stages are known when memory is planned."""
STAGE_DATA = tuple(key for key in DATASET_KEYS if key not in ("valid_split", "test_split"))
"""Settings of a stage's training rows. Held-out rows are the run's own in every stage, so that evaluations can be compared."""
STAGE_KEYS = (*STAGE_OWN, *STAGE_SETTINGS, *STAGE_DATA)
