"""A run's settings as arguments of TRL (`trl grpo --config`), and what of them is not carried.

The opposite of reading a file of TRL: where the table beside it only renames a setting, the same row is read backwards; where it
regroups, there is a function that undoes it (`regrouped`, `optimizing`). So what is written here and read again by
`backend.spec.other_programs.translation` is the same run, but for `left_out` and for what the folder's files carry (`BY_FILES`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from backend.spec.config import SETTINGS, Config
from backend.spec.other_programs.into_trl import optimizing, regrouped
from backend.spec.other_programs.into_trl.stand_ins import AS_TRL_DOES, BY_FILES, NO_MEANING_THERE, NOTHING_STANDS_IN
from backend.spec.other_programs.into_trl.writing import LeftOut, TrlWriting
from backend.spec.other_programs.trl import TRL
from backend.spec.other_programs.words import Translated

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
