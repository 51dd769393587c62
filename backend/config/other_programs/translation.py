"""Translates the keys and values of TRL, mlx-lm-lora, mlx-lm and mlx-grpo into our settings, and reports on each key.

Works on the raw mapping of a YAML file or of the form: renames, regroups and converts units, but validates nothing.
Where two programs have a key, or a key is ours too, the program that the file is written for decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

from backend.config.other_programs import spellings
from backend.config.other_programs.keys import (
    IgnoredKey,
    OtherProgram,
    Refused,
    Translated,
    Translator,
    Word,
    as_bool,
)
from backend.config.other_programs.mlx_grpo import MLX_GRPO
from backend.config.other_programs.mlx_lm import MLX_LM_LORA, PRECISION_FLAGS, QUANTIZATION_FLAGS
from backend.config.other_programs.spellings import KEY_ALIASES
from backend.config.other_programs.trl import TRL
from backend.utils.errors import ConfigProblem
from backend.utils.text import about_value, quote

PROGRAMS: tuple[OtherProgram, ...] = (TRL, MLX_LM_LORA, MLX_GRPO)
_AS_HERE = "already the default here"


@dataclass(frozen=True, slots=True)
class TranslatedKey:
    """What became of one key of another program. `sentence` begins in lower case, to follow the key.

    `as here`: it asks for what is the default here, such as a feature that does not exist to be off.
    """

    word: str
    fate: Literal["translated", "without effect", "as here"]
    sentence: str


@dataclass(frozen=True, slots=True)
class Translation:
    """A file in our keys.

    Attributes:
        values – our key → value, without keys that have a problem. Unknown keys stay as they are.
        faults – what could not be translated.
        program – the program that the file is written for, where its keys say so.
        words – what became of each key that is not ours, or means something else there, in the order of the file.
        is_mixed – keys of several programs stand in it, so it is written for none of them.
    """

    values: dict[str, Any]
    faults: list[ConfigProblem]
    program: OtherProgram | None
    words: list[TranslatedKey]
    is_mixed: bool


def is_ours(word: str) -> bool:
    """Whether a key of a table is a setting of ours too."""
    fates = (program.words.get(word) for program in PROGRAMS)
    return any(isinstance(fate, Translated) and word in fate.settings for fate in fates)


def fate_of(word: str, program: OtherProgram | None) -> Word | None:
    """The table row of a key in a file for `program`; None for an unknown one."""
    for reader in _readers(program):
        if word in reader.words:
            return reader.words[word]
    return Translated((KEY_ALIASES[word],)) if word in KEY_ALIASES else None


def _readers(program: OtherProgram | None) -> tuple[OtherProgram, ...]:
    """All programs, the file's own first."""
    return PROGRAMS if program is None else (program, *(other for other in PROGRAMS if other is not program))


def _marks() -> dict[str, OtherProgram]:
    """Keys that identify a file: those of one program only that are not ours."""
    owners: dict[str, list[OtherProgram]] = {}
    for program in PROGRAMS:
        for word in program.words:
            owners.setdefault(word, []).append(program)
    return {word: owner[0] for word, owner in owners.items() if len(owner) == 1 and not is_ours(word)}


MARKS = _marks()
FOREIGN_WORDS: tuple[str, ...] = tuple(
    dict.fromkeys(
        [*KEY_ALIASES, "dataset", *(word for program in PROGRAMS for word in program.words if not is_ours(word))]
    )
)
"""Every key that is read and is not ours; suggested for a misspelt key."""
NAMES: dict[str, str] = {
    word: fate.settings[0]
    for word in FOREIGN_WORDS
    if isinstance(fate := fate_of(word, None), Translated) and len(fate.settings) == 1
}
"""Another program's key → the one setting of ours that it names."""


def program_of(raw: Mapping[str, Any]) -> OtherProgram | None:
    """The program whose own keys stand in a file; None for a file of ours, or one that mixes several programs."""
    found = _programs_in(raw)
    return found[0] if len(found) == 1 else None


def _programs_in(raw: Mapping[str, Any]) -> list[OtherProgram]:
    found = {MARKS[word].key: MARKS[word] for word, value in raw.items() if value is not None and word in MARKS}
    return list(found.values())


def translate(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """(`raw` in our keys and values, problems). See `read_words`."""
    translation = read_words(raw)
    return translation.values, translation.faults


def read_words(raw: Mapping[str, Any]) -> Translation:
    """`raw` in our keys and values. Keys with the value None, and keys with a problem, count as absent."""
    program = program_of(raw)
    to = Translator(raw, program.key if program else "")
    fates = {word: fate for word in to.values if (fate := fate_of(word, program))}
    foreign = {word for word in fates if not _is_plain(word, program)}
    for word in to.written:
        fate = fates.get(word)
        if word not in foreign:
            continue
        if isinstance(fate, Translated):
            if fate.value is not None and to.flag(word):
                to.fill(fate.settings[0], fate.value, word)
            continue
        value = to.take(word)
        if isinstance(fate, Refused) and fate.asks(value):
            rest = f") has no counterpart here. {fate.nearest}"
            to.refuse(word, about_value(f"{quote(word, 40)} (", _as_yaml(value), rest))
    for reader in _readers(program):
        for regroup in reader.regroups if reader is not MLX_LM_LORA else ():
            regroup(to)
    # mlx-lm's come last: the others leave flags and a schedule mapping in its keys.
    for regroup in (spellings.one_dataset, spellings.split_lists, *MLX_LM_LORA.regroups):
        regroup(to)
    _rename(to, program)
    spellings.menus_and_empty_names(to)
    faulty = {fault.setting for fault in to.faults}
    values = {key: value for key, value in to.values.items() if value is not None and key not in faulty}
    told = [word for word in fates if word in foreign or word in to.remarks]
    words = [key for word in told if (key := _report(word, fates[word], to, values, raw)) is not None]
    return Translation(values, to.faults, program, words, len(_programs_in(raw)) > 1)


def with_changes(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> Translation:
    """`raw` with every change over it, in our keys; both may use any name of a setting, and None takes one out.

    In a file for another program, a change by one of its keys replaces that line of the file, in the file's units. Any
    other key means what it means here.
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
    """Our settings that a key names in a file for `program`; one of ours names itself."""
    fate = fate_of(word, program)
    return fate.settings if isinstance(fate, Translated) and not is_ours(word) else (word,)


def _is_plain(word: str, program: OtherProgram | None) -> bool:
    """Whether a key is ours and has our meaning in this file."""
    return is_ours(word) and (program is None or word not in program.words or program.shares_meaning(word))


def _as_yaml(value: Any) -> str:
    """A value in a message, nearly as a file has it."""
    if isinstance(value, list):
        return f"[{quote(', '.join(quote(part, 60) for part in cast('list[Any]', value[:20])), 80)}]"
    return str(value).lower() if isinstance(value, bool) else quote(value, 40)


def _rename(to: Translator, program: OtherProgram | None) -> None:
    """Keys that no function took become ours; a problem where two of them disagree."""
    written_as: dict[str, str] = {}
    renamed: dict[str, Any] = {}
    for word, value in to.values.items():
        ours = settings_of(word, program)[0]
        before = renamed.get(ours)
        if before is not None and value is not None and value != before:
            both = f"{quote(written_as[ours], 30)} is {quote(before, 40)} and {quote(word, 30)} is {quote(value, 40)}"
            to.refuse(ours, f"{both}; give one of them.")
        if before is None:
            renamed[ours], written_as[ours] = value, word
    to.values = renamed


def _report(
    word: str, fate: Word, to: Translator, values: Mapping[str, Any], raw: Mapping[str, Any]
) -> TranslatedKey | None:
    """What became of one key; None for one that has a problem itself, or whose settings all have."""
    faulty = {fault.setting for fault in to.faults}
    if word in faulty or (isinstance(fate, Translated) and faulty.issuperset(fate.settings)):
        return None
    remark = to.remarks.get(word, "")
    if isinstance(fate, IgnoredKey):
        return TranslatedKey(word, "without effect", fate.reason)
    if remark.startswith("without effect: "):
        return TranslatedKey(word, "without effect", remark.removeprefix("without effect: "))
    if isinstance(fate, Refused) or (fate.is_switch and not as_bool(raw[word])):
        return TranslatedKey(word, "as here", _AS_HERE)
    made = [
        f"{key}: {_as_yaml(values[key])}"
        for key in fate.settings
        if key in values and (key == word or key not in to.written)
    ]
    if made:
        return TranslatedKey(word, "translated", "; ".join([", ".join(made), *([remark] if remark else [])]))
    return TranslatedKey(word, "without effect", remark) if remark else TranslatedKey(word, "as here", _AS_HERE)


def other_names(key: str) -> list[str]:
    """Names of one of our settings in other programs."""
    flags = {"quantization": [*QUANTIZATION_FLAGS], "dtype": [*PRECISION_FLAGS], "data": ["dataset"]}
    grouped = {"lora_keys": ["keys"]} | {name: [f"lora_parameters {name}"] for name in ("rank", "scale", "dropout")}
    return list(dict.fromkeys([*flags.get(key, []), *_words_by_setting().get(key, []), *grouped.get(key, [])]))


@cache
def _words_by_setting() -> dict[str, list[str]]:
    """Our setting → keys that name it alone, or it and one other."""
    words: dict[str, list[str]] = {}
    for word in FOREIGN_WORDS:
        if isinstance(fate := fate_of(word, None), Translated) and len(fate.settings) <= 2:
            for key in fate.settings:
                words.setdefault(key, []).append(word)
    return words


OURS_FOR_THE_REST = (
    "What the file leaves out has GRPO Studio's defaults; python -m backend import FILE writes those of {name} instead."
)
_MIXED = "Words of several programs stand in this file; gradient_accumulation_steps and iters mean what they mean here."


def account(translation: Translation) -> list[str]:
    """A line for the program and a line per key; [] for a file that has no key of another program."""
    said = {"translated": "read as ", "without effect": "without effect here: ", "as here": ""}
    lines = [f"{word.word}: {said[word.fate]}{word.sentence}." for word in translation.words]
    if not lines:
        return []
    if translation.program is None:
        return [*([_MIXED] if translation.is_mixed else []), *lines]
    name = translation.program.name
    return [f"This is a file for {name}. {OURS_FOR_THE_REST.format(name=name)}", *lines]
