"""Translates the keys and values of mlx-lm-lora, mlx-lm and TRL into our settings.

Works on the raw mapping of a YAML file or of the form. Values are renamed, moved and regrouped here, never validated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from backend.spec.faults import Fault
from backend.spec.rewards.entry import split_names
from backend.spec.user_input.text import shown

Raw = dict[str, Any]

KEY_ALIASES = {
    "num_generations": "group_size",
    "loss_type": "grpo_loss_type",
    "max_grad_norm_clip": "max_grad_norm",
    "fine_tune_type": "train_type",
    "num_train_epochs": "epochs",
    "max_steps": "iters",
    "gradient_checkpointing": "grad_checkpoint",
    "ref_model": "reference_model_path",
    "lr_scheduler_type": "lr_schedule",
    "torch_dtype": "dtype",
    "early_stopping_threshold": "early_stopping_min_delta",
}
"""Another program's key → ours, where only the name differs."""

CHOICE_ALIASES = {
    "lr_schedule": {
        "cosine_decay": "cosine",
        "cosine decay": "cosine",
        "linear_decay": "linear",
        "linear_schedule": "linear",
        "cosine_with_min_lr": "cosine",
        "exponential_decay": "exponential",
        "step_decay": "step",
    },
    "quantization": {"": "none", "4-bit": "4", "6-bit": "6", "8-bit": "8", "4bit": "4", "6bit": "6", "8bit": "8"},
    "dtype": {
        **dict.fromkeys(("", "none"), "auto"),
        **dict.fromkeys(("fp32", "float", "torch.float32"), "float32"),
        **dict.fromkeys(("bf16", "torch.bfloat16"), "bfloat16"),
        **dict.fromkeys(("fp16", "half", "torch.float16"), "float16"),
    },
    "scale_rewards": {"true": "group", "false": "none"},
    "grpo_loss_type": {"dr-grpo": "dr_grpo", "dr grpo": "dr_grpo"},
    "importance_sampling_level": {"": "token", "default": "token"},
}
"""Other spellings of a menu's values, lower case."""

_QAT = "quantisation-aware training does not apply to GRPO"
_JUDGE = "GRPO asks reward functions, and no judge"
_OTHER_LOSS = "it belongs to another way of training"
_OTHER_COLUMN = "GRPO reads prompt, answer, type and system"
IGNORED = {
    "train": "every run here trains",
    "config": "the file is read already",
    "model_family": "text models are what is trained here",
    "adapter_path": "adapters are written into the run folder",
    "wandb": "every run is recorded in its own folder",
    "recurrence_chunk_size": "long texts are read in pieces of the sequence step size",
    "fuse_dequantize": "what is fused keeps the model's own precision",
    "fuse_remove_adapters": "adapters are kept beside the fused model",
    **dict.fromkeys(("qat_enable", "qat_bits", "qat_group_size", "qat_mode", "qat_start_step", "qat_interval"), _QAT),
    **dict.fromkeys(("judge", "judge_config", "judge_system", "alpha"), _JUDGE),
    **dict.fromkeys(("sft_loss_type", "dpo_cpo_loss_type", "reward_scaling"), _OTHER_LOSS),
    **dict.fromkeys(("lambda_mse_target", "tau_mse_target", "lambda_mse", "clip_epsilon_logits"), _OTHER_LOSS),
    **dict.fromkeys(("completion_feature", "chosen_feature", "rejected_feature"), _OTHER_COLUMN),
    **dict.fromkeys(("chat_feature", "text_feature", "preference_score_feature"), _OTHER_COLUMN),
}
"""Keys of mlx-lm-lora and its studio that are accepted and change nothing → why."""

QUANTIZATION_FLAGS = {"load_in_4bits": "4", "load_in_6bits": "6", "load_in_8bits": "8", "load_in_mxfp4": "mxfp4"}

PRECISION_FLAGS = {"bf16": "bfloat16", "fp16": "float16"}

EMPTY_MEANS_DEFAULT = (
    *("prompt_feature", "answer_feature", "type_feature", "system_feature"),
    *("train_split", "valid_split", "test_split"),
)
"""Columns and splits that may be left empty, as the form's fields may."""

FOREIGN_KEYS = (*KEY_ALIASES, *QUANTIZATION_FLAGS, *PRECISION_FLAGS, "dataset", "lora_parameters", "optimizer_config")
"""Keys that are translated and are none of ours: suggested for a misspelt key."""


def ignored_keys(raw: Mapping[str, Any]) -> dict[str, str]:
    """Keys of `raw` that are accepted and have no effect → why. Keys without a value (null, "") are left out."""
    ignored = {key: IGNORED[key] for key, value in raw.items() if key in IGNORED and value not in (None, "")}
    return ignored | ({"delta": _OTHER_LOSS} if _is_dpo_delta(raw) else {})


def other_names(key: str) -> list[str]:
    """Names of one of our settings in other programs."""
    grouped = {"data": ["dataset"], "quantization": list(QUANTIZATION_FLAGS), "lora_keys": ["keys"]}
    grouped["dtype"] = list(PRECISION_FLAGS)
    grouped |= {name: [f"lora_parameters {name}"] for name in ("rank", "scale", "dropout")}
    return [theirs for theirs, ours in KEY_ALIASES.items() if ours == key] + grouped.get(key, [])


def _is_dpo_delta(raw: Mapping[str, Any]) -> bool:
    """Whether `delta` is DPO's, as in mlx-lm-lora, and not our bound on the ratio: its files name the DPO loss too."""
    return raw.get("delta") is not None and "dpo_cpo_loss_type" in raw


def translate(raw: Mapping[str, Any]) -> tuple[Raw, list[Fault]]:
    """(`raw` in our keys and values, faults for what could not be translated).

    A key with the value None counts as absent and is dropped, and so is every key with a fault.
    """
    values, faults = _rename_keys(raw)
    if _is_dpo_delta(raw):
        del values["delta"]
    for regroup in (*_GROUPS, _ungroup_lr_schedule, _split_reward_lists, _listify_stop, _drop_empty_names):
        faults += regroup(values)
    for key, aliases in CHOICE_ALIASES.items():
        if key in values:
            values[key] = _choice(values[key], aliases)
    faulty = {fault.setting for fault in faults}
    return {key: value for key, value in values.items() if value is not None and key not in faulty}, faults


def _rename_keys(raw: Mapping[str, Any]) -> tuple[Raw, list[Fault]]:
    values: Raw = {}
    faults: list[Fault] = []
    written_as: dict[str, str] = {}  # our key → the key as written
    for key, value in ((str(key), value) for key, value in raw.items() if key not in IGNORED):
        ours = KEY_ALIASES.get(key, key)
        before = values.get(ours)
        if before is not None and value is not None and value != before:
            faults.append(
                Fault(
                    ours,
                    f"{shown(written_as[ours], 30)} is {shown(before, 40)} and {shown(key, 30)} is {shown(value, 40)}; give one of them.",
                )
            )
        if before is None:
            values[ours], written_as[ours] = value, key
    return values, faults


def _choice(value: Any, aliases: Mapping[str, str]) -> Any:
    if value is None and "" not in aliases:
        return None
    if isinstance(value, (list, Mapping)):
        return value  # pyright: ignore  (no menu has it: validation reports it)
    text = "" if value is None else str(value).strip().lower()
    return aliases.get(text, text)


def _merge_dataset(values: Raw) -> list[Fault]:
    """`dataset:` holds one id or path, or a list with one."""
    names = {key: values.pop(key) for key in ("dataset", "data") if values.get(key) not in (None, "")}
    for key, value in names.items():
        if isinstance(value, list):
            listed = cast("list[Any]", value)
            if len(listed) != 1:
                return [Fault("data", f"{key} lists {len(listed)} datasets; give exactly one.")]
            names[key] = listed[0]
    if len(names) == 2 and names["data"] != names["dataset"]:
        return [
            Fault(
                "data",
                f"data is {shown(names['data'], 60)} and dataset is {shown(names['dataset'], 60)}; give one of them.",
            )
        ]
    values.pop("dataset", None)
    if names:
        values["data"] = next(iter(names.values()))
    return []


def _ungroup_lora_parameters(values: Raw) -> list[Fault]:
    """mlx-lm groups rank, scale, dropout (and keys) under `lora_parameters`."""
    parameters = values.pop("lora_parameters", None)
    if parameters is None:
        return []
    if not isinstance(parameters, Mapping):
        return [Fault("lora_parameters", "lora_parameters must be a mapping with rank, scale and dropout.")]
    faults: list[Fault] = []
    for name, value in cast("Mapping[str, Any]", parameters).items():
        ours = {"keys": "lora_keys"}.get(name, str(name))
        if value is not None and not _fill(values, ours, value):
            both = f"{shown(ours, 30)} is {shown(values[ours], 40)}, and {shown(value, 40)} in lora_parameters"
            faults.append(Fault(ours, f"{both}; give one of them."))
    return faults


def _merge_quantization_flags(values: Raw) -> list[Fault]:
    """`load_in_4bits: true` and its variants become one value of `quantization`."""
    return _merge_flags(values, "quantization", QUANTIZATION_FLAGS, "none")


def _merge_precision_flags(values: Raw) -> list[Fault]:
    """TRL's `bf16: true` and `fp16: true` become a value of `dtype`."""
    return _merge_flags(values, "dtype", PRECISION_FLAGS, "auto")


def _merge_flags(values: Raw, ours: str, choices: Mapping[str, str], default: str) -> list[Fault]:
    """At most one of several flags may be on, and sets our setting to its choice."""
    flags = {key: values.pop(key) for key in choices if key in values}
    odd = [key for key, value in flags.items() if _as_bool(value) is None]
    if odd:
        odd_value: object = flags[odd[0]]  # pyright: ignore
        return [Fault(ours, f"{odd[0]} must be true or false, not {shown(odd_value)}.")]
    chosen = [key for key, value in flags.items() if _as_bool(value)]
    if len(chosen) > 1:
        return [Fault(ours, f"{' and '.join(chosen)} are both on; choose one.")]
    if chosen:
        choice, named = choices[chosen[0]], values.get(ours)
        if named is not None and _choice(named, CHOICE_ALIASES[ours]) not in (default, choice):
            return [Fault(ours, f"{ours} is {shown(named)} but {chosen[0]} is on; keep one of them.")]
        values[ours] = choice
    return []


_OPTIMIZER_SETTINGS = {
    "weight_decay": ("weight_decay",),
    "betas": ("adam_beta1", "adam_beta2"),
    "eps": ("adam_epsilon",),
}


def _ungroup_optimizer_config(values: Raw) -> list[Fault]:
    """mlx-lm has a mapping of settings per optimizer; only the mapping of the optimizer in use counts."""
    every: Any = values.pop("optimizer_config", None)
    optimizer = str(values.get("optimizer", "adamw"))
    own: Any = cast("Mapping[str, Any]", every).get(optimizer) if isinstance(every, Mapping) else every
    if not isinstance(own or {}, Mapping):
        return [Fault("optimizer", "optimizer_config must be a mapping of optimizers to their settings.")]
    faults: list[Fault] = []
    for name, value in cast("Mapping[str, Any]", own or {}).items():
        ours = _OPTIMIZER_SETTINGS.get(name)
        parts: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
        if name == "bias_correction":
            if _as_bool(value) is not True:
                faults.append(Fault("optimizer", "Adam's bias correction is always on here; take bias_correction out."))
            continue
        if ours is None or len(parts) != len(ours):
            faults.append(
                Fault(
                    "optimizer",
                    f"optimizer_config has {shown(name, 30)}: {shown(cast('object', value))}, which has no place here; take it out.",
                )
            )
            continue
        for key, part in zip(ours, parts, strict=True):
            _fill(values, key, part)
    return faults


_GROUPS = (
    _merge_dataset,
    _ungroup_lora_parameters,
    _merge_quantization_flags,
    _merge_precision_flags,
    _ungroup_optimizer_config,
)
"""Translations of keys that hold several settings, or of several keys that hold one setting."""

_SCHEDULES = {
    "cosine": ("peak", "steps", "end"),
    "linear": ("peak", "end", "steps"),
    "exponential": ("peak", "factor"),
    "step": ("peak", "factor", "every"),
}
"""Arguments of mlx's `cosine_decay`, `linear_schedule`, `exponential_decay` and `step_decay`, in order."""
_MLX_LM_ITERS = 1000
"""Default of `iters`, here and in mlx-lm."""


def _ungroup_lr_schedule(values: Raw) -> list[Fault]:
    """mlx-lm: {name: cosine_decay, arguments: [peak, steps, end], warmup: n, warmup_init: x}.

    As in mlx-lm, the first argument is the peak whatever `learning_rate` says, and missing arguments are 0. Our own keys
    beside the mapping take precedence.
    """
    if not isinstance(values.get("lr_schedule"), Mapping):
        return []
    mapping = cast("Mapping[str, Any]", values["lr_schedule"])
    kind = _choice(mapping.get("name"), CHOICE_ALIASES["lr_schedule"])
    arguments = mapping.get("arguments")
    if kind is None or not isinstance(arguments, list) or not 1 <= len(cast("list[Any]", arguments)) <= 3:
        sentence = (
            "lr_schedule must be a word, or a mapping with a name and arguments, a list of at most three numbers."
        )
        return [Fault("lr_schedule", sentence)]
    arguments_by_name = dict(zip(_SCHEDULES.get(kind, ()), cast("list[Any]", arguments), strict=False))
    values["lr_schedule"] = kind
    if "steps" in arguments_by_name and values.get("epochs") and values.get("lr_decay_fraction") is None:
        sentence = "lr_schedule counts the fall in steps, but the run is counted in epochs; give lr_decay_fraction too."
        return [Fault("lr_decay_fraction", sentence)]
    if not arguments_by_name:
        return []
    values["learning_rate"] = arguments_by_name["peak"]
    if kind in ("exponential", "step"):
        return _fill_factors(values, arguments_by_name, mapping)
    _fill_schedule(values, arguments_by_name, mapping)
    return []


def _fill_factors(values: Raw, arguments: Mapping[str, Any], mapping: Mapping[str, Any]) -> list[Fault]:
    """Fill our schedule keys from mlx's factor an iteration, or every few of them: the rate that the run ends with, and its falls."""
    try:
        peak, factor, every = (float(arguments.get(name, 1)) for name in ("peak", "factor", "every"))
        iters = int(values.get("iters") or _MLX_LM_ITERS)
        falls = math.ceil(iters / every)
        final = peak * factor**falls
    except (TypeError, ValueError, ArithmeticError):
        return [
            Fault(
                "lr_schedule",
                "lr_schedule must have its arguments as numbers: the rate, the factor, and for steps their length.",
            )
        ]
    if values.get("epochs"):
        sentence = "lr_schedule counts the fall in steps, but the run is counted in epochs; give its name and lr_final in place of arguments."
        return [Fault("lr_schedule", sentence)]
    _fill(values, "lr_final", final)
    _fill(values, "lr_decay_fraction", falls * every / iters)
    if "every" in arguments:
        _fill(values, "lr_cycles", falls)
    _fill(values, "lr_warmup_steps", mapping.get("warmup", 0))
    _fill(values, "lr_warmup_init", mapping.get("warmup_init", 0.0))
    return []


def _fill_schedule(values: Raw, arguments: Mapping[str, Any], mapping: Mapping[str, Any]) -> None:
    """Fill our four schedule keys from mlx-lm's mapping."""
    _fill(values, "lr_final", arguments.get("end", 0.0))
    _fill(values, "lr_warmup_steps", mapping.get("warmup", 0))
    _fill(values, "lr_warmup_init", mapping.get("warmup_init", 0.0))
    if "steps" in arguments:
        try:
            share = float(arguments["steps"]) / float(values.get("iters") or _MLX_LM_ITERS)
        except (TypeError, ValueError, ZeroDivisionError):
            share = arguments["steps"]  # not a number: validation reports it
        _fill(values, "lr_decay_fraction", share)


def _split_reward_lists(values: Raw) -> list[Fault]:
    """Names and weights may be comma-separated text, with or without brackets; a single weight may be a bare number. Empty text
    means the defaults."""
    for key in ("reward_functions", "reward_weights"):
        value = values.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            values[key] = [value]
        if key == "reward_functions" and _is_text(value):
            names = split_names(cast("str | list[Any]", value))
            values[key] = names or (None if isinstance(value, str) else [])
        elif isinstance(value, str):
            parts = [part.strip().strip("'\"") for part in value.strip().strip("[]").split(",")]
            values[key] = [part for part in parts if part] or None
    return []


def _is_text(value: Any) -> bool:
    """Text, or a list of texts."""
    parts: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
    return all(isinstance(part, str) for part in parts)


def _listify_stop(values: Raw) -> list[Fault]:
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]] if values["stop"] else []
    return []


def _drop_empty_names(values: Raw) -> list[Fault]:
    for key in EMPTY_MEANS_DEFAULT:
        if values.get(key) == "":
            del values[key]
    return []


def _fill(values: Raw, key: str, value: Any) -> bool:
    """Set a key that has no value; returns whether the key has `value` then."""
    if values.get(key) is None:
        values[key] = value
    return values[key] == value


def _as_bool(value: Any) -> bool | None:
    """True, False, or None for neither. None itself is False."""
    text = str(value).strip().lower()
    return (
        True if text in ("true", "yes", "on", "1") else False if text in ("false", "no", "off", "0", "none") else None
    )
