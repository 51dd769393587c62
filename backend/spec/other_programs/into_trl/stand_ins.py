"""Settings that are no argument of TRL: those that the exported folder's own files carry, those that nothing stands for, and those
without meaning on another machine.

Together with the words (`exported.WORDS_OF`) they are all settings; a test holds them to that.
"""

from __future__ import annotations

_ROWS = "dataset.py makes the rows with it"
_REWARDS = "rewards.py"

BY_FILES: dict[str, str] = {
    **dict.fromkeys(
        ("prompt_feature", "answer_feature", "type_feature", "system_feature", "system_prompt", "prompt_template", "answer_pattern",
         "map_function", "valid_data", "test_data", "eval_data", "validation_split"),
        _ROWS,
    ),
    "train_split": _ROWS, "valid_split": _ROWS, "test_split": _ROWS, "dataset_config": _ROWS, "streaming": _ROWS,
    "data_seed": "train.py takes prompts in the order that this seed gives here; trl grpo alone shuffles by seed",
    "reward_functions": f"{_REWARDS} has one function for each",
    "reward_functions_file": f"a copy lies in user_code/, and {_REWARDS} loads it",
    "max_seq_length": "train.py leaves out prompts with no room for a completion; vLLM gets it as its longest sequence",
    "max_prompt_length": "train.py applies it",
    "long_prompts": "train.py applies it",
    "num_layers": "train.py puts adapters on the last layers only; trl grpo alone on all",
    "tokenizer": "train.py loads it",
    "val_batches": "train.py evaluates on so many prompts; trl grpo alone on all",
    "test": "train.py answers the test prompts at the end",
    "test_batches": "train.py takes so many test prompts",
    "early_stopping_patience": "train.py adds transformers' EarlyStoppingCallback",
    "early_stopping_min_delta": "train.py adds transformers' EarlyStoppingCallback",
}  # fmt: skip
"""Setting → which file of the folder carries it, where TRL has no argument for it or `trl grpo` alone would not do it."""

AS_TRL_DOES = {"num_layers": -1, "val_batches": -1}
"""Settings whose default is not what TRL does by itself → the value that is."""

NOTHING_STANDS_IN: dict[str, str] = {
    "adapter": "the run begins with new adapters; to go on from these, export their run with --format original and name that folder as the model",
    "reference_model_path": "the reference is the model itself as it was before training",
    "log_kl": "TRL computes no KL without a KL weight",
    "kl_estimator": "TRL has Schulman's k3",
    "ratio_against": "the ratio is against the policy that sampled",
    "advantage_baseline": "TRL's GRPO takes the mean of the group; its RLOOTrainer leaves one out",
    "dynamic_sampling": "TRL takes every group as it comes",
    "dynamic_sampling_rounds": "TRL takes every group as it comes",
    "reward_weight_schedule": "the weights stay as they begin",
    "reward_weights_final": "the weights stay as they begin",
    "stages": "the settings outside of the stages hold for the whole run, whose length is iters",
    "own_optimizer": "AdamW; an object of a program is in no file",
    "own_schedule": "the learning rate as it is set; an object of a program is in no file",
    "stop_when": "the run goes on to its end",
    "reward_timeout": "TRL waits for a reward function as long as it takes",
}
"""Setting → what happens in its place, a sentence for the list."""

NO_MEANING_THERE: dict[str, str] = {
    "train_mode": "TRL's GRPOTrainer is GRPO",
    "mask_prompt": "TRL never trains on the prompt",
    "skip_zero_signal": "it saves time and changes no gradient",
    "reward_isolation": "TRL calls reward functions in the trainer's own process",
    "reward_network": "nothing keeps reward functions from the network there",
    "record_tokens": "TRL logs texts, not tokens",
    "lm_studio_name": "LM Studio is on this machine",
    "fuse": "the adapter is saved by itself; PEFT's merge_and_unload folds it in",
    "memory_limit": "memory is PyTorch's there; lower per_device_train_batch_size and raise gradient_accumulation_steps",
    "retry_on_gpu_error": "it is for GPU errors of MLX",
    "relax_gpu_timeout": "it is for macOS",
    "efficient_long_context": "TRL computes log-probabilities in pieces by itself",
    "seq_step_size": "TRL computes log-probabilities in pieces by itself",
    **dict.fromkeys(("hosts", "distributed_backend", "on_lost_rank", "parallelism"), "accelerate starts the processes there"),
}  # fmt: skip
"""Setting → why it has none. Listed where it is not at its default."""
