"""The words of mlx-lm-lora 5.10, of the window that drives it (MLX LoRA Studio), and of mlx-lm 0.32, whose keys it took over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backend.config.other_programs import mlx_lm_groups
from backend.config.other_programs.words import OtherProgram, Translated, Word, renamed, same, without_effect

_QAT = "quantisation-aware training does not apply to GRPO"
_JUDGE = "GRPO asks reward functions, and no judge"
_OTHER_LOSS = "it belongs to another way of training"
_OTHER_COLUMN = "GRPO reads prompt, answer, type and system"
_BATCHES = "Counted in batches there, in steps here: divided by gradient_accumulation_steps."

_SHARED: dict[str, Word] = {
    **same(
        "model",
        "data",
        "train_type",
        "train_mode",
        "optimizer",
        "num_layers",
        "batch_size",
        "epochs",
        "seed",
        "learning_rate",
    ),
    **same(
        "max_seq_length",
        "val_batches",
        "test",
        "test_batches",
        "grad_checkpoint",
        "efficient_long_context",
        "seq_step_size",
    ),
    **same(
        "mask_prompt", "fuse", "lm_studio_name", "beta", "reference_model_path", "group_size", "max_completion_length"
    ),
    **same(
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "epsilon",
        "epsilon_high",
        "grpo_loss_type",
        "importance_sampling_level",
    ),
    **same("reward_functions", "reward_weights", "reward_functions_file"),
    **same("prompt_feature", "answer_feature", "type_feature", "system_feature"),
}
_RENAMED: dict[str, Word] = {
    **renamed(fine_tune_type="train_type", resume_adapter_file="adapter", lora_layers="num_layers"),
    "gradient_accumulation_steps": Translated(
        ("gradient_accumulation_steps",), "There an iteration is one batch, and every k-th updates; a step here is k batches and an update."
    ),
    "grad_accumulation_steps": Translated(("gradient_accumulation_steps",), "mlx-lm's name of gradient_accumulation_steps."),
    "iters": Translated(("iters",), _BATCHES + " It comes before epochs there, and so in a file for mlx-lm-lora."),
    **{word: Translated((word,), _BATCHES) for word in ("steps_per_report", "steps_per_eval", "save_every")},
    "lora_parameters": Translated(("rank", "scale", "dropout", "lora_keys", "lora_alpha"), "rank, scale, dropout, keys and alpha in it."),
    "optimizer_config": Translated(
        ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"), "The mapping of the optimizer in use; others are passed over."
    ),
    "lr_schedule": Translated(
        ("lr_schedule", "learning_rate", "lr_final", "lr_decay_fraction", "lr_warmup_steps", "lr_warmup_init", "lr_cycles"),
        "A mapping with name and arguments; its first argument is the learning rate, and what it leaves out is 0, as there.",
    ),
    **dict.fromkeys(("load_in_4bits", "load_in_6bits", "load_in_8bits", "load_in_mxfp4"), Translated(("quantization",), is_switch=True)),
    "hf_dataset": Translated(
        ("data", "dataset_config", "train_split", "valid_split", "test_split", "prompt_feature", "answer_feature"),
        "One dataset: its path, config name, splits and columns.",
    ),
    **dict.fromkeys(("wandb", "wand"), Translated(("report_to", "tracker_project"), "Its project, reported to with wandb.")),
    **renamed(project_name="tracker_project"),
    "report_to": Translated(("report_to",), "mlx-lm's: wandb, or several with commas; other trackers than ours are refused."),
}  # fmt: skip
_NOTHING: dict[str, Word] = {
    **without_effect("every run here trains", "train"),
    **without_effect("the file is read already", "config"),
    **without_effect("text models are what is trained here", "model_family"),
    **without_effect("adapters are written into the run folder", "adapter_path"),
    **without_effect("long texts are read in pieces of the sequence step size", "recurrence_chunk_size"),
    **without_effect("memory_limit cuts a step up to fit", "micro_batch_size", "clear_cache_threshold"),
    **without_effect("what is fused keeps the model's own precision", "fuse_dequantize"),
    **without_effect("adapters are kept beside the fused model", "fuse_remove_adapters"),
    **without_effect("the tokenizer's chat template is always applied to prompts", "use_chat_template", "use_prompt"),
    **without_effect("completions end at the model's own end token and at stop", "end_answer_token"),
    **without_effect("python -m backend rewards list lists them", "list_reward_functions"),
    **without_effect("the code of models is mlx-lm's; none from a model's repository is run", "trust_remote_code"),
    **without_effect(_QAT, "qat_enable", "qat_bits", "qat_group_size", "qat_mode", "qat_start_step", "qat_interval"),
    **without_effect(_JUDGE, "judge", "judge_config", "judge_system", "alpha"),
    **without_effect(_OTHER_LOSS, "sft_loss_type", "dpo_cpo_loss_type", "reward_scaling", "dsla_loss", "latent_weight", "latent_margin",
                     "latent_gamma", "latent_variant", "latent_pooling", "latent_layer", "klpo_route", "klpo_kl_estimator",
                     "klpo_mc_samples", "klpo_top_k", "klpo_tail_floor", "lambda_mse_target", "tau_mse_target", "lambda_mse",
                     "clip_epsilon_logits"),
    "delta": Translated(("delta",), "Beside dpo_cpo_loss_type it is DPO's, and without effect."),
    **without_effect(_OTHER_COLUMN, "completion_feature", "chosen_feature", "rejected_feature", "chat_feature", "text_feature",
                     "preference_score_feature"),
}  # fmt: skip
_SECTIONS = {"Settings": _SHARED | _RENAMED, "Accepted for its other trainings and its window": _NOTHING}
_DEFAULTS: dict[str, Any] = {
    "num_layers": -1, "optimizer": "adam", "lora_parameters": {"rank": 8, "dropout": 0.0, "scale": 10.0}, "test_batches": 500,
}  # fmt: skip
"""Of mlx-lm-lora 5.10's CONFIG_DEFAULTS, where they are not ours."""


def _defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    has_length = raw.get("iters") is not None or raw.get("epochs") is not None
    return _DEFAULTS | ({} if has_length else {"iters": 100})


MLX_LM_LORA = OtherProgram(
    key="mlx_lm_lora",
    name="mlx-lm-lora",
    source="mlx-lm-lora 5.10.2, its example files, and mlx-lm 0.32",
    words={name: word for section in _SECTIONS.values() for name, word in section.items()},
    regroups=(
        mlx_lm_groups.other_delta, mlx_lm_groups.hugging_face_dataset, mlx_lm_groups.lora_parameters, mlx_lm_groups.quantization_flags,
        mlx_lm_groups.optimizer_config, mlx_lm_groups.wandb, mlx_lm_groups.accumulation, mlx_lm_groups.lr_schedule,
    ),
    defaults=_defaults,
    sections={title: tuple(section) for title, section in _SECTIONS.items()},
)  # fmt: skip
