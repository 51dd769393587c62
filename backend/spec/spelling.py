"""Other people's words for our settings: mlx-lm-lora's and TRL's spellings, read and turned into ours.

Works on the raw mapping of a YAML file or the form; values are moved and regrouped here, never judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from backend.spec.faults import Fault

Raw = dict[str, Any]

RENAMED = {
    "num_generations": "group_size",
    "loss_type": "grpo_loss_type",
    "max_grad_norm_clip": "max_grad_norm",
    "fine_tune_type": "train_type",
    "num_train_epochs": "epochs",
    "max_steps": "iters",
    "gradient_checkpointing": "grad_checkpoint",
    "ref_model": "reference_model_path",
    "lr_scheduler_type": "lr_schedule",
}
"""Another program's key → ours, where only the word differs."""

CHOICES = {
    "lr_schedule": {
        "cosine_decay": "cosine",
        "cosine decay": "cosine",
        "linear_decay": "linear",
        "linear_schedule": "linear",
    },
    "quantization": {"": "none", "4-bit": "4", "6-bit": "6", "8-bit": "8", "4bit": "4", "6bit": "6", "8bit": "8"},
    "scale_rewards": {"true": "group", "false": "none"},
    "grpo_loss_type": {"dr-grpo": "dr_grpo", "dr grpo": "dr_grpo"},
    "importance_sampling_level": {"": "token", "default": "token"},
}
"""Other spellings of a menu's values, lower case."""

WITHOUT_EFFECT = {
    "train": "every run here trains",
    "adapter_path": "adapters are written into the run folder",
    "qat_enable": "quantisation-aware training does not apply to GRPO",
}
"""Keys of mlx-lm-lora that are accepted and change nothing → why."""

LOAD_IN = {"load_in_4bits": "4", "load_in_6bits": "6", "load_in_8bits": "8", "load_in_mxfp4": "mxfp4"}


def translate(raw: Mapping[str, Any]) -> tuple[Raw, list[Fault]]:
    """`raw` with every known foreign spelling replaced by ours, and what could not be read that way.

    A key with the value None means "not given" unless None is a value of its own; such keys are dropped.
    """
    values: Raw = {RENAMED.get(str(key), str(key)): value for key, value in raw.items() if key not in WITHOUT_EFFECT}
    faults: list[Fault] = []
    for regroup in (_dataset, _lora_parameters, _load_in, _lr_schedule, _reward_lists, _stop):
        faults += regroup(values)
    for key, words in CHOICES.items():
        if key in values:
            values[key] = _choice(values[key], words)
    return {key: value for key, value in values.items() if value is not None}, faults


def _choice(value: Any, words: Mapping[str, str]) -> Any:
    if value is None and "" not in words:
        return None
    text = "" if value is None else str(value).strip().lower()
    return words.get(text, text)


def _dataset(values: Raw) -> list[Fault]:
    """`dataset:` holds one id or path, or a list with one."""
    for key in ("dataset", "data"):
        if isinstance(values.get(key), list):
            listed = cast("list[Any]", values[key])
            if len(listed) != 1:
                return [Fault("data", f"{key} lists {len(listed)} datasets; give exactly one.")]
            values[key] = listed[0]
    dataset = values.pop("dataset", None)
    if dataset is not None:
        if values.get("data") not in (None, "", dataset):
            return [Fault("data", f"data is {values['data']} and dataset is {dataset}; give one of them.")]
        values["data"] = dataset
    return []


def _lora_parameters(values: Raw) -> list[Fault]:
    """mlx-lm groups rank, scale, dropout (and keys) under `lora_parameters`."""
    parameters = values.pop("lora_parameters", None)
    if parameters is None:
        return []
    if not isinstance(parameters, Mapping):
        return [Fault("lora_parameters", "lora_parameters must be a mapping with rank, scale and dropout.")]
    for name, value in cast("Mapping[str, Any]", parameters).items():
        values.setdefault({"keys": "lora_keys"}.get(name, str(name)), value)
    return []


def _load_in(values: Raw) -> list[Fault]:
    """`load_in_4bits: true` and its sisters say what `quantization` says in one word."""
    given = {key: values.pop(key) for key in LOAD_IN if key in values}
    chosen = [key for key, value in given.items() if _true(value)]
    if len(chosen) > 1:
        return [Fault("quantization", f"{' and '.join(chosen)} are both on; choose one.")]
    if chosen:
        wanted, named = LOAD_IN[chosen[0]], values.get("quantization")
        if named is not None and _choice(named, CHOICES["quantization"]) not in ("none", wanted):
            return [Fault("quantization", f"quantization is {named} but {chosen[0]} is on; keep one of them.")]
        values["quantization"] = wanted
    return []


def _lr_schedule(values: Raw) -> list[Fault]:
    """mlx-lm: {name: cosine_decay, warmup: n, warmup_init: x, arguments: [peak, steps, end]}.

    mlx-lm-lora's window writes arguments as [{…}, {iters_fraction: 0.8}, {value: 2e-6}]-like lists; numbers are what
    both understand, so the last number is the final rate and the first one the peak.
    """
    if not isinstance(values.get("lr_schedule"), Mapping):
        return []
    mapping = cast("Mapping[str, Any]", values["lr_schedule"])
    values["lr_schedule"] = mapping.get("name", "constant")
    for theirs, ours in (("warmup", "lr_warmup_steps"), ("warmup_init", "lr_warmup_init")):
        if theirs in mapping:
            values.setdefault(ours, mapping[theirs])
    arguments = cast("list[Any]", mapping.get("arguments", []))
    if not isinstance(arguments, list) or len(arguments) > 3:  # pyright: ignore
        return [Fault("lr_schedule", "lr_schedule's arguments must be a list of at most three numbers.")]
    if arguments:
        values.setdefault("learning_rate", arguments[0])
    steps = arguments[1] if len(arguments) > 1 else None
    if isinstance(steps, Mapping) and "iters_fraction" in steps:
        values.setdefault("lr_decay_fraction", cast("Mapping[str, Any]", steps)["iters_fraction"])
    elif isinstance(steps, (int, float)) and isinstance(values.get("iters"), int) and values["iters"] > 0:
        values.setdefault("lr_decay_fraction", min(1.0, steps / values["iters"]))
    if len(arguments) > 2:
        values.setdefault("lr_final", arguments[2])
    return []


def _reward_lists(values: Raw) -> list[Fault]:
    """Names and weights may be text, separated by commas, with or without brackets. Empty text means the defaults."""
    for key in ("reward_functions", "reward_weights"):
        value = values.get(key)
        if isinstance(value, str):
            parts = [part.strip().strip("'\"") for part in value.strip().strip("[]").split(",")]
            values[key] = [part for part in parts if part] or None
    return []


def _stop(values: Raw) -> list[Fault]:
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]] if values["stop"] else []
    return []


def _true(value: Any) -> bool:
    return value is True or str(value).strip().lower() in ("true", "yes", "on", "1")
