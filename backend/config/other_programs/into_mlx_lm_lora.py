"""Our settings as a YAML file for mlx-lm-lora, and the settings that it has no key for.

The other direction is `backend.config.other_programs.translation`: a file exported and read again is the same run, except for what was left out.
"""

from __future__ import annotations

from typing import Any

import yaml

from backend.config.config import SETTINGS, Config
from backend.config.other_programs.mlx_lm_groups import QUANTIZATION_FLAGS
from backend.config.setting import NEVER
from backend.config.updates import final_rate, warmup_updates
from backend.models.adapter_types import ALL_LINEAR, adapter_scale
from backend.runs.adapter_source import find_adapter
from backend.utils.errors import UserError

_SHARED_KEYS = (
    *("model", "data", "train_type", "train_mode", "optimizer", "num_layers", "batch_size", "epochs", "iters", "seed"),
    *("gradient_accumulation_steps", "learning_rate", "max_seq_length", "val_batches", "steps_per_report"),
    *("steps_per_eval", "save_every", "test", "test_batches", "grad_checkpoint", "efficient_long_context"),
    *("seq_step_size", "mask_prompt", "fuse", "lm_studio_name", "beta", "reference_model_path", "group_size"),
    *("max_completion_length", "temperature", "top_p", "top_k", "min_p", "epsilon", "epsilon_high", "grpo_loss_type"),
    *("importance_sampling_level", "prompt_feature", "answer_feature", "type_feature", "system_feature"),
    *("reward_functions_file",),
)
"""Keys that mean the same in both programs."""

_REGROUPED_KEYS = ("rank", "scale", "lora_alpha", "use_rslora", "dropout", "lora_keys", "quantization", "weight_decay", "adam_beta1", "adam_beta2",
            "adam_epsilon", "lr_schedule", "lr_warmup_steps", "lr_warmup_ratio", "lr_warmup_init", "lr_decay_fraction", "lr_final",
            "reward_functions", "reward_weights")  # fmt: skip
_SUPPORTED_LOSSES, _SUPPORTED_OPTIMIZERS = ("grpo", "bnpo", "dr_grpo"), ("adam", "adamw", "muon")
_SUPPORTED_SCHEDULES = ("constant", "cosine", "linear")


def mlx_lm_lora_yaml(config: Config) -> tuple[str, dict[str, Any]]:
    """(YAML text, settings that differ from their defaults and have no counterpart → their values).

    The latter are listed at the end of the text too, as comments.
    """
    values = {key: getattr(config, key) for key in _SHARED_KEYS if getattr(config, key) not in (None, "")}
    values |= (
        {"train": True}
        | _lora_parameters(config)
        | _start(config)
        | _quantization_flags(config)
        | _schedule(config)
        | _optimizer(config)
        | _rewards(config)
    )
    values |= _in_batches(config)
    if config.epochs:
        del values["iters"]
    missing = _untranslatable(config)
    values = {key: value for key, value in values.items() if key not in missing}
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    lines = [f"#   {key}: {value}\n".replace("\n", " ").rstrip() for key, value in missing.items()]
    note = "\n".join(["", "# Left out, because mlx-lm-lora has no such setting:", *lines, ""]) if lines else ""
    return text + note, missing


def _in_batches(config: Config) -> dict[str, int]:
    """What mlx-lm-lora counts in iterations, each of which is one batch: a step of ours is as many as it accumulates."""
    accumulated = config.gradient_accumulation_steps
    return {
        key: min(getattr(config, key) * accumulated, NEVER)
        for key in ("iters", "steps_per_report", "steps_per_eval", "save_every")
    }


def _untranslatable(config: Config) -> dict[str, Any]:
    translated = {*_SHARED_KEYS, *_REGROUPED_KEYS}
    missing = {
        key for key, about in SETTINGS.items() if key not in translated and getattr(config, key) != about.default
    }
    missing |= {"grpo_loss_type"} if config.grpo_loss_type not in _SUPPORTED_LOSSES else set()
    missing |= {"optimizer"} if config.optimizer not in _SUPPORTED_OPTIMIZERS else set()
    has_schedule = config.lr_schedule in _SUPPORTED_SCHEDULES and (
        config.lr_schedule == "constant" or not config.epochs
    )
    missing |= set() if has_schedule else {"lr_schedule"}
    missing -= {"adapter"} if _start(config) else set()
    missing |= {"lr_warmup_ratio"} if config.lr_schedule == "constant" and config.lr_warmup_ratio else set()
    return {key: getattr(config, key) for key in SETTINGS if key in missing}


def _lora_parameters(config: Config) -> dict[str, Any]:
    if config.train_type == "full":
        return {}
    parameters: dict[str, Any] = {"rank": config.rank, "scale": adapter_scale(config), "dropout": config.dropout}
    # mlx-lm has whole names alone, and none for all linear layers, which it adapts without names.
    keys = [key for key in config.lora_keys if key != ALL_LINEAR]
    return {"lora_parameters": parameters | ({"keys": keys} if keys else {})}


def _start(config: Config) -> dict[str, str]:
    """The file of the adapters that the run starts from; {} without any, or where it cannot be found."""
    try:
        return {"resume_adapter_file": str(find_adapter(config.adapter).weights)} if config.adapter else {}
    except UserError:
        return {}


def _quantization_flags(config: Config) -> dict[str, Any]:
    return {key: True for key, kind in QUANTIZATION_FLAGS.items() if kind == config.quantization}


def _schedule(config: Config) -> dict[str, Any]:
    """mlx-lm's `lr_schedule` mapping. It counts the decay in steps, so a run whose length is in epochs has none."""
    if config.lr_schedule == "constant" or config.lr_schedule not in _SUPPORTED_SCHEDULES or config.epochs:
        return {}
    steps, final = round(config.lr_decay_fraction * config.iters), final_rate(config.learning_rate, config.lr_final)
    named = {"cosine": ("cosine_decay", [config.learning_rate, steps, final]),
             "linear": ("linear_schedule", [config.learning_rate, final, steps])}  # fmt: skip
    name, arguments = named[config.lr_schedule]
    warmup = {"warmup": warmup_updates(config, config.iters), "warmup_init": config.lr_warmup_init}
    return {"lr_schedule": {"name": name, "arguments": arguments, **warmup}}


def _optimizer(config: Config) -> dict[str, Any]:
    if config.optimizer not in _SUPPORTED_OPTIMIZERS:
        return {}
    own: dict[str, Any] = {"weight_decay": config.weight_decay} if config.optimizer != "adam" else {}
    if config.optimizer != "muon":
        own |= {"betas": [config.adam_beta1, config.adam_beta2]}
        own |= {"eps": config.adam_epsilon} if config.adam_epsilon != SETTINGS["adam_epsilon"].default else {}
    return {"optimizer_config": {config.optimizer: own}}


def _rewards(config: Config) -> dict[str, Any]:
    """Names as comma-separated text and weights as text in brackets, as its command line reads them."""
    weights = {"reward_weights": str(list(config.reward_weights))} if config.reward_weights else {}
    return {"reward_functions": ",".join(config.reward_functions), **weights}
