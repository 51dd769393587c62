"""The keys of TRL: GRPOConfig with transformers' TrainingArguments, ModelConfig, and the script `trl grpo`.

Those of document 003 (TRL 0.16, transformers 4.49), and of TRL 1.16 with transformers 5.23.
"""

from __future__ import annotations

from backend.config.other_programs.keys import Words, ignored, refused, renamed, same, translated

_COMPLETIONS = (
    "TRL counts completions and GRPO Studio prompts: divided by num_generations; refused where that leaves a rest."
)
_UPDATES = (
    "TRL counts updates of the weights and GRPO Studio steps: divided by the updates of a step; a share of the run "
    "becomes steps."
)
_NO_REVISION = "The newest revision is taken; download another into a folder and give that as model."
_FIXED = "The adaptive entropy bonus moves by 0.005 between 0 and 1."
_SHUFFLED = "Prompts are always shuffled, by data_seed."
_ONE_PROCESS = "a run is one process on one Mac"
_OWN_CODE = "the code of models is mlx-lm's; none from a model's repository is run"
REGEX_WORDS = "guided_decoding_regex vllm_guided_decoding_regex structured_outputs_regex vllm_structured_outputs_regex"

SECTIONS: dict[str, Words] = {
    "How long a run is": {
        **translated(
            "per_device_train_batch_size per_gpu_train_batch_size",
            "batch_size gradient_accumulation_steps",
            _COMPLETIONS,
        ),
        **translated(
            "gradient_accumulation_steps",
            "gradient_accumulation_steps",
            "Batches of completions an update there; with the batch size it gives the prompts of an update.",
        ),
        **translated(
            "per_device_eval_batch_size per_gpu_eval_batch_size",
            "eval_batch_size",
            "Completions there, prompts here: divided by the group in evaluation, rounded up.",
        ),
        **translated("num_train_epochs", "epochs", "Whole passes; dropped where max_steps is above 0, as there."),
        **translated("max_steps", "iters", _UPDATES),
    },
    "Sampling": {
        **renamed(num_generations="group_size"),
        **same("max_completion_length temperature top_p top_k min_p repetition_penalty num_generations_eval"),
        **same("chat_template_kwargs"),
        **translated(
            "max_prompt_length",
            "max_prompt_length long_prompts",
            "Longer prompts are cut on the left, as there, in a file for TRL.",
        ),
        **translated(
            "generation_kwargs",
            "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty stop",
            "Options of these names; others are refused.",
        ),
        **translated(REGEX_WORDS, "output_regex", "With or without use_vllm."),
        **translated(
            "generation_batch_size",
            "batch_size steps_per_generation",
            "Completions sampled at once there: prompts times group; refused where that leaves a rest.",
        ),
        **translated(
            "steps_per_generation",
            "steps_per_generation",
            "Batches of completions there, batches of an update here: divided by gradient_accumulation_steps.",
        ),
    },
    "Loss and rewards": {
        **same(
            "beta num_iterations epsilon delta epsilon_high importance_sampling_level reward_weights "
            "sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg "
            "multi_objective_aggregation scale_rewards mask_truncated_completions sync_ref_model "
            "ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile entropy_coef entropy_target "
            "off_policy_mask_threshold use_bias_correction_kl"
        ),
        **renamed(loss_type="grpo_loss_type", use_adaptive_entropy="entropy_adaptive"),
        **translated("disable_dropout", "dropout", "true is 0; only adapters have dropout here.", value=0.0),
        **translated(
            "vllm_importance_sampling_correction",
            "sampling_correction",
            "true takes vllm_importance_sampling_mode, else TRL's sequence_mask; false is none.",
        ),
        **translated("vllm_importance_sampling_mode", "sampling_correction"),
        **renamed(
            vllm_importance_sampling_clip_max="sampling_correction_max",
            vllm_importance_sampling_cap="sampling_correction_max",
            vllm_importance_sampling_clip_min="sampling_correction_min",
        ),
        **refused(_FIXED, "entropy_coef_min", off=(0.0,)),
        **refused(_FIXED, "entropy_coef_max", off=(1.0,)),
        **refused(_FIXED, "entropy_coef_delta", off=(0.005,)),
        **refused("dtype: float32 computes the whole model in 32 bits.", "cast_lm_head_to_fp32"),
        **refused("The router of a mixture of experts is not trained.", "router_aux_loss_coef", off=(0.0,)),
    },
    "Optimizer and learning rate": {
        **same("learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm neftune_noise_alpha"),
        **translated(
            "lr_scheduler_type",
            "lr_schedule lr_final lr_warmup_steps lr_warmup_init lr_decay_fraction lr_cycles lr_power",
            "With transformers' own ends: the warm-up begins at 0, is 0 updates long unless given, and linear and "
            "cosine end at 0.",
        ),
        **translated(
            "lr_scheduler_kwargs",
            "lr_final lr_cycles lr_power",
            "min_lr, min_lr_rate, lr_end, num_cycles and power; others are refused.",
        ),
        **translated("warmup_ratio", "lr_warmup_ratio", "Without lr_scheduler_type the schedule is TRL's, linear."),
        **translated(
            "warmup_steps",
            "lr_warmup_steps lr_warmup_ratio",
            "Below 1 it is a share of the run, as in transformers 5.",
        ),
        **translated(
            "optim",
            "optimizer optimizer_bits",
            "AdamW in all its builds, Adafactor, SGD, Adagrad, RMSprop and Lion; an 8-bit build sets optimizer_bits. "
            "Others are refused.",
        ),
        **translated(
            "optim_args",
            "adam_beta1 adam_beta2 adam_epsilon weight_decay",
            "Text such as weight_decay=0.1,eps=1e-8; others are refused.",
        ),
        **translated("adafactor", "optimizer", "true is optim: adafactor.", value="adafactor"),
        **refused(
            "Weights are updated at full rank: train fewer layers with num_layers, or adapters.",
            "optim_target_modules",
        ),
    },
    "Evaluating, saving, reporting": {
        **translated(
            "eval_strategy evaluation_strategy",
            "steps_per_eval val_batches",
            "no is 0; steps takes eval_steps, else logging_steps, and all held-out prompts; epoch is refused: give "
            "steps.",
        ),
        **translated("eval_steps", "steps_per_eval", _UPDATES),
        **translated("eval_delay", "eval_delay", _UPDATES),
        **translated(
            "save_strategy",
            "save_every",
            "no leaves the checkpoint at the end; steps takes save_steps; best keeps the best, as every run does; "
            "epoch is refused: give steps.",
        ),
        **translated("save_steps", "save_every", _UPDATES),
        **translated("save_total_limit", "keep_checkpoints", "The best one is kept beside them."),
        **same("save_only_model"),
        **translated("logging_steps", "steps_per_report", _UPDATES),
        **translated("load_best_model_at_end", "load_best_at_end"),
        **translated(
            "metric_for_best_model",
            "best_metric",
            "eval_reward is eval/reward. A loss is refused: none is measured on held-out prompts.",
        ),
        **translated("greater_is_better", "best_is_lowest", "Turned round."),
    },
    "Precision, device, seeds, trackers": {
        **translated("use_cpu no_cuda", "device", "true is cpu.", value="cpu"),
        **translated("use_mps_device", "device", "true is gpu.", value="gpu"),
        **translated(
            "bf16 fp16",
            "dtype",
            "true is bfloat16 or float16. In a file for TRL it comes before dtype.",
            is_switch=True,
        ),
        **renamed(gradient_checkpointing="grad_checkpoint", activation_checkpointing="grad_checkpoint"),
        **same("seed data_seed run_name"),
        **translated(
            "report_to",
            "report_to",
            "trackio, wandb, tensorboard and csv; none; all takes those that are installed; other trackers are "
            "refused.",
        ),
        **renamed(project="tracker_project"),
    },
    "Model and adapters (ModelConfig)": {
        **translated(
            "peft_config",
            "train_type num_layers rank lora_alpha use_rslora dropout lora_keys modules_to_save",
            "A mapping of LoraConfig's words, below. Another peft_type is refused with the nearest that exists.",
        ),
        **translated("use_peft", "train_type num_layers", "true is lora on all layers, false is full."),
        **translated("use_dora", "train_type", "true is dora.", is_switch=True),
        **renamed(lora_r="rank", lora_dropout="dropout", lora_modules_to_save="modules_to_save"),
        **same("lora_alpha use_rslora dtype"),
        **translated("lora_target_modules", "lora_keys", "A name or a list of names; all-linear too."),
        **translated("load_in_4bit", "quantization", "MLX's own format of 4 or 8 bits.", value="4"),
        **translated("load_in_8bit", "quantization", "MLX's own format of 4 or 8 bits.", value="8"),
        **ignored(
            "MLX has its own format of 4 and 8 bits",
            "bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage",
        ),
        **ignored("MLX's attention does not fill memory with a matrix of scores", "attn_implementation"),
        **refused("Adapters are put on linear layers, by lora_keys.", "lora_target_parameters"),
        **refused("Every model here is a causal language model.", "lora_task_type", off=("CAUSAL_LM",)),
        **refused(_NO_REVISION, "model_revision", off=("main",)),
    },
    "The script `trl grpo`": {
        **renamed(
            model_name_or_path="model",
            dataset_name="data",
            dataset_train_split="train_split",
            dataset_test_split="valid_split",
            dataset_streaming="streaming",
        ),
        **same("dataset_config streaming"),
        **translated(
            "reward_funcs",
            "reward_functions",
            "Names of TRL's own; package.module.function is package/module.py::function. A reward model is refused.",
        ),
        **translated(
            "datasets", "data dataset_config train_split", "A list with one dataset: its path, name and split."
        ),
        **translated("test_split_size", "validation_split", "A share of the rows, below 1."),
        **refused(
            "A reward is a function here; one that asks a model needs reward_network.", "reward_model_name_or_path"
        ),
        **ignored("the file is read already", "config"),
        **ignored(_ONE_PROCESS, "ignore_bias_buffers accelerate_config env num_processes mixed_precision"),
    },
    "Generation by vLLM, recording": {
        **translated(
            "model_init_kwargs",
            "dtype",
            "dtype and torch_dtype; how attention is computed and where the model lies is without effect; others are "
            "refused.",
        ),
        **ignored(_OWN_CODE, "trust_remote_code"),
        **ignored(
            "completions are sampled in batches in the run's own process",
            "use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url vllm_server_host "
            "vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_len "
            "vllm_max_model_length vllm_tensor_parallel_size vllm_device vllm_dtype vllm_enable_prefix_caching "
            "use_transformers_paged use_transformers_continuous_batching transformers_continuous_batching_config "
            "cache_implementation ds3_gather_for_generation",
        ),
        **ignored("batches are padded by the trainer itself", "pad_to_multiple_of"),
        **ignored(
            "every completion is recorded in completions.jsonl",
            "log_completions num_completions_to_print log_unique_prompts log_multimodal",
        ),
        **ignored("completions stay on this machine", "log_completions_hub_repo"),
        **refused(_SHUFFLED, "shuffle_dataset", off=(True,)),
        **refused("Tools are not built yet.", "max_tool_calling_iterations"),
    },
    "Everything else of TrainingArguments": {
        **ignored("a run has a folder of its own; --runs-dir and --name choose it", "output_dir logging_dir"),
        **ignored("a run is never overwritten", "overwrite_output_dir"),
        **ignored("the verb says what is done: train, evaluate, resume", "do_train do_eval do_predict"),
        **ignored(
            "every step is in the run's event log",
            "logging_strategy logging_first_step include_tokens_per_second include_num_input_tokens_seen",
        ),
        **ignored(
            "a number that is not finite is null in the event log, and the run says so", "logging_nan_inf_filter"
        ),
        **ignored("log.txt in the run folder holds all of it", "log_level log_level_replica log_on_each_node"),
        **ignored("--no-progress turns the live display off", "disable_tqdm"),
        **ignored(
            "checkpoints are safetensors and are written whole",
            "save_safetensors enable_jit_checkpoint save_on_each_node",
        ),
        **ignored("a run is evaluated before its first step", "eval_on_start"),
        **ignored(
            "evaluation answers prompts and scores the answers; no logits are gathered",
            "prediction_loss_only eval_accumulation_steps batch_eval_metrics eval_do_concat_batches "
            "eval_use_gather_object include_inputs_for_metrics include_for_metrics use_legacy_prediction_loop",
        ),
        **ignored("GRPO has no labels", "label_names label_smoothing_factor"),
        **ignored("reward functions get every column", "remove_unused_columns"),
        **ignored(
            "it is for PyTorch; MLX compiles and frees memory itself",
            "torch_empty_cache_steps torch_compile torch_compile_backend torch_compile_mode torchdynamo "
            "use_liger_kernel liger_kernel_config jit_mode_eval use_cache past_index",
        ),
        **ignored(
            "each layer is recomputed, without options",
            "gradient_checkpointing_kwargs activation_checkpointing_kwargs",
        ),
        **ignored("it is for other hardware", "tf32 use_ipex tpu_num_cores tpu_metrics_debug mp_parameters"),
        **ignored(
            "sampling, learning and evaluating have one precision, dtype",
            "bf16_full_eval fp16_full_eval fp16_opt_level half_precision_backend fp16_backend",
        ),
        **ignored(
            _ONE_PROCESS,
            "local_rank ddp_backend ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers "
            "ddp_static_graph ddp_timeout fsdp fsdp_min_num_params fsdp_config fsdp_transformer_layer_cls_to_wrap "
            "tp_size deepspeed accelerator_config parallelism_config average_tokens_across_devices ray_scope",
        ),
        **ignored(
            "rows are read and batched by the trainer itself",
            "dataloader_drop_last dataloader_num_workers dataloader_prefetch_factor dataloader_pin_memory "
            "dataloader_persistent_workers dataloader_multiprocessing_context dataloader_in_order dispatch_batches "
            "split_batches ignore_data_skip group_by_length length_column_name",
        ),
        **ignored("memory_limit keeps a step within memory", "auto_find_batch_size skip_memory_metrics"),
        **ignored("the same seed on the same machine gives the same run", "full_determinism"),
        **ignored("a health rule reports numbers that are not finite", "debug"),
        **ignored("there are no callbacks in a file", "restore_callback_states_from_checkpoint"),
        **ignored(
            "a run is not uploaded as it trains; afterwards: python -m backend export RUN --to hub",
            "push_to_hub hub_model_id hub_strategy hub_private_repo hub_always_push hub_revision "
            "push_to_hub_model_id push_to_hub_organization",
        ),
        **ignored("a token belongs in no file of settings: python -m backend hub login", "hub_token push_to_hub_token"),
        **ignored(
            "the tracker's own variables of the environment set this",
            "trackio_space_id trackio_bucket_id trackio_static_space_id",
        ),
        **refused(
            "To continue a run: python -m backend resume RUN; for a new run from its weights: adapter: RUN@step.",
            "resume_from_checkpoint",
        ),
        **refused(_SHUFFLED, "train_sampling_strategy", off=("random",)),
    },
}
"""Title → table."""
