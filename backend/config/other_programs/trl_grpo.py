"""TRL's words that come from GRPOConfig, from its script `trl grpo` and from its ModelConfig: document 003 and TRL 1.16."""

from __future__ import annotations

from backend.config.other_programs.words import Translated, Word, refused, renamed, same, without_effect

_IN_PROCESS = "completions are sampled in batches in the run's own process"
_RECORDED = "every completion is recorded in completions.jsonl"
_FIXED = "The adaptive entropy bonus moves by 0.005 between 0 and 1."

GENERATION: dict[str, Word] = {
    **renamed(num_generations="group_size"),
    **same("max_completion_length", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "num_generations_eval"),
    **same("chat_template_kwargs"),
    "max_prompt_length": Translated(
        ("max_prompt_length", "long_prompts"), "Longer prompts are cut on the left, as there, in a file for TRL."
    ),
    "generation_kwargs": Translated(
        ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop"),
        "Options of these names; others are refused.",
    ),
    **dict.fromkeys(
        ("guided_decoding_regex", "vllm_guided_decoding_regex", "structured_outputs_regex", "vllm_structured_outputs_regex"),
        Translated(("output_regex",), "With or without use_vllm."),
    ),
    "generation_batch_size": Translated(
        ("batch_size", "steps_per_generation"), "Completions sampled at once there: prompts times group; refused where that leaves a rest."
    ),
    "steps_per_generation": Translated(
        ("steps_per_generation",), "Batches of completions there, batches of an update here: divided by gradient_accumulation_steps."
    ),
}  # fmt: skip
"""How completions are sampled."""

OBJECTIVE: dict[str, Word] = {
    **same("beta", "num_iterations", "epsilon", "delta", "epsilon_high", "importance_sampling_level", "reward_weights"),
    **same(
        "sapo_temperature_neg",
        "sapo_temperature_pos",
        "vespo_k_pos",
        "vespo_lambda_pos",
        "vespo_k_neg",
        "vespo_lambda_neg",
    ),
    **same(
        "multi_objective_aggregation",
        "scale_rewards",
        "mask_truncated_completions",
        "sync_ref_model",
        "ref_model_mixup_alpha",
    ),
    **same(
        "ref_model_sync_steps", "top_entropy_quantile", "entropy_coef", "entropy_target", "off_policy_mask_threshold"
    ),
    **same("use_bias_correction_kl"),
    **renamed(loss_type="grpo_loss_type", use_adaptive_entropy="entropy_adaptive"),
    "disable_dropout": Translated(("dropout",), "true is 0; only adapters have dropout here.", is_switch=True),
    "vllm_importance_sampling_correction": Translated(
        ("sampling_correction",), "true takes vllm_importance_sampling_mode, else TRL's sequence_mask; false is none."
    ),
    "vllm_importance_sampling_mode": Translated(("sampling_correction",)),
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
}
"""The loss and the advantages."""

RUNNING: dict[str, Word] = {
    "model_init_kwargs": Translated(
        ("dtype",), "dtype and torch_dtype; how attention is computed and where the model lies is without effect; others are refused."
    ),
    **without_effect("the code of models is mlx-lm's; none from a model's repository is run", "trust_remote_code"),
    **without_effect(_IN_PROCESS, "use_vllm", "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_server_base_url",
                     "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port", "vllm_gpu_memory_utilization",
                     "vllm_max_model_len", "vllm_max_model_length", "vllm_tensor_parallel_size", "vllm_device", "vllm_dtype",
                     "vllm_enable_prefix_caching", "use_transformers_paged", "use_transformers_continuous_batching",
                     "transformers_continuous_batching_config", "cache_implementation", "ds3_gather_for_generation"),
    **without_effect("batches are padded by the trainer itself", "pad_to_multiple_of"),
    **without_effect(_RECORDED, "log_completions", "num_completions_to_print", "log_unique_prompts", "log_multimodal"),
    **without_effect("completions stay on this machine", "log_completions_hub_repo"),
    **refused("Prompts are always shuffled, by data_seed.", "shuffle_dataset", off=(True,)),
    **refused("Tools are not built yet.", "max_tool_calling_iterations"),
}  # fmt: skip
"""What TRL samples with, and what it records."""

SCRIPT: dict[str, Word] = {
    **renamed(
        model_name_or_path="model",
        dataset_name="data",
        dataset_train_split="train_split",
        dataset_test_split="valid_split",
    ),
    **renamed(dataset_streaming="streaming"),
    **same("dataset_config", "streaming"),
    "reward_funcs": Translated(
        ("reward_functions",),
        "Names of TRL's own; package.module.function is package/module.py::function. A reward model is refused.",
    ),
    "datasets": Translated(
        ("data", "dataset_config", "train_split"), "A list with one dataset: its path, name and split."
    ),
    "test_split_size": Translated(("validation_split",), "A share of the rows, below 1."),
    **refused("A reward is a function here; one that asks a model needs reward_network.", "reward_model_name_or_path"),
    **without_effect("the file is read already", "config"),
    **without_effect(
        "a run is one process on one Mac",
        "ignore_bias_buffers",
        "accelerate_config",
        "env",
        "num_processes",
        "mixed_precision",
    ),
}
"""The arguments of `trl grpo`."""

MODEL: dict[str, Word] = {
    "peft_config": Translated(
        ("train_type", "num_layers", "rank", "lora_alpha", "use_rslora", "dropout", "lora_keys", "modules_to_save"),
        "A mapping of LoraConfig's words, below. Another peft_type is refused with the nearest that exists.",
    ),
    "use_peft": Translated(("train_type", "num_layers"), "true is lora on all layers, false is full."),
    "use_dora": Translated(("train_type",), "true is dora.", is_switch=True),
    **renamed(lora_r="rank", lora_dropout="dropout", lora_modules_to_save="modules_to_save"),
    **same("lora_alpha", "use_rslora", "dtype"),
    "lora_target_modules": Translated(("lora_keys",), "A name or a list of names; all-linear too."),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit"),
        Translated(("quantization",), "MLX's own format of 4 or 8 bits.", is_switch=True),
    ),
    **without_effect(
        "MLX has its own format of 4 and 8 bits",
        "bnb_4bit_quant_type",
        "use_bnb_nested_quant",
        "bnb_4bit_quant_storage",
    ),
    **without_effect("MLX's attention does not fill memory with a matrix of scores", "attn_implementation"),
    **refused("Adapters are put on linear layers, by lora_keys.", "lora_target_parameters"),
    **refused("Every model here is a causal language model.", "lora_task_type", off=("CAUSAL_LM",)),
    **refused(
        "The newest revision is taken; download another into a folder and give that as model.",
        "model_revision",
        off=("main",),
    ),
}
"""The arguments of TRL's ModelConfig."""
