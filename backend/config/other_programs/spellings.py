"""Other spellings of our own keys and values, of no program in particular, and the shapes in which lists may be
written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from backend.config.other_programs.keys import Translator
from backend.rewards.catalogue import split_names
from backend.utils.text import quote

KEY_ALIASES = {
    "max_grad_norm_clip": "max_grad_norm",
    "ref_model": "reference_model_path",
    "torch_dtype": "dtype",
    "early_stopping_threshold": "early_stopping_min_delta",
}
"""Another key → ours, where no table has it."""

CHOICE_ALIASES: dict[str, dict[str, str]] = {
    "lr_schedule": {
        **dict.fromkeys(("cosine_decay", "cosine decay", "cosine_with_min_lr"), "cosine"),
        **dict.fromkeys(("linear_decay", "linear_schedule"), "linear"),
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
    "importance_sampling_level": dict.fromkeys(("", "default", "none"), "token"),
}
"""Other spellings of a menu's values, lower case."""

EMPTY_MEANS_DEFAULT = (
    *("prompt_feature", "answer_feature", "type_feature", "system_feature"),
    *("train_split", "valid_split", "test_split"),
)


def choice(value: Any, aliases: Mapping[str, str]) -> Any:
    """A menu's value in our spelling; None for none."""
    if value is None and "" not in aliases:
        return None
    if isinstance(value, (list, Mapping)):
        return value  # pyright: ignore  (no menu has it: validation reports it)
    text = "" if value is None else str(value).strip().lower()
    return aliases.get(text, text)


def one_dataset(to: Translator) -> None:
    """`dataset:` holds one id or path, or a list with one."""
    names = {key: to.take(key) for key in ("dataset", "data") if to.values.get(key) not in (None, "")}
    for key, value in names.items():
        if isinstance(value, list):
            listed = cast("list[Any]", value)
            if len(listed) != 1:
                to.refuse("data", f"{key} lists {len(listed)} datasets; give exactly one.")
                return
            names[key] = listed[0]
    if len(names) == 2 and names["data"] != names["dataset"]:
        both = f"data is {quote(names['data'], 60)} and dataset is {quote(names['dataset'], 60)}"
        to.refuse("data", f"{both}; give one of them.")
        return
    to.take("dataset")
    if names:
        to.values["data"] = next(iter(names.values()))


def split_lists(to: Translator) -> None:
    """Names and weights may be comma-separated text, with or without brackets, and a single weight a number.

    Empty text means the defaults. A stop string may stand alone.
    """
    values = to.values
    for key in ("reward_functions", "reward_weights"):
        value = values.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            values[key] = [value]
        parts: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
        if key == "reward_functions" and all(isinstance(part, str) for part in parts):
            names = split_names(cast("str | list[Any]", value))
            values[key] = names or (None if isinstance(value, str) else [])
        elif isinstance(value, str):
            parts = [part.strip().strip("'\"") for part in value.strip().strip("[]").split(",")]
            values[key] = [part for part in parts if part] or None
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]] if values["stop"] else []


def menus_and_empty_names(to: Translator) -> None:
    """Put menu values in our spelling, and drop columns and splits that are left empty."""
    for key in EMPTY_MEANS_DEFAULT:
        if to.values.get(key) == "":
            del to.values[key]
    for key, aliases in CHOICE_ALIASES.items():
        if key in to.values:
            to.values[key] = choice(to.values[key], aliases)
