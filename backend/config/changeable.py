"""Which settings may have other values from a step of a run on: by a change, at a resume, or in a stage."""

from __future__ import annotations

STEERABLE: tuple[str, ...] = (
    *("iters", "learning_rate", "lr_final", "max_grad_norm", "beta", "epsilon", "epsilon_high", "delta"),
    *("entropy_coef", "temperature", "top_p", "top_k", "min_p", "reward_weights", "reward_weights_final"),
    *("scale_rewards", "mask_truncated_completions", "dynamic_sampling", "save_every", "steps_per_eval"),
    *("stop_when", "early_stopping_patience", "early_stopping_min_delta"),
)
"""Settings that may change during a run, in the order of the offer; the others decide model, rows or memory."""

AT_RESUME = ("hosts", "distributed_backend", "on_lost_rank", "parallelism")
"""Settings that may also change when a run is resumed: where it runs, not what it learns."""

DATASET_KEYS = (
    *("data", "dataset_config", "train_split", "valid_split", "test_split"),
    *("prompt_feature", "answer_feature", "type_feature", "system_feature"),
    *("system_prompt", "prompt_template", "answer_pattern", "map_function"),
)
"""Settings that say which rows a dataset has and how they become prompts: an evaluation set may have its own."""

STAGE_OWN = ("iters", "reward_functions", "reward_weights")
"""Keys of a stage that are its own: its length, and its scoring (`backend.trainer.scoring_stages`)."""
STAGE_SETTINGS = (
    *(key for key in STEERABLE if key not in (*STAGE_OWN, "reward_weights_final")),
    *("batch_size", "group_size", "max_completion_length"),
)
"""Settings that a stage may have; memory is planned with all stages known, so they include those that decide it."""
STAGE_DATA = tuple(key for key in DATASET_KEYS if key not in ("valid_split", "test_split"))
"""Settings of a stage's training rows. Held-out rows are the run's own, so that evaluations can be compared."""
STAGE_KEYS = (*STAGE_OWN, *STAGE_SETTINGS, *STAGE_DATA)
