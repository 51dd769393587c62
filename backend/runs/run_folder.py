"""One run's folder: its files, how it is found, and how a new one is made."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from backend.utils import file_lock
from backend.utils.disk import replace_file
from backend.utils.errors import UserError
from backend.utils.files import is_file, is_folder_name, make_private_folder, restrict_to_user, user_path
from backend.utils.places import runs_folder
from backend.utils.text import quote, shown_path


class _Entry:
    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunFolder, owner: type[RunFolder] | None = None) -> Path:
        return run.path / self.name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run. The trainer appends to them; every other process only reads."""

    path: Path

    config = _Entry("config.yaml")
    events = _Entry("events.jsonl")
    completions = _Entry("completions.jsonl")
    log = _Entry("log.txt")
    control = _Entry("control")
    control_taken = _Entry("control.taken")
    change_request = _Entry("change.json")  # transient, as `control` is
    changes = _Entry("changes.json")  # with config.yaml it determines the run
    parent = _Entry("parent.json")  # of a clone
    about = _Entry("about.json")  # the user's title, note and tags
    lock = _Entry("run.lock")
    launch_lock = _Entry("launch.lock")  # of the process that starts the ranks of a run on several machines
    window_lock = _Entry("window.lock")  # of the window that controls the run
    window_request = _Entry("window.request")  # asks that window to release it; transient
    gpu_errors = _Entry("gpu_errors.jsonl")
    checkpoints = _Entry("checkpoints")
    adapters = _Entry("adapters")
    model = _Entry("model")
    fused = _Entry("fused")
    evaluations = _Entry("evaluations")
    inspection = _Entry("inspection")  # batches of steps with a number that was not finite
    trackers = _Entry("trackers")
    uploads = _Entry("uploads")

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def has_event_log(self) -> bool:
        return self.events.exists() and self.events.stat().st_size > 0

    def is_locked(self) -> bool:
        """True while a trainer lives in this folder, or a launcher that starts one. A lock dies with its process."""
        return file_lock.is_held(self.lock) or file_lock.is_held(self.launch_lock)

    def say(self, word: str) -> None:
        """Write a control word (pause, resume, save, stop, finish-step) for the trainer. Raises DiskError."""
        replace_file(self.control, word)


def all_runs(folder: Path | None = None) -> Iterator[RunFolder]:
    """Every run in `folder` (the runs folder by default), newest first, without hidden ones."""
    written = {path: modified_at(path / "config.yaml") for path in (folder or runs_folder()).glob("[!.]*")}
    yield from (RunFolder(path) for path in sorted(written, key=lambda path: -written[path]) if written[path])


def modified_at(path: Path) -> float:
    """Unix seconds of the last write; 0 where there is no file."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def find_run(name: str | Path, folder: Path | None = None) -> RunFolder:
    """A run by path, or by name inside the runs folder. Raises UserError when there is none."""
    for candidate in (user_path(str(name), "run"), (folder or runs_folder()) / name):
        if is_file(candidate / "config.yaml"):
            return RunFolder(candidate.resolve())
    where = f"neither a run folder at that path nor one in {quote(folder or runs_folder(), 80)}"
    raise UserError("run", f"There is no run {shown_path(str(name), 40)}: {where}.")


def default_run_name(model: str, train_type: str, train_mode: str, now: datetime | None = None) -> str:
    """model-traintype-mode-date in characters that are safe in a path; model/ and fused/ go by their parent's name."""
    path = Path(model)
    called = path.parent.name if path.name in ("model", "fused") and path.parent.name else path.name
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", called)[:80].strip("-.") or "run"
    return f"{stem}-{train_type}-{train_mode}-{(now or datetime.now()):%Y-%m-%d-%H%M%S}"


def make_run_folder(name: str, folder: Path | None = None, *, reuse: bool = False) -> RunFolder:
    """Make a folder for a run. Without `reuse`, a number is added where the name is taken; with it, a folder without an
    event log is used. Raises UserError."""
    parent = folder or runs_folder()
    if not is_folder_name(name):
        raise UserError("run_name", f"A run cannot be called {quote(name, 40)}: that is no name of a folder.")
    for number in range(1, 1000):
        run = RunFolder(parent / (name if number == 1 else f"{name}-{number}"))
        try:
            make_private_folder(run.path, exist_ok=reuse)
        except FileExistsError:
            if reuse:
                raise UserError("run_name", f"{run.path} exists and is not a folder.") from None
            continue
        except OSError as error:
            raise UserError("runs_dir", f"The runs folder {parent} cannot be written: {error.strerror}.") from None
        if not os.access(run.path, os.W_OK):
            raise UserError("runs_dir", f"The runs folder {parent} cannot be written: Permission denied.")
        if run.has_event_log or run.is_locked():
            raise UserError("run_name", f"The run {name} exists already; choose another name, or resume it.")
        restrict_to_user(run.path)  # with `reuse` it may be a folder that was there
        return run
    raise UserError("run_name", f"There are a thousand runs called {name}; choose another name.")
