"""The keys of mlx-lm-lora 5.10, MLX LoRA Studio, mlx-lm 0.32, and mlx-grpo (its README, and its TrainingArgs)."""

import math
from collections.abc import Mapping
from typing import Any

from backend.config.other_programs.keys import (
    CHOICE_ALIASES,
    OPTIMIZER_ARGS,
    TABLES,
    OtherProgram,
    Translator,
    as_bool,
    as_number,
    choice,
    tables_of,
)
from backend.utils.text import quote

_ITERS = 1000  # default of `iters`, here and in mlx-lm
OTHER_MODES = {mode: nearest for nearest, modes in TABLES["modes"].items() for mode in modes.split()}
"""Mode that is not built → what is nearest here, as a clause."""


def _is_mlx_lm(raw: Mapping[str, Any]) -> bool:
    """True for a file of `mlx_lm.lora`, which imitates answers: it has no mode, and no key of GRPO."""
    return raw.get("fine_tune_type") is not None and not any(raw.get(key) is not None for key in _OF_GRPO)


def _defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    if _is_mlx_lm(raw):
        return TABLES["defaults"]["mlx_lm"]
    has_length = raw.get("iters") is not None or raw.get("epochs") is not None
    imitates = {"mask_prompt": False} if str(raw.get("train_mode")).lower() == "sft" else {}
    return imitates | TABLES["defaults"]["mlx_lm_lora"] | ({} if has_length else {"iters": 100})


_OF_GRPO = ("train_mode", "group_size", "reward_functions", "reward_functions_file", "max_completion_length")
_LABELS = {"completion_feature": "completion_feature", "chat_feature": "messages_feature", "mask_prompt": "mask_prompt"}
_DATASET_PARTS = {
    **{name: name for name in ("train_split", "valid_split", "test_split", "prompt_feature", "answer_feature")},
    "path": "data",
    "config": "dataset_config",
    "completion_feature": "answer_feature",
}


def _mode(to: Translator) -> None:
    if _is_mlx_lm(to.values):
        to.values["train_mode"] = "sft"
        to.remarks["fine_tune_type"] = "mlx-lm imitates answers (train_mode: sft)"
    mode = str(to.values.get("train_mode", "")).strip().lower()
    if mode == "sft":
        to.values["train_mode"] = mode
    if nearest := OTHER_MODES.get(mode.replace("-", "_")):
        to.refuse("train_mode", f"There is no mode {mode} here: {nearest}.")


def _hugging_face_dataset(to: Translator) -> None:
    if "dpo_cpo_loss_type" in to.written and to.take("delta") is not None:
        to.remarks["delta"] = "beside dpo_cpo_loss_type it belongs to another way of training"
    entry: Any = to.take("hf_dataset")
    if isinstance(entry, list) and len(entry) == 1:
        entry = entry[0]
    if not isinstance(entry, Mapping | None):
        sentence = "hf_dataset must be one mapping with a path; mix several datasets into one file first."
        to.refuse("hf_dataset", sentence)
        return
    parts = dict(entry or {})
    if isinstance(config := parts.get("config"), Mapping):
        parts["config"] = config.get("name", "")
    imitates = str(to.values.get("train_mode", "")).strip().lower() == "sft"
    to.spread("hf_dataset", parts, _DATASET_PARTS | (_LABELS if imitates else {}), ("mask_prompt",))


def _lora_parameters(to: Translator) -> None:
    parameters = to.take("lora_parameters")
    if not isinstance(parameters, Mapping | None):
        to.refuse("lora_parameters", "lora_parameters must be a mapping with rank, scale and dropout.")
        return
    for name, value in (parameters or {}).items():
        to.fill({"keys": "lora_keys", "alpha": "lora_alpha"}.get(name, str(name)), value, "lora_parameters")


_BIAS_CORRECTION = (
    "Adam corrects its bias here always, and there only with bias_correction, so the first updates are about three "
    "times as large there"
)


def _optimizer_config(to: Translator) -> None:
    every: Any = to.take("optimizer_config")
    optimizer = str(to.values.get("optimizer", "adamw"))
    own: Any = every.get(optimizer) if isinstance(every, Mapping) else every
    if not isinstance(own or {}, Mapping):
        to.refuse("optimizer", "optimizer_config must be a mapping of optimizers to their settings.")
        return
    options = dict(own or {})
    if to.program == "mlx_lm_lora" and optimizer in ("adam", "adamw") and "bias_correction" not in options:
        places = ("optimizer_config", "optimizer", "learning_rate", "model", *to.written)
        to.remarks[next(word for word in places if word in to.written)] = _BIAS_CORRECTION
    if not as_bool(options.pop("bias_correction", True)):
        to.refuse("optimizer", "Adam's bias correction is always on here; take bias_correction out.")
    if isinstance(betas := options.get("betas"), list) and len(betas) == 2:
        del options["betas"]
        options |= {"beta1": betas[0], "beta2": betas[1]}
    to.spread("optimizer_config", options, OPTIMIZER_ARGS)


def _wandb(to: Translator) -> None:
    project = to.take("wandb", "wand")
    if project is not None and str(project).strip() not in ("", "False", "None"):
        to.values.setdefault("report_to", ["wandb"])
        if not isinstance(project, bool):
            to.values.setdefault("tracker_project", str(project))


def _accumulation(to: Translator) -> None:
    """In mlx-lm-lora an iteration is one batch; the k-th and the last one update the weights (its grpo_trainer.py). A
    step here is k batches and one update, so what is counted in iterations is divided by k."""
    to.fill("gradient_accumulation_steps", to.take("grad_accumulation_steps"), "grad_accumulation_steps")
    if to.program != "mlx_lm_lora":
        return
    if to.has("iters") and to.take("epochs") is not None:
        to.remarks["epochs"] = "iters is given, which comes first in mlx-lm-lora"
    k = as_number(to.values.get("gradient_accumulation_steps"), 1.0)
    counted = ("iters", "steps_per_report", "steps_per_eval", "save_every") if k > 1 and k == int(k) else ()
    for word in counted:
        if (count := as_number(to.values.get(word), 0)) < 1:
            continue
        to.values[word] = steps = math.ceil(count / k)
        if word == "iters":
            rest = "" if count % k == 0 else f"; the last has {count % k:g} there and {k:g} here"
            sentence = f"its {count:g} iterations are {steps} update{'s' * (steps != 1)} of {k:g} batches each{rest}"
            to.remarks["gradient_accumulation_steps"] = sentence


_SCHEDULES = {"cosine": ("peak", "steps", "end"), "linear": ("peak", "end", "steps")}
"""Arguments of mlx's `cosine_decay` and `linear_schedule`, in order."""


def _lr_schedule(to: Translator) -> None:
    """mlx-lm: {name: cosine_decay, arguments: [peak, steps, end], warmup: n, warmup_init: x}, in updates. As there, the
    first argument is the peak whatever `learning_rate` says, and missing arguments are 0. Our own keys win."""
    mapping = to.values.get("lr_schedule")
    if not isinstance(mapping, Mapping):
        return
    kind, arguments = choice(mapping.get("name"), CHOICE_ALIASES["lr_schedule"]), mapping.get("arguments")
    if kind is None or not isinstance(arguments, list) or not 1 <= len(arguments) <= 3:
        shape = "a mapping with a name and arguments, a list of at most three numbers"
        to.refuse("lr_schedule", f"lr_schedule must be a word, or {shape}.")
        return
    if kind in ("exponential", "step"):
        shape = "a mapping for cosine_decay and linear_schedule only"
        to.refuse("lr_schedule", f"lr_schedule is {shape}; give {kind} as a word, with lr_final.")
        return
    by_name = dict(zip(_SCHEDULES.get(kind, ()), arguments, strict=False))
    to.values["lr_schedule"] = kind
    if not by_name:
        return
    if to.values.get("epochs") and "steps" in by_name and not to.has("lr_decay_fraction"):
        counted = "lr_schedule counts the fall in steps, but the run is counted in epochs"
        to.refuse("lr_schedule", f"{counted}; give its name, with lr_final and lr_decay_fraction.")
        return
    to.values["learning_rate"] = by_name["peak"]
    to.values.setdefault("lr_final", by_name.get("end", 0.0))
    if "steps" in by_name:
        steps, iters = as_number(by_name["steps"]), as_number(to.values.get("iters"), _ITERS)
        # What is no number is reported by validation.
        to.values.setdefault("lr_decay_fraction", steps / iters if steps is not None and iters else by_name["steps"])
    to.values.setdefault("lr_warmup_steps", mapping.get("warmup", 0))
    to.values.setdefault("lr_warmup_init", mapping.get("warmup_init", 0.0))


MLX_LM_LORA = OtherProgram(
    key="mlx_lm_lora",
    name="mlx-lm-lora",
    source="mlx-lm-lora 5.10.2, its example files, and mlx-lm 0.32",
    sections=tables_of("mlx_lm_lora"),
    regroups=(_mode, _hugging_face_dataset, _lora_parameters, _optimizer_config, _wandb, _accumulation, _lr_schedule),
    defaults=_defaults,
)


CONTENT_REWARDS = ("jaccard", "math_eval", "choice_correctness")
"""Values of mlx-grpo's `reward_content_type`; our reward functions have the same names."""


def _grpo_rewards(to: Translator) -> None:
    if not to.has("reward_content_type", "reward_format_weight", "reward_content_weight"):
        return
    kind = str(to.take("reward_content_type") or "jaccard").strip().lower()
    weights = [to.number("reward_format_weight"), to.number("reward_content_weight")]
    if kind not in CONTENT_REWARDS:
        sentence = f"reward_content_type cannot be {quote(kind, 40)}; it is one of {', '.join(CONTENT_REWARDS)}."
        to.refuse("reward_content_type", sentence)
        return
    to.fill("reward_functions", ["r1_soft_format_reward_func", kind], "reward_content_type")
    to.fill("reward_weights", [0.5 if weight is None else weight for weight in weights], "reward_format_weight")


def _grpo_data(to: Translator) -> None:
    if to.has("train_dataset_path") and to.has("dataset_name"):
        to.take("dataset_name")
        to.remarks["dataset_name"] = "train_dataset_path is given, which comes first"
    if to.program == "mlx_grpo" and to.has("max_prompt_len"):
        to.values.setdefault("long_prompts", "cut_left")
    if isinstance(mapping := to.values.get("lr_schedule_config"), Mapping) and not to.has("lr_schedule"):
        to.values["lr_schedule"] = dict(to.take("lr_schedule_config"))
    elif mapping is not None:
        sentence = "lr_schedule_config must be a mapping, as mlx-lm's lr_schedule, and stand alone."
        to.refuse("lr_schedule_config", sentence)
    if as_number(to.values.get("grad_clip_norm"), 1.0) < 0:
        to.values["grad_clip_norm"] = 0
    if to.flag("use_wandb"):
        to.values.setdefault("report_to", ["wandb"])


MLX_GRPO = OtherProgram(
    key="mlx_grpo",
    name="mlx-grpo",
    source="document 002, and mlx_grpo_trainer_aligned.py of the repository that it describes",
    sections=tables_of("mlx_grpo"),
    regroups=(_grpo_rewards, _grpo_data),
    defaults=lambda raw: TABLES["defaults"]["mlx_grpo"],
)
