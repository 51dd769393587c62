"""TRL's words that come from transformers' TrainingArguments: those of document 003 (transformers 4.49) and of transformers 5.23."""

from __future__ import annotations

from backend.config.other_programs.words import Translated, Word, refused, renamed, same, without_effect

_COMPLETIONS = (
    "TRL counts completions and GRPO Studio prompts: divided by num_generations; refused where that leaves a rest."
)
_UPDATES = "TRL counts updates of the weights and GRPO Studio steps: divided by the updates of a step; a share of the run becomes steps."

LENGTH: dict[str, Word] = {
    **dict.fromkeys(
        ("per_device_train_batch_size", "per_gpu_train_batch_size"),
        Translated(("batch_size", "gradient_accumulation_steps"), _COMPLETIONS),
    ),
    "gradient_accumulation_steps": Translated(
        ("gradient_accumulation_steps",),
        "Batches of completions an update there; with the batch size it gives the prompts of an update.",
    ),
    **dict.fromkeys(
        ("per_device_eval_batch_size", "per_gpu_eval_batch_size"),
        Translated(
            ("eval_batch_size",), "Completions there, prompts here: divided by the group in evaluation, rounded up."
        ),
    ),
    "num_train_epochs": Translated(("epochs",), "Whole passes; dropped where max_steps is above 0, as there."),
    "max_steps": Translated(("iters",), _UPDATES),
}
"""How long a run is and how many completions an update has."""

OPTIMIZER: dict[str, Word] = {
    **same("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "neftune_noise_alpha"),
    "lr_scheduler_type": Translated(
        ("lr_schedule", "lr_final", "lr_warmup_steps", "lr_warmup_init", "lr_decay_fraction", "lr_cycles", "lr_power"),
        "With transformers' own ends: the warm-up begins at 0, is 0 updates long unless given, and linear and cosine end at 0.",
    ),
    "lr_scheduler_kwargs": Translated(
        ("lr_final", "lr_cycles", "lr_power"), "min_lr, min_lr_rate, lr_end, num_cycles and power; others are refused."
    ),
    "warmup_ratio": Translated(("lr_warmup_ratio",), "Without lr_scheduler_type the schedule is TRL's, linear."),
    "warmup_steps": Translated(("lr_warmup_steps", "lr_warmup_ratio"), "Below 1 it is a share of the run, as in transformers 5."),
    "optim": Translated(
        ("optimizer", "optimizer_bits"),
        "AdamW in all its builds, Adafactor, SGD, Adagrad, RMSprop and Lion; an 8-bit build sets optimizer_bits. Others are refused.",
    ),
    "optim_args": Translated(
        ("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay"), "Text such as weight_decay=0.1,eps=1e-8; others are refused."
    ),
    "adafactor": Translated(("optimizer",), "true is optim: adafactor.", is_switch=True),
    **refused("Weights are updated at full rank: train fewer layers with num_layers, or adapters.", "optim_target_modules"),
}  # fmt: skip
"""The optimizer and its learning rate."""

RHYTHM: dict[str, Word] = {
    **dict.fromkeys(
        ("eval_strategy", "evaluation_strategy"),
        Translated(("steps_per_eval", "val_batches"), "no is 0; steps takes eval_steps, else logging_steps, and all held-out prompts; "
                   "epoch is refused: give steps."),
    ),
    "eval_steps": Translated(("steps_per_eval",), _UPDATES),
    "eval_delay": Translated(("eval_delay",), _UPDATES),
    "save_strategy": Translated(("save_every",), "no leaves the checkpoint at the end; steps takes save_steps; best keeps the best, as every "
                                "run does; epoch is refused: give steps."),
    "save_steps": Translated(("save_every",), _UPDATES),
    "save_total_limit": Translated(("keep_checkpoints",), "The best one is kept beside them."),
    **same("save_only_model"),
    "logging_steps": Translated(("steps_per_report",), _UPDATES),
    "load_best_model_at_end": Translated(("load_best_at_end",)),
    "metric_for_best_model": Translated(("best_metric",), "eval_reward is eval/reward. A loss is refused: none is measured on held-out prompts."),
    "greater_is_better": Translated(("best_is_lowest",), "Turned round."),
}  # fmt: skip
"""When a run evaluates, saves and reports."""

MACHINE: dict[str, Word] = {
    **dict.fromkeys(("use_cpu", "no_cuda"), Translated(("device",), "true is cpu.", is_switch=True)),
    "use_mps_device": Translated(("device",), "true is gpu.", is_switch=True),
    **dict.fromkeys(
        ("bf16", "fp16"),
        Translated(("dtype",), "true is bfloat16 or float16. In a file for TRL it comes before dtype.", is_switch=True),
    ),
    **renamed(gradient_checkpointing="grad_checkpoint", activation_checkpointing="grad_checkpoint"),
    **same("seed", "data_seed", "run_name"),
    "report_to": Translated(
        ("report_to",),
        "trackio, wandb, tensorboard and csv; none; all takes those that are installed; other trackers are refused.",
    ),
    **renamed(project="tracker_project"),
}
"""Precision, device, seeds and trackers."""

_STEP = "every step is in the run's event log"
_OWN_FOLDER = "a run has a folder of its own; --runs-dir and --name choose it"
_VERB = "the verb says what is done: train, evaluate, resume"
_ONE_PROCESS = "a run is one process on one Mac"
_LOADER = "rows are read and batched by the trainer itself"
_TORCH = "it is for PyTorch; MLX compiles and frees memory itself"
_UPLOAD = "a run is not uploaded as it trains; afterwards: python -m backend export RUN --to hub"
_EVAL = "evaluation answers prompts and scores the answers; no logits are gathered"
_PRECISION = "sampling, learning and evaluating have one precision, dtype"
_EXACT = "the same seed on the same machine gives the same run"
_HARDWARE = "it is for other hardware"
_TRACKER = "the tracker's own variables of the environment set this"

PLUMBING: dict[str, Word] = {
    **without_effect(_OWN_FOLDER, "output_dir", "logging_dir"),
    **without_effect("a run is never overwritten", "overwrite_output_dir"),
    **without_effect(_VERB, "do_train", "do_eval", "do_predict"),
    **without_effect(_STEP, "logging_strategy", "logging_first_step", "include_tokens_per_second", "include_num_input_tokens_seen"),
    **without_effect("a number that is not finite is null in the event log, and the run says so", "logging_nan_inf_filter"),
    **without_effect("log.txt in the run folder holds all of it", "log_level", "log_level_replica", "log_on_each_node"),
    **without_effect("--no-progress turns the live display off", "disable_tqdm"),
    **without_effect("checkpoints are safetensors and are written whole", "save_safetensors", "enable_jit_checkpoint", "save_on_each_node"),
    **without_effect("a run is evaluated before its first step", "eval_on_start"),
    **without_effect(_EVAL, "prediction_loss_only", "eval_accumulation_steps", "batch_eval_metrics", "eval_do_concat_batches",
                     "eval_use_gather_object", "include_inputs_for_metrics", "include_for_metrics", "use_legacy_prediction_loop"),
    **without_effect("GRPO has no labels", "label_names", "label_smoothing_factor"),
    **without_effect("reward functions get every column", "remove_unused_columns"),
    **without_effect(_TORCH, "torch_empty_cache_steps", "torch_compile", "torch_compile_backend", "torch_compile_mode", "torchdynamo",
                     "use_liger_kernel", "liger_kernel_config", "jit_mode_eval", "use_cache", "past_index"),
    **without_effect("each layer is recomputed, and nothing is to choose", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
    **without_effect(_HARDWARE, "tf32", "use_ipex", "tpu_num_cores", "tpu_metrics_debug", "mp_parameters"),
    **without_effect(_PRECISION, "bf16_full_eval", "fp16_full_eval", "fp16_opt_level", "half_precision_backend", "fp16_backend"),
    **without_effect(_ONE_PROCESS, "local_rank", "ddp_backend", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers",
                     "ddp_static_graph", "ddp_timeout", "fsdp", "fsdp_min_num_params", "fsdp_config", "fsdp_transformer_layer_cls_to_wrap",
                     "tp_size", "deepspeed", "accelerator_config", "parallelism_config", "average_tokens_across_devices", "ray_scope"),
    **without_effect(_LOADER, "dataloader_drop_last", "dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_pin_memory",
                     "dataloader_persistent_workers", "dataloader_multiprocessing_context", "dataloader_in_order", "dispatch_batches",
                     "split_batches", "ignore_data_skip", "group_by_length", "length_column_name"),
    **without_effect("memory_limit keeps a step within memory", "auto_find_batch_size", "skip_memory_metrics"),
    **without_effect(_EXACT, "full_determinism"),
    **without_effect("a finding of a run's health tells of numbers that are not finite", "debug"),
    **without_effect("there are no callbacks in a file", "restore_callback_states_from_checkpoint"),
    **without_effect(_UPLOAD, "push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo", "hub_always_push", "hub_revision",
                     "push_to_hub_model_id", "push_to_hub_organization"),
    **without_effect("a token belongs in no file of settings: python -m backend hub login", "hub_token", "push_to_hub_token"),
    **without_effect(_TRACKER, "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    **refused("To go on with a run: python -m backend resume RUN; for a new run from its weights: adapter: RUN@step.", "resume_from_checkpoint"),
    **refused("Prompts are always shuffled, by data_seed.", "train_sampling_strategy", off=("random",)),
}  # fmt: skip
"""What has no counterpart or no meaning on one Mac."""
