"""Translates the keys and values of TRL, mlx-lm-lora, mlx-lm and mlx-grpo into our settings, and reports on each key.
Validates nothing. Where two programs have a key, or a key is ours too, the program of the file decides."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from backend.config.other_programs.keys import (
    CHOICE_ALIASES,
    IgnoredKey,
    OtherProgram,
    Refused,
    Translated,
    Translator,
    Word,
    as_bool,
    choice,
)
from backend.config.other_programs.mlx_lm import MLX_GRPO, MLX_LM_LORA
from backend.config.other_programs.trl import TRL
from backend.rewards.catalogue import split_names
from backend.utils.errors import ConfigProblem
from backend.utils.text import about_value, one_line, quote

PROGRAMS: tuple[OtherProgram, ...] = (TRL, MLX_LM_LORA, MLX_GRPO)
KEY_ALIASES = {  # another key → ours, where no table has it
    "dataset": "data",
    "max_grad_norm_clip": "max_grad_norm",
    "ref_model": "reference_model_path",
    "torch_dtype": "dtype",
    "early_stopping_threshold": "early_stopping_min_delta",
}
DEFAULTS = "defaults"  # the key of another program's file that says whose defaults it takes: `theirs` or `ours`
_LENGTHS = ("iters", "epochs")
_OF_ADAPTERS = {"train_type", "num_layers", "rank", "scale", "lora_keys", "modules_to_save", "lora_alpha"}
"""Settings that the adapter decides from which a run starts."""
_RECIPE = ("iters", "epochs", "batch_size", "group_size", "optimizer", "lr_schedule", "grpo_loss_type")
"""Ours that every program has, if by another name: with one of them a file is ours, but for some of its words."""
EMPTY_MEANS_DEFAULT = (
    *("prompt_feature", "answer_feature", "type_feature", "system_feature"),
    *("train_split", "valid_split", "test_split"),
)


@dataclass(frozen=True, slots=True)
class TranslatedKey:
    """What became of one key. `sentence` follows the key. `as here`: it asks for what is the default here."""

    word: str
    fate: Literal["translated", "without effect", "as here"]
    sentence: str


@dataclass(frozen=True, slots=True)
class Translation:
    """A file in our keys. `values`: without keys that have a problem; unknown keys stay. `program`: whose file it is.
    `words`: what became of each key that is not ours. `is_mixed`: keys of several programs stand in it. `defaults`: of
    the program, for what the file leaves out. `file`: the file itself, with the changes by its own keys."""

    values: dict[str, Any]
    faults: list[ConfigProblem]
    program: OtherProgram | None
    words: list[TranslatedKey]
    is_mixed: bool
    defaults: dict[str, Any] = field(default_factory=dict[str, Any])
    file: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def listed_defaults(self) -> str:
        return ", ".join(f"{key} {_as_yaml(value)}" for key, value in self.defaults.items())


HOMONYMS = ("warmup_steps",)  # keys of a table that are settings of ours with another meaning


def is_ours(word: str) -> bool:
    """True for a key of a table that is a setting of ours too."""
    fates = (program.words.get(word) for program in PROGRAMS)
    return word in HOMONYMS or any(isinstance(fate, Translated) and word in fate.settings for fate in fates)


def fate_of(word: str, program: OtherProgram | None) -> Word | None:
    """The table row of a key in a file for `program`; None for an unknown one."""
    for reader in (program, *PROGRAMS):
        if reader is not None and word in reader.words:
            return reader.words[word]
    return Translated((KEY_ALIASES[word],)) if word in KEY_ALIASES else None


MARKS: dict[str, OtherProgram] = {  # keys that identify a file: those of one program only that are not ours
    word: program
    for program in PROGRAMS
    for word in program.words
    if not is_ours(word) and sum(word in other.words for other in PROGRAMS) == 1
}
FOREIGN_WORDS: tuple[str, ...] = tuple(  # every key that is read and is not ours; suggested for a misspelt key
    dict.fromkeys([*KEY_ALIASES, *(word for program in PROGRAMS for word in program.words if not is_ours(word))])
)
NAMES: dict[str, str] = {  # another program's key → the one setting of ours that it names
    word: fate.settings[0]
    for word in FOREIGN_WORDS
    if isinstance(fate := fate_of(word, None), Translated) and len(fate.settings) == 1
}


def program_of(raw: Mapping[str, Any]) -> OtherProgram | None:
    """The program whose own keys stand in a file; None for a file of ours, or one that mixes several programs."""
    found = {MARKS[word].key: MARKS[word] for word, value in raw.items() if value is not None and word in MARKS}
    return next(iter(found.values())) if len(found) == 1 else None


def translate(raw: Mapping[str, Any]) -> Translation:
    """`raw` in our keys and values. Keys with the value None, and keys with a problem, count as absent."""
    program = program_of(raw)
    to = Translator(raw, program.key if program else "")
    fates = {word: fate for word in to.values if (fate := fate_of(word, program))}
    foreign = {word: fate for word, fate in fates.items() if not _is_plain(word, program)}
    for word, fate in foreign.items():
        if isinstance(fate, Translated):
            continue
        value = to.take(word)
        if isinstance(fate, Refused) and fate.asks(value):
            rest = f") has no counterpart here. {fate.nearest}"
            to.refuse(word, about_value(f"{quote(word, 40)} (", _as_yaml(value), rest))
    # mlx-lm's come last: the others leave flags and a schedule mapping in its keys.
    for reader in sorted(PROGRAMS, key=lambda one: (one is MLX_LM_LORA, one is not program)):
        for regroup in reader.regroups:
            regroup(to)
    for word, fate in foreign.items():
        if isinstance(fate, Translated) and fate.value is not None and to.flag(word):
            to.fill(fate.settings[0], fate.value, word)
    _rename(to, program)
    _lists(to)
    to.values = {key: value for key, value in to.values.items() if value != "" or key not in EMPTY_MEANS_DEFAULT}
    for key, aliases in CHOICE_ALIASES.items():
        if key in to.values:
            to.values[key] = choice(to.values[key], aliases)
    faulty = {fault.setting for fault in to.faults}
    values = {key: value for key, value in to.values.items() if value is not None and key not in faulty}
    # `dataset` is a spelling of files for this program too.
    told = [word for word in fates if word != "dataset" and (word in foreign or word in to.remarks)]
    words = [key for word in told if (key := _report(word, fates[word], to, values)) is not None]
    is_mixed = program is None and any(word in MARKS for word in to.written)
    return Translation(values, to.faults, program, words, is_mixed)


def read_file(raw: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> Translation:
    """A whole file in our keys, with every change over it, and its program's defaults for the keys that it leaves out.
    Both may use any name of a setting, and None takes one out. In a file for another program, a change by one of its
    keys replaces that line of the file, in the file's units. The key `defaults` is theirs, or ours."""
    raw, changes = dict(raw), dict(changes or {})
    whose = [which for which in (changes.pop(DEFAULTS, None), raw.pop(DEFAULTS, None)) if which is not None]
    program, lines, others = program_of(raw), dict[str, Any](), dict[str, Any]()
    for word, value in changes.items():
        is_line = program is not None and word in program.words and not _is_plain(word, program)
        (lines if is_line else others)[word] = value
    replaced = [own for word in lines if len(own := settings_of(word, program)) == 1]
    file = {
        word: value
        for word, value in raw.items()
        if (own := settings_of(word, program)) not in replaced and (own[0] not in others or others[own[0]] is not None)
    } | lines
    written, over = translate(file), translate(others)
    faults = [*written.faults, *over.faults]
    if whose and whose[0] not in ("ours", "theirs"):
        faults.append(ConfigProblem(DEFAULTS, f"{DEFAULTS} must be ours or theirs, not {quote(whose[0], 40)}."))
    elif program is not None and (whose[0] == "theirs" if whose else not _own_words(file, program)):
        whole = translate(file | _left_out(file, program, written.values, over.values))
        faults = list(dict.fromkeys([*whole.faults, *faults]))
        defaults = {key: value for key, value in whole.values.items() if key not in written.values | over.values}
        words = [word for word in whole.words if word.word in file or "; " in word.sentence]  # a default with a remark
        written = replace(whole, words=words, defaults=defaults)
    elif program is None and whose == ["theirs"]:
        names = "TRL, mlx-lm-lora or mlx-grpo"
        faults.append(ConfigProblem(DEFAULTS, f"This is not a file for {names} alone, so there are no other defaults."))
    values, words = written.values | over.values, [*written.words, *over.words]
    return replace(written, values=values, faults=faults, words=words, file=file)


def _own_words(file: Mapping[str, Any], program: OtherProgram) -> list[str]:
    return [word for word in _RECIPE if word in file and word not in program.words]


def _left_out(
    file: Mapping[str, Any], program: OtherProgram, written: Mapping[str, Any], over: Mapping[str, Any]
) -> dict[str, Any]:
    """The program's defaults for keys that the file leaves out, under whatever name; of a mapping, option by option."""
    left, given = dict[str, Any](), {key for key, value in {**written, **over}.items() if value not in (None, "")}
    decided = set(written) | (_OF_ADAPTERS if "adapter" in given else set())
    if given & {*_LENGTHS, "stages"}:
        decided |= {*_LENGTHS}
    for word, value in program.defaults(file).items():
        own, fate = file.get(word), program.words.get(word)
        if isinstance(value, dict):
            left[word] = {name: option for name, option in value.items() if name not in decided}
            left[word] |= own if isinstance(own, dict) else {}
        elif own is None and (fate.settings[0] if isinstance(fate, Translated) else word) not in decided:
            left[word] = value
    return left


def settings_of(word: str, program: OtherProgram | None = None) -> tuple[str, ...]:
    """Our settings that a key names in a file for `program`; one of ours names itself."""
    fate = fate_of(word, program)
    return fate.settings if isinstance(fate, Translated) and not is_ours(word) else (word,)


def _is_plain(word: str, program: OtherProgram | None) -> bool:
    fate = program and program.words.get(word)
    return is_ours(word) and (
        fate is None or (isinstance(fate, Translated) and fate.settings == (word,) and not fate.is_converted)
    )


def _as_yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{quote(', '.join(quote(part, 60) for part in value[:20]), 80)}]"
    return str(value).lower() if isinstance(value, bool) else quote(value, 40)


def _rename(to: Translator, program: OtherProgram | None) -> None:
    written_as: dict[str, str] = {}
    renamed: dict[str, Any] = {}
    for word, value in to.values.items():
        ours = settings_of(word, program)[0]
        before = renamed.get(ours)
        if before in (None, ""):
            renamed[ours], written_as[ours] = value, word
        elif value not in (None, "", before):
            both = f"{quote(written_as[ours], 30)} is {quote(before, 40)} and {quote(word, 30)} is {quote(value, 40)}"
            to.refuse(ours, f"{both}; give one of them.")
    to.values = renamed


def _lists(to: Translator) -> None:
    """Lists may be text with commas; empty text means the default. A list may hold the one dataset."""
    values = to.values
    for key in ("reward_functions", "reward_weights", "lora_keys", "modules_to_save", "report_to", "stop_when"):
        value = values.get(key)
        if key == "reward_weights" and isinstance(value, (int, float)) and not isinstance(value, bool):
            values[key] = [value]
        elif isinstance(value, str) or (isinstance(value, list) and all(isinstance(part, str) for part in value)):
            names = [name.strip() for name in split_names(value)]
            values[key] = names or (None if isinstance(value, str) else [])
    if isinstance(stop := values.get("stop"), str):
        values["stop"] = [stop] if stop else []
    if isinstance(data := values.get("data"), list):
        values["data"] = data[0] if len(data) == 1 else None
        if len(data) != 1:
            to.refuse("data", f"{len(data)} datasets are listed; give exactly one.")


def _report(word: str, fate: Word, to: Translator, values: Mapping[str, Any]) -> TranslatedKey | None:
    faulty = {fault.setting for fault in to.faults}
    if word in faulty or (isinstance(fate, Translated) and faulty.issuperset(fate.settings)):
        return None
    as_here, remark = TranslatedKey(word, "as here", "already the default here"), to.remarks.get(word, "")
    if isinstance(fate, IgnoredKey):
        return TranslatedKey(word, "without effect", fate.reason)
    if isinstance(fate, Refused) or (fate.is_switch and not as_bool(to.written[word])):
        return as_here
    made = [
        f"{key}: {_as_yaml(values[key])}"
        for key in fate.settings
        if key in values and (key == word or key not in to.written)
    ]
    if made:
        return TranslatedKey(word, "translated", "; ".join([", ".join(made), *([remark] if remark else [])]))
    return TranslatedKey(word, "without effect", remark) if remark else as_here


@cache
def other_names(key: str) -> list[str]:
    """Names of one of our settings in other programs: keys that name it alone, or it and one other."""
    grouped = {"lora_keys": ["keys"]} | {name: [f"lora_parameters {name}"] for name in ("rank", "scale", "dropout")}
    named = [word for word in FOREIGN_WORDS if key in (own := settings_of(word)) and len(own) <= 2]
    return [*named, *grouped.get(key, [])]


def account(translation: Translation) -> list[str]:
    """A line for the program, a line per key, and its defaults; [] for a file that has no key of another program."""
    said = {"translated": "read as ", "without effect": "without effect here: ", "as here": ""}
    lines = [f"{word.word}: {said[word.fate]}{word.sentence}." for word in translation.words]
    if lines and translation.program is not None:
        name, rest = translation.program.name, "GRPO Studio's defaults"
        if translation.defaults:
            rest = f"{name}'s defaults; --set defaults=ours takes ours"
            lines.append(f"{name}'s defaults: {translation.listed_defaults()}.")
        elif own := _own_words(translation.file, translation.program):
            rest += f", as it has GRPO Studio's own {' and '.join(own)}; --set defaults=theirs takes {name}'s"
        lines.insert(0, f"This is a file for {name}. What it leaves out has {rest}.")
    elif lines and translation.is_mixed:
        units = "gradient_accumulation_steps and iters mean what they mean here, and defaults are GRPO Studio's"
        lines.insert(0, f"Words of several programs stand in this file; {units}.")
    return lines


def summary(translation: Translation, file: str) -> str:
    """What was made of a file for another program, in one line; "" for any other."""
    if translation.program is None:
        return ""
    name = translation.program.name
    count = sum(word.fate == "translated" and word.word in translation.file for word in translation.words)
    ignored = [word.word for word in translation.words if word.fate == "without effect"]
    converted = f"{count} {'setting' if count == 1 else 'settings'} converted"
    parts = [f"From {one_line(file, 80)}, a file for {name}: {converted}"]
    parts += [f"without effect here: {quote(', '.join(ignored), 200)}"] if ignored else []
    parts += [word.sentence.partition("; ")[2] for word in translation.words if "rounded up" in word.sentence]
    whose = f"{name}'s defaults for the rest: {translation.listed_defaults()}"
    return "; ".join([*parts, whose if translation.defaults else "GRPO Studio's defaults for the rest"]) + "."
