"""What the window reads of a run's files beside the event log: checkpoints, the end of the log, settings in force."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.config.config import SETTINGS, Config, parse
from backend.rewards.catalogue import DEFAULT_REWARDS, metric_name, split_names
from backend.runs.archive import summary
from backend.runs.events import Event
from backend.runs.queue import is_fresh
from backend.runs.run_folder import RunFolder, all_runs
from backend.runs.start_progress import StartProgress
from backend.runs.steering import Change, changed, config_at, read_changes, request_change
from backend.utils.errors import UserError
from backend.utils.files import open_regular
from backend.utils.text import as_in_a_terminal, quote

LOG_TAIL = 64 << 10
"""Bytes at the end of a log that `log_lines` reads."""
LAST_WORDS = 200
"""Characters of a log's last line that a message shows."""
DISK = "disk: "
"""The last line of a log begins with this where the disk took no more lines of the event log."""
STEERED_STATES = ("running", "paused")
_SETTING = re.compile(r"^[a-z_]+: ")
_ROUTINE = re.compile(r"step \d+  |BLAS is ")


def newest_checkpoint(folder: RunFolder) -> int | None:
    """The step of a run's newest complete checkpoint; None if it has none."""
    # A checkpoint is written under a hidden name, which is no number, and renamed when it is complete.
    names = [path.parent.name for path in folder.checkpoints.glob("*/state.json")]
    return max((int(name) for name in names if name.isdigit()), default=None)


def problem_of(state: str, ending: Event | None, step: int, folder: RunFolder) -> str:
    """Why a failed or crashed run ended."""
    if state == "failed":
        # `setting: ` prefixes are for programs; the sentences name the settings themselves.
        lines = str((ending or {}).get("sentence") or "").splitlines()
        return " ".join(_SETTING.sub("", line) for line in lines) or "The run failed; the log may say why."
    if state != "crashed":
        return ""
    when = f"after step {step}" if step else "before its first step"
    lines = (line.strip() for line in reversed(log_lines(folder.log, 20)))
    last = next((line for line in lines if not _is_routine(line) and line != str(folder.path)), "")
    if last.startswith(DISK):
        why = quote(last.removeprefix(DISK), LAST_WORDS)
        return f"The training process ended {when} and could not write down why: {why}"
    return (
        f"The training process ended {when} without saying why, as when the system runs out of memory and kills it."
        + (f" Its last words: {quote(last, LAST_WORDS)}" if last else "")
    )


def _is_routine(line: str) -> bool:
    return not line or _ROUTINE.match(line) is not None or StartProgress.read(line) is not None


def setting_of_problem(ending: Event | None) -> str:
    """The setting that the message of a failed run begins with; "" for none of the form."""
    found = _SETTING.match(str((ending or {}).get("sentence") or ""))
    key = found.group().removesuffix(": ") if found else ""
    return key if key in SETTINGS else ""


def silence_advice(pid: object, checkpoint: int | None) -> str:
    """What to do about a silent run: `pid` of its process, and the step that a resume continues from."""
    process = f"process {pid}" if isinstance(pid, int) else "its process"
    after = f"continues from step {checkpoint:,}" if checkpoint is not None else "starts over (no checkpoint yet)"
    return (
        "It may be in one long operation, which Pause and Stop wait for, or hang. The log may tell. "
        f"If it never comes back, end {process}; Resume then {after}."
    )


def log_lines(path: Path, n: int) -> list[str]:
    """The last `n` lines of a log, as a terminal shows them."""
    text = last_lines(path, LOG_TAIL).decode("utf-8", errors="replace")
    lines = text.removesuffix("\n").split("\n") if text else []
    return [as_in_a_terminal(line) for line in lines[-n:]]


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


@dataclass(frozen=True, slots=True)
class CrashOffer:
    """A run that crashed while no window looked. `key` tells this crash from every other."""

    folder: RunFolder
    step: int
    checkpoint: int | None
    """The step that a resume continues from; None for the start."""
    key: str

    @property
    def question(self) -> str:
        when = f"after step {self.step:,}" if self.step else "before its first step"
        return f"{self.folder.name} ended unexpectedly {when}."

    @property
    def detail(self) -> str:
        if self.checkpoint is None:
            return "There is no checkpoint yet, so it would start over."
        lost = self.step - self.checkpoint
        if lost <= 0:
            return f"It can go on from step {self.checkpoint:,}. Nothing is lost."
        steps = f"{lost:,} steps" if lost > 1 else "step"
        return f"It can go on from step {self.checkpoint:,}. The {steps} after it would be trained again."

    @property
    def action(self) -> str:
        return "Start over" if self.checkpoint is None else f"Resume from step {self.checkpoint:,}"


def last_run(folder: Path | None = None) -> RunFolder | None:
    """The run in `folder` (the runs folder by default) that has trained last; None where none has ever begun."""
    begun = (run for run in all_runs(folder) if not is_fresh(run))
    return max(begun, key=lambda run: modified_ns(run.events), default=None)


def crash_offer(run: RunFolder, offered: str) -> CrashOffer | None:
    """The offer to resume this run; None where it has not crashed, or `offered` is the key of this crash."""
    about = summary(run)
    key = f"{run.path}:{file_size(run.events)}"
    if about.state != "crashed" or key == offered:
        return None
    return CrashOffer(run, about.step or 0, newest_checkpoint(run), key)


class PresentSettings:
    """A run's settings as they are now: config.yaml (`raw` returns it) with every change that its trainer took."""

    def __init__(self, folder: RunFolder, raw: Callable[[], Mapping[str, Any]]) -> None:
        self._folder, self._raw = folder, raw
        self._read: tuple[int, list[Change]] = (-1, [])

    def changes(self) -> list[Change]:
        """Every change by step; the last may be of a step to come. Raises UserError for a damaged file."""
        written = modified_ns(self._folder.changes)
        if written != self._read[0]:
            self._read = (written, read_changes(self._folder))
        return list(self._read[1])

    def at_last(self) -> Config:
        """The settings once every change holds. Raises UserError."""
        return config_at(parse(self._raw()), self.changes())

    def ask(self, settings: Mapping[str, Any], state: str, done: int) -> None:
        """Ask the trainer of a run in this state, after `done` steps at least, for a change. Raises UserError."""
        if state not in STEERED_STATES:
            raise UserError("run", "Settings change while a run is training or paused.")
        changed(self.at_last(), settings, done)
        request_change(self._folder, settings)
