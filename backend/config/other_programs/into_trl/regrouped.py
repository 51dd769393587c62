"""What TRL counts or groups in another way: the opposite of `trl_batches`, `trl_script` and parts of `trl_training`."""

from __future__ import annotations

from backend.config.other_programs.into_trl.writing import TrlWriting
from backend.config.setting import NEVER
from backend.models.adapter_types import adapter_scale
from backend.runs.metric_names import EVALUATION, transformers_name

NO_LIMIT = 1_000_000
"""For a correction without an upper limit: as large as the setting may be."""
_BITS = {"4": "load_in_4bit", "8": "load_in_8bit"}
_NEAREST_BITS = {"6": "8", "mxfp4": "4"}


def batches(to: TrlWriting) -> None:
    """Prompts of a batch → completions; batches of an update; batches that are sampled at once."""
    config = to.config
    accumulated = config.gradient_accumulation_steps
    to.put(per_device_train_batch_size=config.batch_size * config.group_size, gradient_accumulation_steps=accumulated)
    to.put(steps_per_generation=accumulated * config.steps_per_generation)
    if config.grpo_loss_type == "bnpo" and accumulated > 1:
        to.leave(
            "grpo_loss_type",
            "TRL's bnpo divides by the tokens of each batch; over a whole update dapo is the same formula",
        )
        to.put(loss_type="dapo")


def length(to: TrlWriting) -> None:
    """Steps → updates; or passes over the dataset."""
    if to.config.epochs:
        to.put(num_train_epochs=to.config.epochs)
    else:
        to.put(max_steps=to.updates)


def rhythm(to: TrlWriting) -> None:
    """When to evaluate, save and report, in updates."""
    config, updates = to.config, to.updates_per_step
    to.put(logging_steps=config.steps_per_report * updates)
    if config.save_every >= NEVER:
        to.put(save_strategy="no")
    else:
        to.put(save_strategy="steps", save_steps=config.save_every * updates)
    to.put(save_total_limit=config.keep_checkpoints)
    if config.eval_delay:
        to.put(eval_delay=config.eval_delay * updates)
    group = config.num_generations_eval or config.group_size
    to.put(per_device_eval_batch_size=config.prompts_per_evaluation_batch * group)
    if config.steps_per_eval:
        to.put(eval_strategy="steps", eval_steps=config.steps_per_eval * updates, eval_on_start=True)
    else:
        to.put(eval_strategy="no")


def best(to: TrlWriting) -> None:
    """The checkpoint that is the best. After `rhythm`."""
    config = to.config
    if config.best_metric.startswith(EVALUATION):
        name = transformers_name(config.best_metric, config.eval_data, config.scale_rewards)
        to.put(metric_for_best_model=name)
    elif config.best_metric:
        to.leave("best_metric", "TRL compares checkpoints by a metric of evaluations alone: by the held-out reward")
    if config.best_is_lowest:
        to.put(greater_is_better=False)
    if not (config.load_best_at_end or config.early_stopping_patience):
        return
    if to.words["eval_strategy"] == "no":
        for key in ("load_best_at_end", "early_stopping_patience"):
            if getattr(config, key):
                to.leave(
                    key, "TRL knows the best checkpoint from evaluations, and this run has none: the last one counts"
                )
        return
    to.words.setdefault("metric_for_best_model", "eval_reward")
    to.words.setdefault("greater_is_better", True)
    if config.load_best_at_end and config.save_every % config.steps_per_eval == 0 and config.save_every < NEVER:
        to.put(load_best_model_at_end=True)
    elif config.load_best_at_end:
        to.leave("load_best_at_end", "TRL needs Save to be a multiple of Eval for it: the last checkpoint counts")


def precision(to: TrlWriting) -> None:
    """The type of the weights, and whether PyTorch casts beside it (TRL's bf16, on unless told otherwise)."""
    config = to.config
    own = "float32" if config.train_type == "full" else "auto"
    to.put(dtype=own if config.dtype == "auto" else config.dtype, bf16=config.dtype == "bfloat16")
    if config.dtype == "float16":
        to.put(fp16=True)
    if bits := _BITS.get(_NEAREST_BITS.get(config.quantization, config.quantization)):
        to.put(**{bits: True})
    if config.quantization in _NEAREST_BITS:
        to.leave(
            "quantization", f"bitsandbytes has no such format: {_NEAREST_BITS[config.quantization]} bits of its own"
        )
    if config.device == "cpu":
        to.put(use_cpu=True)


def adapters(to: TrlWriting) -> None:
    """PEFT's words for adapters. Its alpha is ours times the rank, or times its root."""
    config = to.config
    to.put(use_peft=config.train_type != "full")
    if config.train_type == "full":
        return
    if config.train_type == "dora":
        to.put(use_dora=True)
    alpha = config.lora_alpha if config.lora_alpha is not None else adapter_scale(config) * config.rank
    to.put(lora_r=config.rank, lora_alpha=alpha, lora_dropout=config.dropout)
    to.put(lora_target_modules=list(config.lora_keys) or ["all-linear"])
    if config.use_rslora:
        to.put(use_rslora=True)
    if config.modules_to_save:
        to.put(lora_modules_to_save=list(config.modules_to_save))


def reference(to: TrlWriting) -> None:
    """A reference that follows, where TRL has one to move."""
    config = to.config
    if not config.sync_ref_model:
        return
    if config.train_type != "full":
        to.leave("sync_ref_model", "TRL moves no reference under adapters: the reference stays the base model")
    elif config.beta == 0:
        to.leave("sync_ref_model", "without a KL weight TRL has no reference")
    else:
        to.put(sync_ref_model=True)


def importance(to: TrlWriting) -> None:
    """The level of the ratio, and the correction between vLLM and the model that learns."""
    config = to.config
    if config.importance_sampling_level == "sequence_token":
        to.put(importance_sampling_level="sequence")
        to.leave("importance_sampling_level", "sequence has the same ratio, with one gradient for the whole completion")
    _limits(to)
    mode = config.sampling_correction
    if mode == "auto":
        mode = "sequence_truncate" if config.holds_output else "none" if config.dtype == "float32" else "token_truncate"
    if mode == "none":
        to.put(vllm_importance_sampling_correction=False)
        return
    if config.grpo_loss_type == "vespo" and mode.startswith("sequence"):
        mode = mode.replace("sequence", "token")
        to.leave("sampling_correction", f"TRL's vespo takes a correction by token alone: {mode}")
    to.put(vllm_importance_sampling_correction=True, vllm_importance_sampling_mode=mode)


def _limits(to: TrlWriting) -> None:
    """Of the correction."""
    high, low = to.config.sampling_correction_max, to.config.sampling_correction_min
    if high is None:
        high = NO_LIMIT
        to.leave("sampling_correction_max", f"TRL takes 3 where none is given: {NO_LIMIT:,}, which nothing reaches")
    if low is not None and low >= high:
        low = None
        to.leave("sampling_correction_min", "TRL wants it below the largest correction: no lower limit")
    to.put(vllm_importance_sampling_clip_max=high, vllm_importance_sampling_clip_min=low)


def sampling(to: TrlWriting) -> None:
    """Options that TRL hands to vLLM under `generation_kwargs`, and held output."""
    config = to.config
    to.put(use_vllm=config.device != "cpu", vllm_mode="colocate", vllm_max_model_length=config.max_seq_length)
    own = {
        "presence_penalty": config.presence_penalty, "frequency_penalty": config.frequency_penalty, "stop": list(config.stop),
    }  # fmt: skip
    if given := {name: value for name, value in own.items() if value}:
        to.put(generation_kwargs=given)
    for key in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        if getattr(config, key) != (1.0 if key == "repetition_penalty" else 0.0):
            to.leave(key, "TRL samples with it and learns without it; here it is part of the policy")
    if config.output_regex:
        to.put(vllm_structured_outputs_regex=config.output_regex)
    if config.output_schema:
        to.leave(
            "output_schema",
            "TRL holds completions to a regular expression alone: they are free, and only rewards see their form",
        )


def trackers(to: TrlWriting) -> None:
    """Where metrics go beside the log."""
    config = to.config
    known = [name for name in config.report_to if name != "csv"]
    to.put(report_to=known or "none", log_completions=True)
    if "csv" in config.report_to:
        to.leave("report_to", "TRL writes no csv: trainer_state.json in the output folder has every logged metric")
    if config.tracker_project:
        to.put(project=config.tracker_project)
    if config.tracker_run_name:
        to.put(run_name=config.tracker_run_name)
    elif config.run_name:
        to.put(run_name=config.run_name)
