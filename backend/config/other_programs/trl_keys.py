"""The keys of TRL: GRPOConfig with transformers' TrainingArguments, ModelConfig, and the script `trl grpo`.

Those of document 003 (TRL 0.16, transformers 4.49), and of TRL 1.16 with transformers 5.23.
"""

from __future__ import annotations

from backend.config.other_programs.keys import (
    BY_HOSTS,
    NO_REMOTE_CODE,
    Words,
    converted,
    ignored,
    refused,
    renamed,
    same,
    switch,
)

NO_REVISION = "The newest revision is taken; download another into a folder and give that as model."
_FIXED = "The adaptive entropy bonus moves by 0.005 between 0 and 1."
_SHUFFLED = "Prompts are always shuffled, by data_seed."
_BATCH = "batch_size gradient_accumulation_steps"
_ENDS = "lr_final lr_cycles lr_power"
SAMPLING = "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty"
REGEX_WORDS = (
    *("guided_decoding_regex", "vllm_guided_decoding_regex"),
    *("structured_outputs_regex", "vllm_structured_outputs_regex"),
)

SECTIONS: dict[str, Words] = {
    "How long a run is": {
        **converted(per_device_train_batch_size=_BATCH, per_gpu_train_batch_size=_BATCH),
        **converted(gradient_accumulation_steps="gradient_accumulation_steps"),
        **converted(per_device_eval_batch_size="eval_batch_size", per_gpu_eval_batch_size="eval_batch_size"),
        **converted(num_train_epochs="epochs", max_steps="iters"),
    },
    "Sampling": {
        **renamed(num_generations="group_size"),
        **same("max_completion_length temperature top_p top_k min_p repetition_penalty num_generations_eval"),
        **same("chat_template_kwargs max_tool_calling_iterations"),
        **converted(
            max_prompt_length="max_prompt_length long_prompts",
            generation_kwargs=f"{SAMPLING} stop",
            **dict.fromkeys(REGEX_WORDS, "output_regex"),
            generation_batch_size="batch_size steps_per_generation",
            steps_per_generation="steps_per_generation",
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
        **switch("disable_dropout", "dropout", 0.0),
        **converted(vllm_importance_sampling_correction="sampling_correction"),
        **converted(vllm_importance_sampling_mode="sampling_correction"),
        **renamed(
            vllm_importance_sampling_clip_max="sampling_correction_max",
            vllm_importance_sampling_cap="sampling_correction_max",
            vllm_importance_sampling_clip_min="sampling_correction_min",
        ),
        **refused(_FIXED, "entropy_coef_min", (0.0,)),
        **refused(_FIXED, "entropy_coef_max", (1.0,)),
        **refused(_FIXED, "entropy_coef_delta", (0.005,)),
        **refused("dtype: float32 computes the whole model in 32 bits.", "cast_lm_head_to_fp32"),
        **refused("The router of a mixture of experts is not trained.", "router_aux_loss_coef", (0.0,)),
    },
    "Optimizer and learning rate": {
        **same("learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm neftune_noise_alpha"),
        **converted(
            lr_scheduler_type=f"lr_schedule lr_warmup_steps lr_warmup_init lr_decay_fraction {_ENDS}",
            lr_scheduler_kwargs=_ENDS,
            warmup_ratio="lr_warmup_ratio",
            warmup_steps="lr_warmup_steps lr_warmup_ratio",
            optim="optimizer optimizer_bits",
            optim_args="adam_beta1 adam_beta2 adam_epsilon weight_decay",
        ),
        **switch("adafactor", "optimizer", "adafactor"),
        **refused("Weights are updated at full rank; train fewer layers, or adapters.", "optim_target_modules"),
    },
    "Evaluating, saving, reporting": {
        **converted(
            eval_strategy="steps_per_eval val_batches",
            evaluation_strategy="steps_per_eval val_batches",
            eval_steps="steps_per_eval",
            eval_delay="eval_delay",
            save_strategy="save_every",
            save_steps="save_every",
        ),
        **same("save_only_model"),
        **converted(logging_steps="steps_per_report"),
        **renamed(load_best_model_at_end="load_best_at_end", save_total_limit="keep_checkpoints"),
        **converted(metric_for_best_model="best_metric", greater_is_better="best_is_lowest"),
    },
    "Precision, device, seeds, trackers": {
        **switch("use_cpu no_cuda", "device", "cpu"),
        **switch("use_mps_device", "device", "gpu"),
        **switch("bf16", "dtype", "bfloat16"),
        **switch("fp16", "dtype", "float16"),
        **renamed(gradient_checkpointing="grad_checkpoint", activation_checkpointing="grad_checkpoint"),
        **same("seed data_seed run_name report_to"),
        **renamed(project="tracker_project"),
    },
    "Model and adapters (ModelConfig)": {
        **converted(
            peft_config="train_type num_layers rank lora_alpha use_rslora dropout lora_keys modules_to_save",
            use_peft="train_type num_layers",
        ),
        **switch("use_dora", "train_type"),
        **renamed(lora_r="rank", lora_dropout="dropout", lora_modules_to_save="modules_to_save"),
        **renamed(lora_target_modules="lora_keys"),
        **same("lora_alpha use_rslora dtype"),
        **switch("load_in_4bit", "quantization", "4"),
        **switch("load_in_8bit", "quantization", "8"),
        **ignored(
            "MLX has its own format of 4 and 8 bits", "bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage"
        ),
        **ignored("MLX's attention does not fill memory with a matrix of scores", "attn_implementation"),
        **refused("Adapters are put on linear layers, by lora_keys.", "lora_target_parameters"),
        **refused("Every model here is a causal language model.", "lora_task_type", ("CAUSAL_LM",)),
        **refused(NO_REVISION, "model_revision", ("main",)),
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
        **converted(reward_funcs="reward_functions", datasets="data dataset_config train_split"),
        **converted(test_split_size="validation_split"),
        **refused(
            "A reward is a function here; one that asks a model needs reward_network.", "reward_model_name_or_path"
        ),
        **ignored("the file is read already", "config"),
        **ignored(BY_HOSTS, "ignore_bias_buffers accelerate_config env num_processes"),
    },
    "Generation by vLLM, recording": {
        **converted(model_init_kwargs="dtype"),
        **ignored(NO_REMOTE_CODE, "trust_remote_code"),
        **ignored(
            "completions are sampled in batches in the run's own process",
            "use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url vllm_server_host "
            "vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_len "
            "vllm_max_model_length vllm_tensor_parallel_size vllm_device vllm_dtype vllm_enable_prefix_caching "
            "use_transformers_paged use_transformers_continuous_batching transformers_continuous_batching_config "
            "cache_implementation ds3_gather_for_generation",
        ),
        **ignored(
            "every completion is recorded in completions.jsonl, on this machine",
            "log_completions num_completions_to_print log_unique_prompts log_multimodal log_completions_hub_repo",
        ),
        **refused(_SHUFFLED, "shuffle_dataset", (True,)),
    },
    "Everything else of TrainingArguments": {
        **ignored(
            "a run has a folder of its own; --runs-dir and --name choose it",
            "output_dir logging_dir overwrite_output_dir",
        ),
        **ignored("the verb says what is done: train, evaluate, resume", "do_train do_eval do_predict"),
        **ignored(
            "every step is in the run's event log, and log.txt has the rest",
            "logging_strategy logging_first_step include_tokens_per_second include_num_input_tokens_seen "
            "logging_nan_inf_filter log_level log_level_replica log_on_each_node debug",
        ),
        **ignored("--no-progress turns the live display off", "disable_tqdm"),
        **ignored(
            "checkpoints are safetensors and are written whole",
            "save_safetensors enable_jit_checkpoint save_on_each_node restore_callback_states_from_checkpoint",
        ),
        **ignored(
            "evaluation answers prompts and scores the answers, also before the first step",
            "eval_on_start prediction_loss_only eval_accumulation_steps batch_eval_metrics eval_do_concat_batches "
            "eval_use_gather_object include_inputs_for_metrics include_for_metrics use_legacy_prediction_loop "
            "label_names label_smoothing_factor",
        ),
        **ignored(
            "it is for PyTorch or other hardware",
            "torch_empty_cache_steps torch_compile torch_compile_backend torch_compile_mode torchdynamo "
            "use_liger_kernel liger_kernel_config jit_mode_eval use_cache past_index gradient_checkpointing_kwargs "
            "activation_checkpointing_kwargs tf32 use_ipex tpu_num_cores tpu_metrics_debug mp_parameters",
        ),
        **ignored(
            "sampling, learning and evaluating have one precision, dtype",
            "bf16_full_eval fp16_full_eval fp16_opt_level half_precision_backend fp16_backend mixed_precision",
        ),
        **ignored(
            BY_HOSTS,
            "local_rank ddp_backend ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers "
            "ddp_static_graph ddp_timeout fsdp fsdp_min_num_params fsdp_config fsdp_transformer_layer_cls_to_wrap "
            "tp_size deepspeed accelerator_config parallelism_config average_tokens_across_devices ray_scope",
        ),
        **ignored(
            "rows are read and batched by the trainer itself, and reward functions get every column",
            "dataloader_drop_last dataloader_num_workers dataloader_prefetch_factor dataloader_pin_memory "
            "dataloader_persistent_workers dataloader_multiprocessing_context dataloader_in_order dispatch_batches "
            "split_batches ignore_data_skip group_by_length length_column_name remove_unused_columns "
            "pad_to_multiple_of",
        ),
        **ignored("memory_limit keeps a step within memory", "auto_find_batch_size skip_memory_metrics"),
        **ignored("the same seed on the same machine gives the same run", "full_determinism"),
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
        **refused(_SHUFFLED, "train_sampling_strategy", ("random",)),
    },
}
"""Title → table."""
