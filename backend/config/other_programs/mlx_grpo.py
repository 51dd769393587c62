"""The keys of mlx-grpo: the arguments that its README lists, and the fields of its TrainingArgs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from backend.config.other_programs.keys import (
    OtherProgram,
    Translator,
    as_number,
    converted,
    ignored,
    refused,
    renamed,
    same,
    switch,
)
from backend.utils.text import quote

CONTENT_REWARDS = ("jaccard", "math_eval", "choice_correctness")
"""Values of its `reward_content_type`; our reward functions have the same names."""
FORMAT_REWARD = "r1_soft_format_reward_func"

_README = {
    **ignored("a run has a folder of its own; --runs-dir and --name choose it", "output_dir"),
    **renamed(model_path="model", train_dataset_path="data", val_dataset_path="valid_data", num_training_steps="iters"),
    **converted(dataset_name="data"),
    **same("dataset_config"),
    **converted(
        reward_content_type="reward_functions reward_weights",
        reward_format_weight="reward_functions reward_weights",
        reward_content_weight="reward_functions reward_weights",
    ),
}
_FIELDS = {
    **renamed(
        ref_model_path="reference_model_path",
        dataset_train_split="train_split",
        dataset_val_split="valid_split",
        dataset_prompt_key="prompt_feature",
        dataset_answer_key="answer_feature",
        max_gen_len="max_completion_length",
        grad_clip_norm="max_grad_norm",
        optimizer_beta1="adam_beta1",
        optimizer_beta2="adam_beta2",
        optimizer_weight_decay="weight_decay",
        num_rollout_samples="group_size",
        ppo_batch_size="batch_size",
        sampling_temperature="temperature",
        sampling_top_p="top_p",
        sampling_min_p="min_p",
        grpo_beta="beta",
        eval_every="steps_per_eval",
        grad_accum_steps="gradient_accumulation_steps",
        use_grad_checkpointing="grad_checkpoint",
        wandb_project="tracker_project",
        wandb_run_name="tracker_run_name",
    ),
    **same("system_prompt learning_rate seed save_every"),
    **converted(
        max_prompt_len="max_prompt_length long_prompts",
        lr_schedule_config="lr_schedule learning_rate lr_final lr_warmup_steps",
    ),
    **switch("use_wandb", "report_to"),
    **refused(
        "To continue a run: python -m backend resume RUN; for a new run from its weights: adapter: RUN@step.",
        "resume_from_checkpoint",
    ),
    **refused(
        "The shipped format rewards read <think> and <answer>; a function of your own may read other tags.",
        "think_start_tag think_end_tag answer_start_tag answer_end_tag",
        ("<think>", "</think>", "<thinking>", "</thinking>", "<answer>", "</answer>"),
    ),
    **refused("Prompts are always shuffled, by data_seed.", "shuffle_data", (True,)),
    **ignored(
        "there is no draft model yet; completions are the same without one, only slower",
        "use_speculative_decoding draft_model_path num_draft_tokens",
    ),
    **ignored(
        "caches keep the model's precision and grow to what the prompts need",
        "max_kv_size kv_bits kv_group_size quantized_kv_start",
    ),
    **ignored("the vocabulary stays as the model has it", "init_new_embeddings_with_mean"),
    **ignored("groups with equal rewards are skipped, so nothing is divided by 0", "advantage_epsilon"),
    **ignored("every layer is recomputed, or none", "grad_checkpoint_layers"),
    **ignored("log.txt in the run folder holds all of it", "verbose"),
    **ignored("the tracker's own variables of the environment set this", "wandb_entity"),
}
_DEFAULTS: dict[str, Any] = {
    "learning_rate": 3e-5,
    "num_training_steps": 500,
    "ppo_batch_size": 2,
    "num_rollout_samples": 2,
    "max_gen_len": 50,
    "grpo_beta": 0.15,
    "sampling_top_p": 1.0,
    "top_k": 0,
    "seed": 42,
    "grad_clip_norm": 0.9,
    "optimizer_beta2": 0.95,
    "reward_content_type": "jaccard",
    "save_every": 2,
    "eval_every": 10,
    "dataset_answer_key": "completion",
    "dataset_val_split": "test",
    "max_prompt_len": 100,
    "train_type": "full",
}
"""Of its TrainingArgs, where they differ from ours; it trains every weight."""


def _rewards(to: Translator) -> None:
    if not to.has("reward_content_type", "reward_format_weight", "reward_content_weight"):
        return
    kind = str(to.take("reward_content_type") or "jaccard").strip().lower()
    weights = [to.number("reward_format_weight"), to.number("reward_content_weight")]
    if kind not in CONTENT_REWARDS:
        sentence = f"reward_content_type cannot be {quote(kind, 40)}; it is one of {', '.join(CONTENT_REWARDS)}."
        to.refuse("reward_content_type", sentence)
        return
    to.fill("reward_functions", [FORMAT_REWARD, kind], "reward_content_type")
    to.fill("reward_weights", [0.5 if weight is None else weight for weight in weights], "reward_format_weight")


def _data_and_schedule(to: Translator) -> None:
    if to.has("train_dataset_path") and to.has("dataset_name"):
        to.take("dataset_name")
        to.remarks["dataset_name"] = "train_dataset_path is given, which comes first"
    if to.program == "mlx_grpo" and to.has("max_prompt_len"):
        to.values.setdefault("long_prompts", "cut_left")
    if isinstance(mapping := to.values.get("lr_schedule_config"), Mapping) and not to.has("lr_schedule"):
        to.values["lr_schedule"] = dict(cast("Mapping[str, Any]", to.take("lr_schedule_config")))
    elif mapping is not None:
        sentence = "lr_schedule_config must be a mapping, as mlx-lm's lr_schedule, and stand alone."
        to.refuse("lr_schedule_config", sentence)
    if as_number(to.values.get("grad_clip_norm"), 1.0) < 0:
        to.values["grad_clip_norm"] = 0
    if to.flag("use_wandb"):
        to.values.setdefault("report_to", ["wandb"])


MLX_GRPO = OtherProgram(
    key="mlx_grpo",
    name="mlx-grpo",
    source="document 002, and mlx_grpo_trainer_aligned.py of the repository that it describes",
    sections={"Arguments that its README lists": _README, "Fields of its TrainingArgs": _FIELDS},
    regroups=(_rewards, _data_and_schedule),
    defaults=lambda raw: _DEFAULTS,
)
