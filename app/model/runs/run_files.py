"""What the window reads of a run's files beside the diary: the newest checkpoint, the end of the log, the rewards of the settings."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from backend.spec.config import SETTINGS
from backend.spec.events import Event
from backend.spec.regular_file import open_regular
from backend.spec.rewards.catalog import DEFAULT_REWARDS, metric_name, split_names
from backend.spec.run_folder import RunFolder
from backend.spec.runs.start_progress import StartProgress
from backend.spec.user_input.text import as_in_a_terminal, shown

LOG_TAIL = 64 << 10
"""Bytes at the end of a log that `log_lines` reads."""
_SETTING = re.compile(r"^[a-z_]+: ")
_ROUTINE = re.compile(r"step \d+  |BLAS is ")
LAST_WORDS = 200
"""How many characters of a log's last line a sentence takes; the log may be somebody else's."""
DISK = "disk: "
"""What the last line of a log begins with where the disk took no more lines of the diary."""


def newest_checkpoint(folder: RunFolder) -> int | None:
    """The step of a run's newest complete checkpoint, by the names of its folders; None if it has none."""
    # A checkpoint is written under a hidden name, which is no number, and renamed when it is complete.
    names = [path.parent.name for path in folder.checkpoints.glob("*/state.json")]
    return max((int(name) for name in names if name.isdigit()), default=None)


def problem_of(state: str, ending: Event | None, step: int, folder: RunFolder) -> str:
    """Why a failed or crashed run ended, as one sentence; empty in any other state."""
    if state == "failed":
        sentence = (ending or {}).get("sentence")
        return sentences_of(str(sentence)) if sentence else "The run failed; the log may tell why."
    if state != "crashed":
        return ""
    when = f"after step {step}" if step else "before its first step"
    lines = (line.strip() for line in reversed(log_lines(folder.log, 20)))
    last_words = next((line for line in lines if not is_routine(line) and line != str(folder.path)), "")
    if last_words.startswith(DISK):
        return f"The training process ended {when} and could not write down why: {shown(last_words.removeprefix(DISK), LAST_WORDS)}"
    last_words = shown(last_words, LAST_WORDS)
    return (
        f"The training process ended {when} without saying why, as when the system runs out of memory and kills it."
        + (f" Its last words: {last_words}" if last_words else "")
    )


def is_routine(line: str) -> bool:
    """Whether a line of the log is one that every run prints, and so tells nothing of why one ended: blank, a figure of its steps, how far its
    start has come, what it computes with."""
    text = line.strip()
    return not text or _ROUTINE.match(text) is not None or StartProgress.read(text) is not None


def setting_of_problem(ending: Event | None) -> str:
    """The setting that the sentence of a failed run begins with; "" where that is none of the form."""
    found = _SETTING.match(str((ending or {}).get("sentence") or ""))
    key = found.group().removesuffix(": ") if found else ""
    return key if key in SETTINGS else ""


def log_lines(path: Path, n: int) -> list[str]:
    """The last `n` lines of a log, as a terminal shows them."""
    text = last_lines(path, LOG_TAIL).decode("utf-8", errors="replace")
    lines = text.removesuffix("\n").split("\n") if text else []
    return [as_in_a_terminal(line) for line in lines[-n:]]


def sentences_of(faults: str) -> str:
    """Faults without their `setting: ` prefixes, which are for programs; the sentences name the settings themselves."""
    return " ".join(_SETTING.sub("", line) for line in faults.splitlines())


def configured_rewards(config: dict[str, Any]) -> list[str]:
    names = config.get("reward_functions") or list(DEFAULT_REWARDS)
    return [metric_name(name) for name in split_names(names)] if isinstance(names, str | list) else []


def modified_ns(path: Path) -> int:
    """When the file was last written, in nanoseconds; 0 if it does not exist."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def file_size(path: Path) -> int:
    """The bytes of a file; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def last_lines(path: Path, max_bytes: int) -> bytes:
    """The last complete lines of a file, in at most `max_bytes`."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - max_bytes))
            text = file.read(max_bytes)
    except OSError:
        return b""
    return text if size <= max_bytes else text.partition(b"\n")[2]  # the first line is cut, perhaps inside a character
