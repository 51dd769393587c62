"""What TRL's script and its model arguments name: model, adapters, dataset, rewards, sampling options, best checkpoint, trackers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from backend.config.other_programs.rewriting import Translator, as_bool
from backend.config.other_programs.trl_schedule import mapping
from backend.utils.text import quote

REWARDS = {
    "get_soft_overlong_punishment": "soft_overlong_punishment_reward(max_completion_length=1280, cache=256)",
    "get_repetition_penalty_reward": "repetition_penalty_reward",
    "get_cosine_scaled_reward": "cosine_scaled_reward",
}
"""TRL's name of a reward function → our entry, where it differs. The numbers are those of TRL's script."""
_TRL_PROMPT, _OUR_MAX_SEQ = 512, 2048
"""Tokens of a prompt that TRL used to allow by default; our default of max_seq_length."""
_LOADED_ELSEWHERE = ("attn_implementation", "device_map", "low_cpu_mem_usage", "use_cache", "trust_remote_code")
"""Options of `from_pretrained` that say how PyTorch loads a model."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def model(to: Translator) -> None:
    """`model_init_kwargs`, and which of two precisions counts."""
    for name, value in mapping(to, "model_init_kwargs").items():
        if name in ("dtype", "torch_dtype"):
            to.fill("dtype", value, "model_init_kwargs")
        elif name == "revision" and value != "main":
            to.refuse(
                "model_init_kwargs",
                "The newest revision is taken; download another into a folder and give that as model.",
            )
        elif name not in (*_LOADED_ELSEWHERE, "revision"):
            to.refuse(
                "model_init_kwargs", f"model_init_kwargs has {quote(name, 40)}, which has no place here; take it out."
            )
    flags = [flag for flag in ("bf16", "fp16") if as_bool(to.values.get(flag))]
    if to.program == "trl" and flags and to.has("dtype", "torch_dtype"):
        to.take("dtype", "torch_dtype")
        to.remark("dtype", f"{flags[0]} is on, and is what TRL computes in")
    for flag in ("bf16", "fp16"):
        if as_bool(to.values.get(flag)) is False:
            to.take(flag)


def adapters(to: Translator) -> None:
    """PEFT's words for adapters."""
    peft, dora = to.flag("use_peft"), to.flag("use_dora")
    if peft is not None:
        to.fill("train_type", "full" if not peft else "dora" if dora else "lora", "use_peft")
        if peft:
            to.suggest("num_layers", -1)
    elif dora:
        to.fill("train_type", "dora", "use_dora")
    if (targets := to.take("lora_target_modules")) is not None:
        to.fill("lora_keys", targets if isinstance(targets, list) else str(targets).split(","), "lora_target_modules")
    if isinstance(kept := to.values.get("lora_modules_to_save"), str):
        to.values["lora_modules_to_save"] = kept.split(",")
    for word, bits in (("load_in_4bit", "4"), ("load_in_8bit", "8")):
        if to.flag(word):
            to.fill("quantization", bits, word)
    if to.flag("disable_dropout"):
        to.fill("dropout", 0.0, "disable_dropout")


def dataset(to: Translator) -> None:
    """`datasets`, TRL's mixture, where it has one entry; prompts that are too long."""
    listed = to.take("datasets") or None
    if listed is not None and not (isinstance(listed, list) and len(cast("list[Any]", listed)) == 1):
        return to.refuse(
            "datasets", "datasets must list one dataset here: mix several into one file first, and give it as data."
        )
    entry: Any = cast("list[Any]", listed)[0] if listed else {}
    if not isinstance(entry, Mapping):
        return to.refuse("datasets", "An entry of datasets must be a mapping with a path.")
    for name, value in cast("Mapping[str, Any]", entry).items():
        ours = {"path": "data", "name": "dataset_config", "split": "train_split"}.get(name)
        if ours and value is not None:
            to.fill(ours, value, "datasets")
        elif value is not None:
            to.refuse("datasets", f"An entry of datasets has {quote(name, 40)}, which has no place here; take it out.")
    if (share := to.number("test_split_size")) is not None:
        if not 0 <= share < 1:
            return to.refuse("test_split_size", "test_split_size must be a share of the rows below 1 here.")
        to.fill("validation_split", share, "test_split_size")
    _room(to)
    return None


def _room(to: Translator) -> None:
    """TRL limits prompt and completion each by itself, and cuts a prompt that is too long on the left."""
    if to.program != "trl":
        return
    if to.has("max_prompt_length"):
        to.suggest("long_prompts", "cut_left")
    needed = int(to.peek("max_completion_length", default=0) + to.peek("max_prompt_length", default=_TRL_PROMPT))
    if needed > _OUR_MAX_SEQ and not to.has("max_seq_length"):
        to.values["max_seq_length"] = needed
        to.remark("max_completion_length", f"max_seq_length is {needed:,}, so that a prompt fits beside it")


def rewards(to: Translator) -> None:
    """`reward_funcs`: TRL's own names, and functions by their import path."""
    listed = to.take("reward_funcs")
    if listed is None:
        return
    entries = reward_entries(listed)
    if (model_id := next((entry for entry in entries if "/" in entry and "::" not in entry), None)) is not None:
        sentence = f"{quote(model_id, 60)} is a reward model; rewards are functions here, such as accuracy_reward."
        return to.refuse("reward_funcs", sentence)
    if "reasoning_accuracy_reward" in entries:
        sentence = "reasoning_accuracy_reward is not built; accuracy_reward is nearest, which reads the last answer of a completion."
        return to.refuse("reward_funcs", sentence)
    to.fill("reward_functions", entries, "reward_funcs")
    return None


def reward_entries(listed: Any) -> list[str]:
    """Our entries for `reward_funcs`: a name, a list of names, or names with commas."""
    names = [str(name) for name in cast("list[Any]", listed)] if isinstance(listed, list) else str(listed).split(",")
    return [_reward_entry(name.strip()) for name in names if name.strip()]


def _reward_entry(name: str) -> str:
    if name in REWARDS:
        return REWARDS[name]
    module, dot, function = name.rpartition(".")
    if dot and "/" not in name and "(" not in name and "::" not in name:
        return f"{module.replace('.', '/')}.py::{function}"
    return name


def generation(to: Translator) -> None:
    """`generation_kwargs`, and vLLM's correction of what it sampled with."""
    for name, value in mapping(to, "generation_kwargs").items():
        if name in (*_SAMPLING, "stop"):
            to.fill(name, value, "generation_kwargs")
        elif name == "stop_strings":
            to.fill("stop", value, "generation_kwargs")
        else:
            to.refuse(
                "generation_kwargs", f"generation_kwargs has {quote(name, 40)}, which has no place here; take it out."
            )
    for word in (
        "guided_decoding_regex",
        "vllm_guided_decoding_regex",
        "structured_outputs_regex",
        "vllm_structured_outputs_regex",
    ):
        if (regex := to.take(word)) is not None:
            to.fill("output_regex", regex, word)
    mode, is_on = to.take("vllm_importance_sampling_mode"), to.flag("vllm_importance_sampling_correction")
    if is_on is False:
        to.fill("sampling_correction", "none", "vllm_importance_sampling_correction")
    elif is_on or mode is not None:
        to.fill("sampling_correction", "sequence_mask" if mode is None else mode, "vllm_importance_sampling_mode")


def best(to: Translator) -> None:
    """Which checkpoint is the best."""
    if (metric := to.take("metric_for_best_model")) is not None:
        name = str(metric).strip()
        if name in ("loss", "eval_loss"):
            sentence = (
                "No loss is measured on held-out prompts, and the loss of GRPO says little; eval_reward is nearest."
            )
            to.refuse("metric_for_best_model", sentence)
        else:
            to.fill(
                "best_metric",
                name if name.startswith("eval/") else f"eval/{name.removeprefix('eval_')}",
                "metric_for_best_model",
            )
    if (greater := to.flag("greater_is_better")) is not None:
        to.fill("best_is_lowest", not greater, "greater_is_better")


def machine(to: Translator) -> None:
    """Device and trackers."""
    for word, device in (("use_cpu", "cpu"), ("no_cuda", "cpu"), ("use_mps_device", "gpu")):
        if to.flag(word):
            to.fill("device", device, word)
    # Which trackers there are is checked with the settings (`backend.trainer.trackers.targets`).
    if isinstance(trackers := to.values.get("report_to"), str):
        to.values["report_to"] = [name.strip().lower() for name in trackers.split(",") if name.strip()]
