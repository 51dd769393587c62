"""A file for another program as a YAML file of ours: what it says, what its program takes for the rest, and what was not carried."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from backend.config.config import SETTINGS, dump, problems, resolve_paths, valid_value
from backend.config.other_programs.translation import OtherProgram, Translation, program_of, read_words
from backend.utils.documents import read_json, read_yaml
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import user_path
from backend.utils.text import one_line, quote

_MENDED_LATER = ("model", "data", "reward_functions", "reward_functions_file")
"""Settings that a Python script, and not its file of arguments, would name: they may still be missing."""


@dataclass(frozen=True, slots=True)
class ImportedFile:
    """`text`: the YAML file. `program`: whose file it was. `missing`: what is still to be given before it can be trained."""

    text: str
    program: OtherProgram
    missing: list[ConfigProblem]


def import_file(path: Path, *, their_defaults: bool = True) -> ImportedFile:
    """The YAML text for a file of another program, YAML or JSON. Raises UserError for a file of ours or of nobody's, and for every
    word of it that cannot be translated. `their_defaults`: write what its program takes for words that the file leaves out."""
    path = user_path(str(path), "file")
    raw: Any = read_json(path, "file") if path.suffix.lower() == ".json" else read_yaml(path, "file")
    if not isinstance(raw, dict):
        raise UserError("file", f"{quote(path)} must hold settings as “key: value” lines.")
    raw = resolve_paths(path.parent, {str(key): value for key, value in cast("dict[Any, Any]", raw).items()})
    program = program_of(raw)
    if program is None:
        raise UserError(
            "file", f"{quote(path)} has no word of TRL, mlx-lm-lora or mlx-grpo alone; check it as it is, with check."
        )
    translation = read_words(raw)
    defaults = _left_out(raw, program, translation) if their_defaults else {}
    whole = read_words(raw | defaults)
    if faults := [fault for fault in [*whole.faults, *problems(whole.values)] if fault.setting not in _MENDED_LATER]:
        raise UserError(list(dict.fromkeys(faults)))
    missing = [fault for fault in problems(whole.values) if fault.setting in _MENDED_LATER]
    if program.key == "trl" and "reward_functions" not in whole.values:
        missing.append(
            ConfigProblem(
                "reward_functions", "The file names none; without any, GRPO Studio's five defaults score completions."
            )
        )
    return ImportedFile(_text(path, program, translation, whole), program, missing)


def _left_out(raw: Mapping[str, Any], program: OtherProgram, translation: Translation) -> dict[str, Any]:
    """The program's defaults for words that the file leaves out, under whatever name; of a mapping, option by option."""
    left: dict[str, Any] = {}
    for word, value in program.defaults(raw).items():
        own = raw.get(word)
        if isinstance(value, dict):
            options = {
                name: option for name, option in cast("dict[str, Any]", value).items() if name not in translation.values
            }
            left[word] = options | (cast("dict[str, Any]", own) if isinstance(own, dict) else {})
        elif own is None and not set(_main_setting(program, word)) & translation.values.keys():
            left[word] = value
    return left


def _main_setting(program: OtherProgram, word: str) -> tuple[str, ...]:
    """The setting that a word is first of all about."""
    fate = program.words.get(word)
    return getattr(fate, "settings", (word,))[:1]


def _text(path: Path, program: OtherProgram, written: Translation, whole: Translation) -> str:
    """The file: where it came from, our settings section by section, then what was translated and what was left out."""
    values = {key: valid_value(key, value) for key, value in whole.values.items() if key in SETTINGS}
    from_defaults = [key for key in values if key not in written.values]
    parts = [
        f"# From {one_line(path.name, 80)}, a file for {program.name}, by python -m backend import.\n",
        dump(values),
        _comment(
            f"Not in the file; what {program.name} takes:",
            [f"{key}: {quote(values[key], 60)}" for key in from_defaults],
        ),
        _comment("Read as:", [f"{word.word} → {word.sentence}" for word in written.words if word.fate == "translated"]),
        _comment(
            "Not carried over:",
            [f"{word.word}: {word.sentence}" for word in written.words if word.fate == "without effect"],
        ),
    ]
    return "\n".join(part for part in parts if part)


def _comment(title: str, lines: list[str]) -> str:
    """A title and a line each, as YAML comments; nothing without lines."""
    if not lines:
        return ""
    wrapped = [
        part
        for line in lines
        for part in textwrap.wrap(one_line(line), 100, initial_indent="#   ", subsequent_indent="#     ")
    ]
    return "\n".join([f"# {title}", *wrapped, ""])
