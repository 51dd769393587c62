"""Puts the keys and values of TRL, mlx-lm-lora, mlx-lm and mlx-grpo into our settings, and says what it did.

Works on the raw mapping of a YAML file or of the form. Values are renamed, moved, regrouped and counted in our units here, never
validated. What a word becomes stands in the tables of the programs; where two programs have a word, and where a word is ours too,
the program that the file is written for decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

from backend.config.other_programs import spellings
from backend.config.other_programs.mlx_lm_groups import PRECISION_FLAGS, QUANTIZATION_FLAGS
from backend.config.other_programs.mlx_lm_lora import MLX_LM_LORA
from backend.config.other_programs.rewriting import Raw, Translator, as_bool, as_number
from backend.config.other_programs.spellings import KEY_ALIASES
from backend.config.other_programs.trl import TRL
from backend.config.other_programs.trl_training import PLUMBING
from backend.config.other_programs.words import (
    IgnoredKey,
    OtherProgram,
    Refused,
    Translated,
    Word,
    refused,
    renamed,
    same,
    without_effect,
)
from backend.utils.errors import ConfigProblem
from backend.utils.text import about_value, quote

# The words of mlx-grpo (document 002): the arguments that its README lists, and the fields of its TrainingArgs.

CONTENT_REWARDS = ("jaccard", "math_eval", "choice_correctness")
"""Values of its `reward_content_type`; our reward functions have the same names."""
FORMAT_REWARD = "r1_soft_format_reward_func"
_REWARDS = "The format reward r1_soft_format_reward_func (0 or 0.5, −0.5 or 0.5 there) and the content reward, with these weights."

_README: dict[str, Word] = {
    **without_effect("a run has a folder of its own; --runs-dir and --name choose it", "output_dir"),
    **renamed(model_path="model", train_dataset_path="data", val_dataset_path="valid_data", num_training_steps="iters"),
    "dataset_name": Translated(("data",), "train_dataset_path comes first, as there."),
    **same("dataset_config"),
    **dict.fromkeys(
        ("reward_content_type", "reward_format_weight", "reward_content_weight"),
        Translated(("reward_functions", "reward_weights"), _REWARDS),
    ),
}
_TAGS = "The shipped format rewards read <think> and <answer>; a function of your own may read other tags."
_FIELDS: dict[str, Word] = {
    **renamed(ref_model_path="reference_model_path", dataset_train_split="train_split", dataset_val_split="valid_split"),
    **renamed(dataset_prompt_key="prompt_feature", dataset_answer_key="answer_feature", max_gen_len="max_completion_length"),
    "max_prompt_len": Translated(("max_prompt_length", "long_prompts"), "Longer prompts are cut on the left, as there."),
    **same("system_prompt", "learning_rate", "seed", "save_every"),
    "lr_schedule_config": Translated(("lr_schedule", "learning_rate", "lr_final", "lr_warmup_steps"), "mlx-lm's mapping."),
    **renamed(grad_clip_norm="max_grad_norm", optimizer_beta1="adam_beta1", optimizer_beta2="adam_beta2"),
    **renamed(optimizer_weight_decay="weight_decay", num_rollout_samples="group_size", ppo_batch_size="batch_size"),
    **renamed(sampling_temperature="temperature", sampling_top_p="top_p", sampling_min_p="min_p", grpo_beta="beta"),
    **renamed(eval_every="steps_per_eval", grad_accum_steps="gradient_accumulation_steps", use_grad_checkpointing="grad_checkpoint"),
    "use_wandb": Translated(("report_to",), "true is wandb.", is_switch=True),
    **renamed(wandb_project="tracker_project", wandb_run_name="tracker_run_name"),
    "resume_from_checkpoint": PLUMBING["resume_from_checkpoint"],
    **refused(_TAGS, "think_start_tag", "think_end_tag", "answer_start_tag", "answer_end_tag",
              off=("<think>", "</think>", "<thinking>", "</thinking>", "<answer>", "</answer>")),
    **refused("Prompts are always shuffled, by data_seed.", "shuffle_data", off=(True,)),
    **refused("Speculative decoding is not built yet.", "use_speculative_decoding"),
    **without_effect("speculative decoding is not built", "draft_model_path", "num_draft_tokens"),
    **without_effect("caches keep the model's precision and grow to what the prompts need", "max_kv_size", "kv_bits", "kv_group_size",
                     "quantized_kv_start"),
    **without_effect("the vocabulary stays as the model has it", "init_new_embeddings_with_mean"),
    **without_effect("a group whose rewards are alike teaches nothing, so that nothing is divided by 0", "advantage_epsilon"),
    **without_effect("every layer is recomputed, or none", "grad_checkpoint_layers"),
    **without_effect("log.txt in the run folder holds all of it", "verbose"),
    **without_effect("the tracker's own variables of the environment set this", "wandb_entity"),
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "learning_rate": 3e-5, "num_training_steps": 500, "ppo_batch_size": 2, "num_rollout_samples": 2, "max_gen_len": 50,
    "grpo_beta": 0.15, "sampling_top_p": 1.0, "top_k": 0, "seed": 42, "grad_clip_norm": 0.9, "optimizer_beta2": 0.95,
    "reward_content_type": "jaccard", "save_every": 2, "eval_every": 10, "dataset_answer_key": "completion",
    "dataset_val_split": "test", "max_prompt_len": 100, "train_type": "full",
}  # fmt: skip
"""Of its TrainingArgs, where they are not ours; it trains every weight."""


def rewards(to: Translator) -> None:
    """Its two rewards, format and content, and their weights."""
    words = ("reward_content_type", "reward_format_weight", "reward_content_weight")
    if not to.has(*words):
        return
    kind = str(to.take("reward_content_type") or "jaccard").strip().lower()
    weights = [to.number("reward_format_weight"), to.number("reward_content_weight")]
    if kind not in CONTENT_REWARDS:
        sentence = f"reward_content_type cannot be {quote(kind, 40)}; it is one of {', '.join(CONTENT_REWARDS)}."
        return to.refuse("reward_content_type", sentence)
    to.fill("reward_functions", [FORMAT_REWARD, kind], "reward_content_type")
    to.fill("reward_weights", [0.5 if weight is None else weight for weight in weights], "reward_format_weight")


def data_and_schedule(to: Translator) -> None:
    """Which dataset comes first, its schedule mapping, prompts that are too long, its tracker."""
    if to.has("train_dataset_path") and to.has("dataset_name"):
        to.take("dataset_name")
        to.remark("dataset_name", "train_dataset_path is given, which comes first")
    if to.program == "mlx_grpo" and to.has("max_prompt_len"):
        to.suggest("long_prompts", "cut_left")
    if isinstance(mapping := to.values.get("lr_schedule_config"), Mapping) and not to.has("lr_schedule"):
        to.values["lr_schedule"] = dict(cast("Mapping[str, Any]", to.take("lr_schedule_config")))
    elif mapping is not None:
        to.refuse(
            "lr_schedule_config", "lr_schedule_config must be a mapping, as mlx-lm's lr_schedule, and stand alone."
        )
    if (as_number(to.values.get("grad_clip_norm"), 1.0) or 0.0) < 0:
        to.values["grad_clip_norm"] = 0
    if to.flag("use_wandb"):
        to.suggest("report_to", ["wandb"])


def _defaults(_raw: Mapping[str, Any]) -> dict[str, Any]:
    return _DEFAULTS


MLX_GRPO = OtherProgram(
    key="mlx_grpo",
    name="mlx-grpo",
    source="document 002, and mlx_grpo_trainer_aligned.py of the repository that it describes",
    words=_README | _FIELDS,
    regroups=(rewards, data_and_schedule),
    defaults=_defaults,
    sections={"Arguments that its README lists": tuple(_README), "Fields of its TrainingArgs": tuple(_FIELDS)},
)


# ── translation ──────────────────────────────────────────────────────────────────────────────────────────────────────

PROGRAMS: tuple[OtherProgram, ...] = (TRL, MLX_LM_LORA, MLX_GRPO)
_OWN_REGROUPS = (spellings.one_dataset, spellings.split_lists)


@dataclass(frozen=True, slots=True)
class TranslatedKey:
    """What one word of another program was made of. `sentence` begins in lower case, to follow the word. `as here`: it asks for what
    is so here anyway, such as a feature that is missing here to be off."""

    word: str
    fate: Literal["translated", "without effect", "as here"]
    sentence: str


@dataclass(frozen=True, slots=True)
class Translation:
    """A file in our words.

    Attributes:
        values – our key → value, without keys that have a fault. A word that nobody knows is left as it stands.
        faults – what could not be translated.
        program – the program that the file is written for, where its words say so.
        words – what was made of each word that is not ours, or that means something else there, in the order of the file.
    """

    values: Raw
    faults: list[ConfigProblem]
    program: OtherProgram | None
    words: list[TranslatedKey]
    is_mixed: bool
    """Whether words of several programs stand in it, so that it is written for none of them."""


def _marks() -> dict[str, OtherProgram]:
    """Words by which a file is recognised: those of one program alone that are no key of ours."""
    owners: dict[str, list[OtherProgram]] = {}
    for program in PROGRAMS:
        for word in program.words:
            owners.setdefault(word, []).append(program)
    return {word: owner[0] for word, owner in owners.items() if len(owner) == 1 and not is_ours(word)}


def is_ours(word: str) -> bool:
    """Whether a word of a table is a key of ours too: some program's word for the setting of that name."""
    fates = (program.words.get(word) for program in PROGRAMS)
    return any(isinstance(fate, Translated) and word in fate.settings for fate in fates)


_AS_HERE = "it asks for what is so here anyway"
MARKS = _marks()
FOREIGN_WORDS: tuple[str, ...] = tuple(
    dict.fromkeys(
        [*KEY_ALIASES, "dataset", *(word for program in PROGRAMS for word in program.words if not is_ours(word))]
    )
)
"""Every word that is read and is none of ours: suggested for a misspelt key."""


def _names() -> dict[str, str]:
    """Each word that stands for one setting alone → that setting."""
    fates = {word: fate_of(word, None) for word in FOREIGN_WORDS}
    return {
        word: fate.settings[0]
        for word, fate in fates.items()
        if isinstance(fate, Translated) and len(fate.settings) == 1
    }


def program_of(raw: Mapping[str, Any]) -> OtherProgram | None:
    """The program that a file is written for: the only one whose own words stand in it. None for a file of ours, and for one that
    mixes the words of several, in which a word that is ours too means what it means here."""
    found = _programs_in(raw)
    return found[0] if len(found) == 1 else None


def _programs_in(raw: Mapping[str, Any]) -> list[OtherProgram]:
    """Those whose own words stand in a file."""
    found = {MARKS[word].key: MARKS[word] for word, value in raw.items() if value is not None and word in MARKS}
    return list(found.values())


def translate(raw: Mapping[str, Any]) -> tuple[Raw, list[ConfigProblem]]:
    """(`raw` in our keys and values, faults for what could not be translated). See `read_words`."""
    translation = read_words(raw)
    return translation.values, translation.faults


def read_words(raw: Mapping[str, Any]) -> Translation:
    """`raw` in our keys and values. A key with the value None counts as absent, and so does every key with a fault."""
    program = program_of(raw)
    to = Translator(raw, program.key if program else "")
    fates = {word: fate for word in to.values if (fate := fate_of(word, program))}
    foreign = {word: fate for word, fate in fates.items() if not _is_plain(word, program)}
    _drop_words(to, foreign)
    for regroup in _regroups(program):
        regroup(to)
    _rename(to, program)
    spellings.menus_and_empty_names(to)
    faulty = {fault.setting for fault in to.faults}
    values = {key: value for key, value in to.values.items() if value is not None and key not in faulty}
    read = [_told(word, fate, to, values, raw) for word, fate in fates.items() if word in foreign or word in to.remarks]
    return Translation(
        values, to.faults, program, [word for word in read if word is not None], len(_programs_in(raw)) > 1
    )


def with_changes(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> Translation:
    """`raw` with every change over it, in our words; both may use any name that a setting goes by, and None takes one out.

    In a file for another program, a change by one of its words replaces that line of the file, in the file's units; any other
    word means what it means here, whatever the file says.
    """
    program = program_of(raw)
    lines = {
        word: value
        for word, value in changes.items()
        if program and word in program.words and not _is_plain(word, program)
    }
    alone = {word: lines[word] for word in lines if len(settings_of(word, program)) == 1}
    same_line = {word for word in raw if any(settings_of(word, program) == settings_of(new, program) for new in alone)}
    file = read_words({word: value for word, value in raw.items() if word not in same_line} | lines)
    over = read_words({word: value for word, value in changes.items() if word not in lines})
    emptied = {word for word, value in changes.items() if value is None}
    values = {key: value for key, value in file.values.items() if key not in emptied} | over.values
    return Translation(values, [*file.faults, *over.faults], file.program, [*file.words, *over.words], file.is_mixed)


def settings_of(word: str, program: OtherProgram | None = None) -> tuple[str, ...]:
    """Our settings that a word stands for in a file for `program`; one of ours stands for itself."""
    fate = fate_of(word, program)
    return fate.settings if isinstance(fate, Translated) and not is_ours(word) else (word,)


def fate_of(word: str, program: OtherProgram | None) -> Word | None:
    """What a word becomes in a file for `program`; None for one that no table has."""
    for reader in _readers(program):
        if word in reader.words:
            return reader.words[word]
    return Translated((KEY_ALIASES[word],)) if word in KEY_ALIASES else None


def _readers(program: OtherProgram | None) -> Iterable[OtherProgram]:
    """Whose table is asked first: the program's own."""
    return PROGRAMS if program is None else (program, *(other for other in PROGRAMS if other is not program))


def _is_plain(word: str, program: OtherProgram | None) -> bool:
    """Whether a word is ours, and means what it means here in this file."""
    return is_ours(word) and (program is None or word not in program.words or program.shares_meaning(word))


def _regroups(program: OtherProgram | None) -> Iterable[Any]:
    """The functions that read words together; those of the file's own program first."""
    for reader in _readers(program):
        if reader is not MLX_LM_LORA:
            yield from reader.regroups
    yield from _OWN_REGROUPS
    yield from MLX_LM_LORA.regroups  # last: the others leave flags and a schedule mapping in its words


def _drop_words(to: Translator, words: Mapping[str, Word]) -> None:
    """Take out what has no effect, and what is refused; a fault for a refused word that asks for something."""
    for word, fate in words.items():
        if isinstance(fate, Translated):
            continue
        value = to.take(word)
        if isinstance(fate, Refused) and fate.asks(value):
            rest = f") has no counterpart here. {fate.nearest}"
            to.refuse(word, about_value(f"{quote(word, 40)} (", _as_yaml(value), rest))


def _as_yaml(value: Any) -> str:
    """A value in a sentence, nearly as a file has it."""
    if isinstance(value, list):
        return f"[{quote(', '.join(quote(part, 60) for part in cast('list[Any]', value[:20])), 80)}]"
    return str(value).lower() if isinstance(value, bool) else quote(value, 40)


def _rename(to: Translator, program: OtherProgram | None) -> None:
    """Words that no function took become our keys; a fault where two of them say two things."""
    written_as: dict[str, str] = {}
    renamed: Raw = {}
    for word, value in to.values.items():
        fate = fate_of(word, program)
        ours = fate.settings[0] if isinstance(fate, Translated) and not is_ours(word) else word
        before = renamed.get(ours)
        if before is not None and value is not None and value != before:
            both = f"{quote(written_as[ours], 30)} is {quote(before, 40)} and {quote(word, 30)} is {quote(value, 40)}"
            to.refuse(ours, f"{both}; give one of them.")
        if before is None:
            renamed[ours], written_as[ours] = value, word
    to.values = renamed


def _told(word: str, fate: Word, to: Translator, values: Raw, raw: Mapping[str, Any]) -> TranslatedKey | None:
    """What was made of one word; None for one that has a fault itself, or whose settings all have."""
    faulty = {fault.setting for fault in to.faults}
    if word in faulty or (isinstance(fate, Translated) and faulty.issuperset(fate.settings)):
        return None
    remark = to.remarks.get(word, "")
    if isinstance(fate, IgnoredKey):
        return TranslatedKey(word, "without effect", fate.reason)
    if isinstance(fate, Refused):
        return TranslatedKey(word, "as here", _AS_HERE)
    if remark.startswith("without effect: "):
        return TranslatedKey(word, "without effect", remark.removeprefix("without effect: "))
    if fate.is_switch and not as_bool(raw[word]):
        return TranslatedKey(word, "as here", _AS_HERE)
    made = [
        f"{key}: {_as_yaml(values[key])}"
        for key in fate.settings
        if key in values and (key == word or key not in to.written)
    ]
    if not made:
        return TranslatedKey(word, "without effect", remark) if remark else TranslatedKey(word, "as here", _AS_HERE)
    return TranslatedKey(word, "translated", "; ".join([", ".join(made), *([remark] if remark else [])]))


NAMES = _names()
"""Another program's word → the setting of ours that it is another name of."""


def other_names(key: str) -> list[str]:
    """Names of one of our settings in other programs."""
    grouped = {"lora_keys": ["keys"]} | {name: [f"lora_parameters {name}"] for name in ("rank", "scale", "dropout")}
    flags = {"quantization": list(QUANTIZATION_FLAGS), "dtype": list(PRECISION_FLAGS), "data": ["dataset"]}
    return list(dict.fromkeys([*flags.get(key, []), *_words_by_setting().get(key, []), *grouped.get(key, [])]))


@cache
def _words_by_setting() -> dict[str, list[str]]:
    """Our setting → words that are names of it alone, or of it and one other."""
    words: dict[str, list[str]] = {}
    for word in FOREIGN_WORDS:
        if isinstance(fate := fate_of(word, None), Translated) and not _is_one_of_many(word):
            for key in fate.settings:
                words.setdefault(key, []).append(word)
    return words


def _is_one_of_many(word: str) -> bool:
    """Whether a word holds so many settings that it is no name for one."""
    fate = fate_of(word, None)
    return isinstance(fate, Translated) and len(fate.settings) > 2


# ── account ──────────────────────────────────────────────────────────────────────────────────────────────────────────

# What was made of a file for another program, as lines for people.

OURS_FOR_THE_REST = (
    "What the file leaves out has GRPO Studio's defaults; python -m backend import FILE writes those of {name} instead."
)
_MIXED = "Words of several programs stand in this file; gradient_accumulation_steps and iters mean what they mean here."


def account(translation: Translation) -> list[str]:
    """A line for the program, a line a word. Nothing for a file that has no word of another program."""
    lines = [f"{word.word}: {_said(word.fate, word.sentence)}." for word in translation.words]
    if not lines:
        return []
    if translation.program is None:
        return [*([_MIXED] if translation.is_mixed else []), *lines]
    return [
        f"This is a file for {translation.program.name}. {OURS_FOR_THE_REST.format(name=translation.program.name)}",
        *lines,
    ]


def _said(fate: str, sentence: str) -> str:
    return {"translated": f"read as {sentence}", "without effect": f"without effect here: {sentence}"}.get(
        fate, sentence
    )
