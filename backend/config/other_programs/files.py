"""Files of settings: any of another program as one of ours; an opened file's problems, and the keys probably meant."""

import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.config.config import SETTINGS, dump, problems, read, valid_value
from backend.config.other_programs.keys import OtherProgram
from backend.config.other_programs.translation import DEFAULTS, FOREIGN_WORDS, read_file
from backend.rewards.catalogue import nearest
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.text import one_line, quote

_GIVEN_LATER = ("model", "data", "reward_functions", "reward_functions_file")
"""Settings that a Python script, and not its file of arguments, would name: they may be missing."""


def import_file(path: Path, *, their_defaults: bool = True) -> tuple[str, OtherProgram, list[ConfigProblem]]:
    """(a file of ours, whose file it was, what is still needed before it can be trained). `their_defaults`: write the
    program's defaults for keys that the file leaves out. Raises UserError for a file of no other program, and for every
    key that cannot be translated."""
    translation = read_file(read(path, "file"), {} if their_defaults else {DEFAULTS: "ours"})
    program, values = translation.program, translation.values
    if program is None:
        advice = "check it as it is, with check"
        raise UserError("file", f"{quote(path)} has no word of TRL, mlx-lm-lora or mlx-grpo alone; {advice}.")
    faults = problems(values)
    if wrong := [fault for fault in [*translation.faults, *faults] if fault.setting not in _GIVEN_LATER]:
        raise UserError(list(dict.fromkeys(wrong)))
    missing = [fault for fault in faults if fault.setting in _GIVEN_LATER]
    if program.key == "trl" and "reward_functions" not in values:
        sentence = "The file names none; without any, GRPO Studio's five defaults score completions."
        missing.append(ConfigProblem("reward_functions", sentence))
    valid = {key: valid_value(key, value) for key, value in values.items() if key in SETTINGS}
    words = translation.words
    comments = {
        f"Not in the file; what {program.name} takes:": [
            f"{key}: {quote(valid[key], 60)}" for key in valid if key in translation.defaults
        ],
        "Read as:": [f"{key.word} → {key.sentence}" for key in words if key.fate == "translated"],
        "Not carried over:": [f"{key.word}: {key.sentence}" for key in words if key.fate == "without effect"],
    }
    wrapper = textwrap.TextWrapper(100, initial_indent="#   ", subsequent_indent="#     ")
    origin = f"From {one_line(path.name, 80)}, a file for {program.name}, by python -m backend import."
    parts = [dump(valid, origin)]
    for title, lines in comments.items():
        if lines:
            wrapped = [part for line in lines for part in wrapper.wrap(one_line(line))]
            parts.append("\n".join([f"# {title}", *wrapped, ""]))
    return "\n".join(parts), program, missing


@dataclass(frozen=True, slots=True)
class UnreadKey:
    key: str
    sentence: str
    meant: str = ""


@dataclass(frozen=True, slots=True)
class FileProblems:
    """What of a file was not read into the form. `raw`: its keys and values. `settings`: ours that it names.
    `refusal`: why nothing of the file was read, or ""."""

    path: Path
    raw: Mapping[str, Any] = field(default_factory=dict)
    unread: Sequence[UnreadKey] = ()
    settings: Collection[str] = ()
    refusal: str = ""


def file_problems(path: Path, raw: Mapping[str, Any], faults: Sequence[ConfigProblem]) -> FileProblems:
    """`faults`: of reading `raw`. A correction is offered where one unknown key is meant, and the file lacks it."""
    known = [*SETTINGS, *FOREIGN_WORDS]
    unknown = [fault.setting for fault in faults if fault.setting in raw and fault.setting not in known]
    meant = {key: near for key in unknown if (near := nearest(key, known)) is not None}
    clear = {key: near for key, near in meant.items() if near not in raw and list(meant.values()).count(near) == 1}
    unread = [UnreadKey(fault.setting, fault.sentence, clear.get(fault.setting, "")) for fault in faults]
    return FileProblems(path, raw, unread, {*raw, *read_file(raw).values})
