"""A file for another program as a YAML file of ours, with its defaults and a comment on what was left out."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from backend.config.config import SETTINGS, dump, problems, resolve_paths, valid_value
from backend.config.other_programs.keys import OtherProgram, Translated
from backend.config.other_programs.translation import Translation, program_of, read_words
from backend.utils.documents import read_json, read_yaml
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.files import user_path
from backend.utils.text import one_line, quote

_GIVEN_LATER = ("model", "data", "reward_functions", "reward_functions_file")
"""Settings that a Python script, and not its file of arguments, would name: they may be missing."""


@dataclass(frozen=True, slots=True)
class ImportedFile:
    """`text`: the YAML file. `program`: whose file it was. `missing`: what is still needed before it can be trained."""

    text: str
    program: OtherProgram
    missing: list[ConfigProblem]


def import_file(path: Path, *, their_defaults: bool = True) -> ImportedFile:
    """Translate a YAML or JSON file. `their_defaults`: write the program's defaults for keys that the file leaves out.

    Raises UserError for a file of no other program, and for every key that cannot be translated.
    """
    path = user_path(str(path), "file")
    raw: Any = read_json(path, "file") if path.suffix.lower() == ".json" else read_yaml(path, "file")
    if not isinstance(raw, dict):
        raise UserError("file", f"{quote(path)} must hold settings as “key: value” lines.")
    raw = resolve_paths(path.parent, {str(key): value for key, value in cast("dict[Any, Any]", raw).items()})
    program = program_of(raw)
    if program is None:
        advice = "check it as it is, with check"
        raise UserError("file", f"{quote(path)} has no word of TRL, mlx-lm-lora or mlx-grpo alone; {advice}.")
    translation = read_words(raw)
    left_out = _left_out(raw, program, translation) if their_defaults else {}
    whole = read_words(raw | left_out)
    faults = problems(whole.values)
    if wrong := [fault for fault in [*whole.faults, *faults] if fault.setting not in _GIVEN_LATER]:
        raise UserError(list(dict.fromkeys(wrong)))
    missing = [fault for fault in faults if fault.setting in _GIVEN_LATER]
    if program.key == "trl" and "reward_functions" not in whole.values:
        sentence = "The file names none; without any, GRPO Studio's five defaults score completions."
        missing.append(ConfigProblem("reward_functions", sentence))
    return ImportedFile(_text(path, program, translation, whole), program, missing)


def _left_out(raw: dict[str, Any], program: OtherProgram, translation: Translation) -> dict[str, Any]:
    """The program's defaults for keys that the file leaves out, under whatever name; of a mapping, option by option."""
    left: dict[str, Any] = {}
    for word, value in program.defaults(raw).items():
        own, fate = raw.get(word), program.words.get(word)
        if isinstance(value, dict):
            options = cast("dict[str, Any]", value)
            left[word] = {name: option for name, option in options.items() if name not in translation.values}
            left[word] |= cast("dict[str, Any]", own) if isinstance(own, dict) else {}
        elif own is None and (fate.settings[0] if isinstance(fate, Translated) else word) not in translation.values:
            left[word] = value
    return left


def _text(path: Path, program: OtherProgram, written: Translation, whole: Translation) -> str:
    values = {key: valid_value(key, value) for key, value in whole.values.items() if key in SETTINGS}
    added = [f"{key}: {quote(values[key], 60)}" for key in values if key not in written.values]
    read = [f"{word.word} → {word.sentence}" for word in written.words if word.fate == "translated"]
    ignored = [f"{word.word}: {word.sentence}" for word in written.words if word.fate == "without effect"]
    parts = [
        f"# From {one_line(path.name, 80)}, a file for {program.name}, by python -m backend import.\n",
        dump(values),
        _comment(f"Not in the file; what {program.name} takes:", added),
        _comment("Read as:", read),
        _comment("Not carried over:", ignored),
    ]
    return "\n".join(part for part in parts if part)


def _comment(title: str, lines: list[str]) -> str:
    """A title and a line each, as YAML comments; "" without lines."""
    if not lines:
        return ""
    wrapper = textwrap.TextWrapper(100, initial_indent="#   ", subsequent_indent="#     ")
    wrapped = [part for line in lines for part in wrapper.wrap(one_line(line))]
    return "\n".join([f"# {title}", *wrapped, ""])
