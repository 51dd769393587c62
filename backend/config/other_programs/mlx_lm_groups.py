"""Words of mlx-lm and mlx-lm-lora that hold several settings, and their iterations, which are batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from backend.config.other_programs.rewriting import Translator, as_bool, as_number
from backend.config.other_programs.spellings import CHOICE_ALIASES, choice
from backend.utils.text import quote

QUANTIZATION_FLAGS = {"load_in_4bits": "4", "load_in_6bits": "6", "load_in_8bits": "8", "load_in_mxfp4": "mxfp4"}
PRECISION_FLAGS = {"bf16": "bfloat16", "fp16": "float16"}
_ITERS = 1000
"""Default of `iters`, here and in mlx-lm."""


def other_delta(to: Translator) -> None:
    """`delta` is DPO's in a file that names the DPO loss too, and not our bound on the ratio."""
    if to.has("delta") and "dpo_cpo_loss_type" in to.written:
        to.take("delta")
        to.remark("delta", "without effect: beside dpo_cpo_loss_type it belongs to another way of training")


def accumulation(to: Translator) -> None:
    """In a file for mlx-lm-lora an iteration is one batch; the k-th and the last one update the weights (its grpo_trainer.py).

    Here a step is k batches and one update: as many steps as it makes updates, which are as many prompts where k divides the
    iterations, and what is counted in iterations is divided by k too.
    """
    if (k := to.take("grad_accumulation_steps")) is not None:
        to.fill("gradient_accumulation_steps", k, "grad_accumulation_steps")
    if to.program != "mlx_lm_lora":
        return
    if to.has("iters") and to.has("epochs"):
        to.take("epochs")
        to.remark("epochs", "iters is given, which comes first in mlx-lm-lora")
    k = as_number(to.values.get("gradient_accumulation_steps"), 1.0)
    if k is None or k <= 1 or k != int(k):
        return
    iters = as_number(to.values.get("iters"))
    if iters is not None and iters >= 1:
        steps = math.ceil(iters / k)
        rest = "" if iters % k == 0 else f"; its last update has {iters % k:g} batches there and {k:g} here"
        to.values["iters"] = steps
        to.remark(
            "gradient_accumulation_steps", f"its {iters:g} iterations are {steps} updates of {k:g} batches each{rest}"
        )
    for word in ("steps_per_report", "steps_per_eval", "save_every"):
        every = as_number(to.values.get(word))
        if every is not None and every >= 1:
            to.values[word] = max(1, math.ceil(every / k))


def lora_parameters(to: Translator) -> None:
    """mlx-lm groups rank, scale, dropout (and keys) under `lora_parameters`."""
    parameters = to.take("lora_parameters")
    if parameters is None:
        return
    if not isinstance(parameters, Mapping):
        return to.refuse("lora_parameters", "lora_parameters must be a mapping with rank, scale and dropout.")
    for name, value in cast("Mapping[Any, Any]", parameters).items():
        ours = {"keys": "lora_keys", "alpha": "lora_alpha"}.get(name, str(name))
        if value is not None and to.values.setdefault(ours, value) != value:
            both = f"{quote(ours, 30)} is {quote(to.values[ours], 40)}, and {quote(value, 40)} in lora_parameters"
            to.refuse(ours, f"{both}; give one of them.")
    return None


def quantization_flags(to: Translator) -> None:
    """`load_in_4bits: true` and its variants become one value of `quantization`, TRL's `bf16: true` one of `dtype`."""
    _merge_flags(to, "quantization", QUANTIZATION_FLAGS, "none")
    _merge_flags(to, "dtype", PRECISION_FLAGS, "auto")


def _merge_flags(to: Translator, ours: str, choices: Mapping[str, str], default: str) -> None:
    """At most one of several flags may be on, and sets our setting to its choice."""
    flags = {flag: to.take(flag) for flag in choices if to.has(flag)}
    odd = [flag for flag, value in flags.items() if as_bool(value) is None]
    chosen = [flag for flag, value in flags.items() if as_bool(value)]
    if odd:
        to.refuse(ours, f"{odd[0]} must be true or false, not {quote(flags[odd[0]])}.")
    elif len(chosen) > 1:
        to.refuse(ours, f"{' and '.join(chosen)} are both on; choose one.")
    elif chosen:
        named = to.values.get(ours)
        if named is not None and choice(named, CHOICE_ALIASES[ours]) not in (default, choices[chosen[0]]):
            return to.refuse(ours, f"{ours} is {quote(named)} but {chosen[0]} is on; keep one of them.")
        to.values[ours] = choices[chosen[0]]
    return None


_OPTIMIZER_SETTINGS = {
    "weight_decay": ("weight_decay",),
    "betas": ("adam_beta1", "adam_beta2"),
    "eps": ("adam_epsilon",),
}


_OPTIMIZER_WORDS = ("optimizer_config", "optimizer", "learning_rate", "model")
_BIAS_CORRECTION = "Adam corrects its bias here always, and there only with bias_correction, so the first updates are about three times as large there"


def optimizer_config(to: Translator) -> None:
    """mlx-lm has a mapping of settings per optimizer; only the mapping of the optimizer in use counts."""
    every: Any = to.take("optimizer_config")
    optimizer = str(to.values.get("optimizer", "adamw"))
    own: Any = cast("Mapping[str, Any]", every).get(optimizer) if isinstance(every, Mapping) else every
    if not isinstance(own or {}, Mapping):
        return to.refuse("optimizer", "optimizer_config must be a mapping of optimizers to their settings.")
    if to.program == "mlx_lm_lora" and optimizer in ("adam", "adamw") and "bias_correction" not in (own or {}):
        told_at = next(word for word in (*_OPTIMIZER_WORDS, *to.written) if word in to.written)
        to.remark(told_at, _BIAS_CORRECTION)
    for name, value in cast("Mapping[str, Any]", own or {}).items():
        if name == "bias_correction" and as_bool(value) is not None:
            if not as_bool(value):
                to.refuse("optimizer", "Adam's bias correction is always on here; take bias_correction out.")
            continue
        ours = _OPTIMIZER_SETTINGS.get(name)
        parts: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
        if ours is None or len(parts) != len(ours):
            has = f"optimizer_config has {quote(name, 30)}: {quote(cast('object', value))}"
            to.refuse("optimizer", f"{has}, which has no place here; take it out.")
            continue
        for key, part in zip(ours, parts, strict=True):
            to.suggest(key, part)
    return None


_SCHEDULES = {
    "cosine": ("peak", "steps", "end"),
    "linear": ("peak", "end", "steps"),
    "exponential": ("peak", "factor"),
    "step": ("peak", "factor", "every"),
}
"""Arguments of mlx's `cosine_decay`, `linear_schedule`, `exponential_decay` and `step_decay`, in order."""


def lr_schedule(to: Translator) -> None:
    """mlx-lm: {name: cosine_decay, arguments: [peak, steps, end], warmup: n, warmup_init: x}.

    As in mlx-lm, the first argument is the peak whatever `learning_rate` says, and missing arguments are 0. Our own keys
    beside the mapping take precedence. Its steps are updates of the weights.
    """
    if not isinstance(to.values.get("lr_schedule"), Mapping):
        return None
    mapping = cast("Mapping[str, Any]", to.values["lr_schedule"])
    kind, arguments = choice(mapping.get("name"), CHOICE_ALIASES["lr_schedule"]), mapping.get("arguments")
    if kind is None or not isinstance(arguments, list) or not 1 <= len(cast("list[Any]", arguments)) <= 3:
        sentence = (
            "lr_schedule must be a word, or a mapping with a name and arguments, a list of at most three numbers."
        )
        return to.refuse("lr_schedule", sentence)
    by_name = dict(zip(_SCHEDULES.get(kind, ()), cast("list[Any]", arguments), strict=False))
    to.values["lr_schedule"] = kind
    if not by_name:
        return None
    if kind in ("exponential", "step") and to.values.get("epochs"):
        sentence = "lr_schedule counts the fall in steps, but the run is counted in epochs; give its name and lr_final in place of arguments."
        return to.refuse("lr_schedule", sentence)
    if "steps" in by_name and to.values.get("epochs") and not to.has("lr_decay_fraction"):
        sentence = "lr_schedule counts the fall in steps, but the run is counted in epochs; give lr_decay_fraction too."
        return to.refuse("lr_decay_fraction", sentence)
    to.values["learning_rate"] = by_name["peak"]
    if kind in ("exponential", "step"):
        _falls_by_factors(to, by_name)
    else:
        to.suggest("lr_final", by_name.get("end", 0.0))
        if "steps" in by_name:
            to.suggest("lr_decay_fraction", _share(by_name["steps"], to.values.get("iters") or _ITERS))
    to.suggest("lr_warmup_steps", mapping.get("warmup", 0))
    to.suggest("lr_warmup_init", mapping.get("warmup_init", 0.0))
    return None


def _share(steps: Any, iters: Any) -> Any:
    try:
        return float(steps) / float(iters)
    except (TypeError, ValueError, ArithmeticError):
        return steps  # not a number: validation reports it


def _falls_by_factors(to: Translator, arguments: Mapping[str, Any]) -> None:
    """mlx's factor an update, or every few of them, as the rate that the run ends with and the number of falls."""
    try:
        peak, factor, every = (float(arguments.get(name, 1)) for name in ("peak", "factor", "every"))
        iters = int(to.values.get("iters") or _ITERS)
        falls = math.ceil(iters / every)
        final = peak * factor**falls
    except (TypeError, ValueError, ArithmeticError):
        sentence = "lr_schedule must have its arguments as numbers: the rate, the factor, and for steps their length."
        return to.refuse("lr_schedule", sentence)
    to.suggest("lr_final", final)
    to.suggest("lr_decay_fraction", falls * every / iters)
    if "every" in arguments:
        to.suggest("lr_cycles", falls)
    return None


_DATASET_PARTS = {
    "path": "data", "train_split": "train_split", "valid_split": "valid_split", "test_split": "test_split",
    "prompt_feature": "prompt_feature", "completion_feature": "answer_feature", "answer_feature": "answer_feature",
}  # fmt: skip


def hugging_face_dataset(to: Translator) -> None:
    """`hf_dataset`: one dataset of the Hub with its splits and columns, as mlx-lm has it."""
    entry: Any = to.take("hf_dataset")
    if isinstance(entry, list) and len(cast("list[Any]", entry)) == 1:
        entry = cast("list[Any]", entry)[0]
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        return to.refuse(
            "hf_dataset", "hf_dataset must be one mapping with a path; mix several datasets into one file first."
        )
    for name, value in cast("Mapping[str, Any]", entry).items():
        if name == "config" and isinstance(value, Mapping):
            to.suggest("dataset_config", cast("Mapping[str, Any]", value).get("name", ""))
        elif name == "mask_prompt" or value is None:
            continue
        elif name in _DATASET_PARTS:
            to.fill(_DATASET_PARTS[name], value, "hf_dataset")
        else:
            to.refuse("hf_dataset", f"hf_dataset has {quote(name, 40)}, which has no place here; take it out.")
    return None


def wandb(to: Translator) -> None:
    """`wandb: project`, or `wand`, as the example files have it."""
    project = to.take("wandb", "wand")
    if project is None or str(project).strip() in ("", "False", "None"):
        return
    to.suggest("report_to", ["wandb"])
    if not isinstance(project, bool):
        to.suggest("tracker_project", str(project))
