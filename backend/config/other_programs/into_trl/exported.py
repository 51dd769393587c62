"""A run's settings as arguments of TRL (`trl grpo --config`), and what of them is not carried.

The opposite of reading a file of TRL: where the table beside it only renames a setting, the same row is read backwards; where it
regroups, there is a function that undoes it (`regrouped`, `optimizing`). So what is written here and read again by
`backend.config.other_programs.translation` is the same run, but for `left_out` and for what the folder's files carry (`BY_FILES`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from backend.config.config import SETTINGS, Config
from backend.config.other_programs.into_trl import optimizing, regrouped
from backend.config.other_programs.into_trl.writing import LeftOut, TrlWriting
from backend.config.other_programs.trl import TRL
from backend.config.other_programs.words import Translated

# Settings that are no argument of TRL: those that the exported folder's own files carry, those that nothing stands
# for, and those without meaning on another machine.

_ROWS = "dataset.py makes the rows with it"
_REWARDS = "rewards.py"

BY_FILES: dict[str, str] = {
    **dict.fromkeys(
        ("prompt_feature", "answer_feature", "type_feature", "system_feature", "system_prompt", "prompt_template", "answer_pattern",
         "map_function", "valid_data", "test_data", "eval_data", "validation_split"),
        _ROWS,
    ),
    "train_split": _ROWS, "valid_split": _ROWS, "test_split": _ROWS, "dataset_config": _ROWS, "streaming": _ROWS,
    "data_seed": "train.py takes prompts in the order that this seed gives here; trl grpo alone shuffles by seed",
    "reward_functions": f"{_REWARDS} has one function for each",
    "reward_functions_file": f"a copy lies in user_code/, and {_REWARDS} loads it",
    "max_seq_length": "train.py leaves out prompts with no room for a completion; vLLM gets it as its longest sequence",
    "max_prompt_length": "train.py applies it",
    "long_prompts": "train.py applies it",
    "num_layers": "train.py puts adapters on the last layers only; trl grpo alone on all",
    "tokenizer": "train.py loads it",
    "val_batches": "train.py evaluates on so many prompts; trl grpo alone on all",
    "test": "train.py answers the test prompts at the end",
    "test_batches": "train.py takes so many test prompts",
    "early_stopping_patience": "train.py adds transformers' EarlyStoppingCallback",
    "early_stopping_min_delta": "train.py adds transformers' EarlyStoppingCallback",
}  # fmt: skip
"""Setting → which file of the folder carries it, where TRL has no argument for it or `trl grpo` alone would not do it."""

AS_TRL_DOES = {"num_layers": -1, "val_batches": -1}
"""Settings whose default is not what TRL does by itself → the value that is."""

NOTHING_STANDS_IN: dict[str, str] = {
    "adapter": "the run begins with new adapters; to go on from these, export their run with --format original and name that folder as the model",
    "reference_model_path": "the reference is the model itself as it was before training",
    "log_kl": "TRL computes no KL without a KL weight",
    "kl_estimator": "TRL has Schulman's k3",
    "ratio_against": "the ratio is against the policy that sampled",
    "advantage_baseline": "TRL's GRPO takes the mean of the group; its RLOOTrainer leaves one out",
    "dynamic_sampling": "TRL takes every group as it comes",
    "dynamic_sampling_rounds": "TRL takes every group as it comes",
    "reward_weight_schedule": "the weights stay as they begin",
    "reward_weights_final": "the weights stay as they begin",
    "stages": "the settings outside of the stages hold for the whole run, whose length is iters",
    "own_optimizer": "AdamW; an object of a program is in no file",
    "own_schedule": "the learning rate as it is set; an object of a program is in no file",
    "stop_when": "the run goes on to its end",
    "reward_timeout": "TRL waits for a reward function as long as it takes",
}
"""Setting → what happens in its place, a sentence for the list."""

NO_MEANING_THERE: dict[str, str] = {
    "train_mode": "TRL's GRPOTrainer is GRPO",
    "mask_prompt": "TRL never trains on the prompt",
    "skip_zero_signal": "it saves time and changes no gradient",
    "reward_isolation": "TRL calls reward functions in the trainer's own process",
    "reward_network": "nothing keeps reward functions from the network there",
    "record_tokens": "TRL logs texts, not tokens",
    "lm_studio_name": "LM Studio is on this machine",
    "fuse": "the adapter is saved by itself; PEFT's merge_and_unload folds it in",
    "memory_limit": "memory is PyTorch's there; lower per_device_train_batch_size and raise gradient_accumulation_steps",
    "retry_on_gpu_error": "it is for GPU errors of MLX",
    "relax_gpu_timeout": "it is for macOS",
    "efficient_long_context": "TRL computes log-probabilities in pieces by itself",
    "seq_step_size": "TRL computes log-probabilities in pieces by itself",
    **dict.fromkeys(("hosts", "distributed_backend", "on_lost_rank", "parallelism"), "accelerate starts the processes there"),
}  # fmt: skip
"""Setting → why it has none. Listed where it is not at its default."""


# ── exported ─────────────────────────────────────────────────────────────────────────────────────────────────────────

REGROUPS = (
    regrouped.batches, regrouped.length, regrouped.rhythm, regrouped.best, regrouped.precision, regrouped.adapters, regrouped.reference,
    regrouped.importance, regrouped.sampling, regrouped.trackers, optimizing.optimizer, optimizing.schedule,
)  # fmt: skip

GROUPED: dict[str, tuple[str, ...]] = {
    "batches": ("batch_size", "gradient_accumulation_steps", "steps_per_generation", "group_size"),
    "length": ("iters", "epochs"),
    "rhythm": ("steps_per_report", "steps_per_eval", "save_every", "keep_checkpoints", "eval_delay", "eval_batch_size"),
    "best": ("best_metric", "best_is_lowest", "load_best_at_end"),
    "precision": ("dtype", "quantization", "device"),
    "adapters": ("train_type", "rank", "scale", "lora_alpha", "use_rslora", "dropout", "lora_keys", "modules_to_save"),
    "reference": ("sync_ref_model",),
    "importance": ("sampling_correction", "sampling_correction_max", "sampling_correction_min"),
    "sampling": ("presence_penalty", "frequency_penalty", "stop", "output_regex", "output_schema"),
    "trackers": ("report_to", "tracker_project", "tracker_run_name", "run_name"),
    "optimizer": ("optimizer", "optimizer_bits"),
    "schedule": ("lr_schedule", "lr_warmup_steps", "lr_warmup_ratio", "lr_warmup_init", "lr_decay_fraction", "lr_final", "lr_cycles",
                 "lr_power"),
}  # fmt: skip
"""Name of a function of REGROUPS → the settings that it writes."""

_UNLESS_DEFAULT = ("min_p", "neftune_noise_alpha", "chat_template_kwargs", "num_generations_eval", "reward_weights", "delta", "epsilon_high",
                   "off_policy_mask_threshold", "repetition_penalty", "save_only_model", "mask_truncated_completions", "dataset_config")  # fmt: skip
"""Settings whose word is written only where they say something: at their default it is off in TRL too."""


@dataclass(frozen=True, slots=True)
class TrlSettings:
    """`words`: TRL's arguments in the order of its table. `left_out`: settings that nothing there carries as they stand.
    `by_files`: settings that the folder's own files carry, and the words do not → how."""

    words: dict[str, Any]
    left_out: list[LeftOut]
    by_files: dict[str, str]


def trl_yaml(words: Mapping[str, Any], heading: str) -> str:
    """A file for `trl grpo --config`: the words under the titles of the table that they are of."""
    parts = [f"# {heading}\n"]
    for title, section in TRL.sections.items():
        if chosen := {word: words[word] for word in section if word in words}:
            parts.append(f"# {title}\n" + yaml.safe_dump(chosen, sort_keys=False, allow_unicode=True, width=120))
    return "\n".join(parts)


def into_trl(config: Config) -> TrlSettings:
    """Every setting as TRL has it. Nothing is read from disk and nothing refused: what TRL lacks is listed."""
    to = TrlWriting(config)
    for key, word in renamed().items():
        value = getattr(config, key)
        if to.applies(key) and not (key in _UNLESS_DEFAULT and value == SETTINGS[key].default):
            to.put(**{word: value})
    to.put(output_dir="output")
    for regroup in REGROUPS:
        regroup(to)
    _leave_what_is_foreign(to)
    order = {word: place for place, word in enumerate(word for words in TRL.sections.values() for word in words)}
    words = {word: to.words[word] for word in sorted(to.words, key=order.__getitem__) if to.words[word] is not None}
    files = {key: how for key, how in BY_FILES.items() if _says_something(to, key)}
    return TrlSettings(words, to.left_out, files | to.by_files)


def _says_something(to: TrlWriting, key: str) -> bool:
    """Whether TRL would do otherwise by itself."""
    return to.applies(key) and getattr(to.config, key) != AS_TRL_DOES.get(key, SETTINGS[key].default)


@cache
def renamed() -> dict[str, str]:
    """Our setting → TRL's word, for every row of its table that renames one setting and does no more; of two words the first."""
    grouped = {key for keys in GROUPED.values() for key in keys}
    words: dict[str, str] = {}
    for word, fate in TRL.words.items():
        if isinstance(fate, Translated) and len(fate.settings) == 1 and not fate.how and not fate.is_switch:
            words.setdefault(fate.settings[0], word)
    return {key: word for key, word in words.items() if key not in grouped} | {"group_size": words["group_size"]}


def _leave_what_is_foreign(to: TrlWriting) -> None:
    for key, instead in (NOTHING_STANDS_IN | NO_MEANING_THERE).items():
        if key in SETTINGS and to.applies(key) and getattr(to.config, key) != SETTINGS[key].default:
            to.leave(key, instead)
