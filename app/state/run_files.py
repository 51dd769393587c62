"""What the window reads of a run's files beside the event log."""

import re
from itertools import takewhile
from pathlib import Path

from app.state.reward_bench import reward_file
from backend.config import config
from backend.config.config import SETTINGS
from backend.runs.events import Event
from backend.runs.queue import is_fresh
from backend.runs.run_folder import RunFolder, all_runs
from backend.utils.errors import UserError
from backend.utils.files import last_lines
from backend.utils.text import as_in_a_terminal, quote

LOG_TAIL = 64 << 10
LAST_WORDS = 200
DISK = "disk: "  # begins the last line of a log if the disk took no more of the event log
NOT_FOLLOWED = "It goes on at Hugging Face, or has ended there. Log and adapter are fetched once it is followed."
STEERED_STATES = ("running", "paused")
_SETTING = re.compile(r"^[a-z_]+: ")
_LINE = re.compile(r"line (\d+)")
_ROUTINE = re.compile(r"step \d+  |BLAS is |.+(…|/s\.)$")  # lines that every run prints


def newest_checkpoint(folder: RunFolder) -> int | None:
    """The step of the newest checkpoint in which something was learned."""
    # A checkpoint is written under a hidden name, which is no number, and renamed when it is complete.
    names = [path.parent.name for path in folder.checkpoints.glob("*/state.json")]
    return max((int(name) for name in names if name.isdigit()), default=0) or None


def problem_of(state: str, ending: Event | None, step: int, folder: RunFolder) -> str:
    if state == "failed":
        # `setting: ` prefixes are for programs; the sentences name the settings themselves.
        lines = str((ending or {}).get("sentence") or "").splitlines()
        return " ".join(_SETTING.sub("", line) for line in lines) or "The run failed; the log may say why."
    if state != "crashed":
        return ""
    if folder.is_remote:
        return NOT_FOLLOWED
    when = f"after step {step}" if step else "before its first step"
    lines = (line.strip() for line in reversed(log_lines(folder.log, 20)))
    of_process = takewhile(lambda line: line != str(folder.path), lines)  # which prints the folder first
    last = next((line for line in of_process if line and not _ROUTINE.match(line)), "")
    if last.startswith(DISK):
        why = quote(last.removeprefix(DISK), LAST_WORDS)
        return f"The training process ended {when} and could not write down why: {why}"
    return (
        f"The training process ended {when} without saying why, as when the system runs out of memory and kills it."
        + (f" Its last words: {quote(last, LAST_WORDS)}" if last else "")
    )


def setting_of_problem(ending: Event | None) -> str:
    """The setting that a failed run's message begins with, or ""."""
    found = _SETTING.match(str((ending or {}).get("sentence") or ""))
    key = found.group().removesuffix(": ") if found else ""
    return key if key in SETTINGS else ""


def failed_line(folder: RunFolder, ending: Event | None) -> tuple[Path, int] | None:
    """The reward file and its line at which a function of a failed run has raised; None where nothing says so."""
    sentence = str((ending or {}).get("sentence") or "")
    found = _LINE.search(sentence)
    if found is None or setting_of_problem(ending) not in ("reward_functions", "reward_functions_file"):
        return None
    try:
        file = reward_file(config.read(folder.config))
    except UserError:
        return None
    return (file, int(found[1])) if file is not None and file.name in sentence else None


def silence_advice(pid: object, checkpoint: int | None) -> str:
    """What to do about a silent run, with its process id and newest checkpoint."""
    process = f"process {pid}" if isinstance(pid, int) else "its process"
    after = f"continues from step {checkpoint:,}" if checkpoint is not None else "starts over (no checkpoint yet)"
    return (
        "It may be in one long operation, which Pause and Stop wait for, or hang. The log may tell. "
        f"If it never comes back, end {process}; Resume then {after}."
    )


def log_lines(path: Path, n: int) -> list[str]:
    text = last_lines(path, LOG_TAIL).decode("utf-8", errors="replace")
    lines = text.removesuffix("\n").split("\n") if text else []
    return [as_in_a_terminal(line) for line in lines[-n:]]


def file_stamp(path: Path) -> tuple[int, int]:
    """(time of the last change in ns, bytes); zeros without a file."""
    try:
        about = path.stat()
    except OSError:
        return 0, 0
    return about.st_mtime_ns, about.st_size


def last_run() -> RunFolder | None:
    begun = (run for run in all_runs() if not is_fresh(run))
    return max(begun, key=lambda run: file_stamp(run.events), default=None)


def live_run() -> RunFolder | None:
    return next((run for run in all_runs() if run.is_locked() and not run.is_remote), None)
