"""One run's folder: its files, how it is found, and how a fresh one is made with a name of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from backend.utils import file_lock
from backend.utils.errors import UserError
from backend.utils.files import is_file, is_folder_name, make_private_folder, restrict_to_user, user_path
from backend.utils.places import runs_folder
from backend.utils.text import quote, shown_path
from backend.utils.whole_file import replace_file


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run. The trainer appends to them; every other process only reads."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def completions(self) -> Path:
        return self.path / "completions.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def control(self) -> Path:
        return self.path / "control"

    @property
    def control_taken(self) -> Path:
        return self.path / "control.taken"

    @property
    def change_request(self) -> Path:
        """Settings that a running trainer is asked to change, by `backend.runs.steering.request_change`; transient, as
        `control` is."""
        return self.path / "change.json"

    @property
    def changes(self) -> Path:
        """Every change of settings that the trainer took, with the step it holds from. With config.yaml it determines
        the run."""
        return self.path / "changes.json"

    @property
    def parent(self) -> Path:
        """Of a cloned run: the run and step that it began from, and what was changed."""
        return self.path / "parent.json"

    @property
    def about(self) -> Path:
        """What the user has noted about the run: title, note, tags. No trainer reads it."""
        return self.path / "about.json"

    @property
    def lock(self) -> Path:
        return self.path / "run.lock"

    @property
    def launch_lock(self) -> Path:
        """Held by the process that starts the ranks of a run on several machines, from before the first start until
        after the last."""
        return self.path / "launch.lock"

    @property
    def window_lock(self) -> Path:
        """Held by the window that controls the run, as long as the run trains and the window lives."""
        return self.path / "window.lock"

    @property
    def window_request(self) -> Path:
        """Asks the window that holds `window_lock` to give it up; transient."""
        return self.path / "window.request"

    @property
    def gpu_errors(self) -> Path:
        return self.path / "gpu_errors.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def adapters(self) -> Path:
        return self.path / "adapters"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def fused(self) -> Path:
        return self.path / "fused"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations"

    @property
    def inspection(self) -> Path:
        """The batches of steps that were not applied, for a number in them was not finite."""
        return self.path / "inspection"

    @property
    def trackers(self) -> Path:
        """What trackers keep: logs, how far they have come, and what is their own. Only their processes write there."""
        return self.path / "trackers"

    @property
    def uploads(self) -> Path:
        return self.path / "uploads"

    @property
    def has_event_log(self) -> bool:
        return self.events.exists() and self.events.stat().st_size > 0

    def is_locked(self) -> bool:
        """Whether a trainer is alive in this folder, or one is started again. No pid is trusted: a lock dies with its
        process."""
        return file_lock.is_held(self.lock) or file_lock.is_held(self.launch_lock)

    def say(self, word: str) -> None:
        """Write a control word (pause, resume, save, stop, finish-step) for the trainer, atomically by rename. Raises
        DiskError."""
        replace_file(self.control, word)


def all_runs(folder: Path | None = None) -> Iterator[RunFolder]:
    """Every run in `folder` (the runs folder by default), newest first. A hidden folder is none: a clone is made in
    one."""
    folder = folder or runs_folder()
    written = {RunFolder(path): _written(path / "config.yaml") for path in folder.glob("[!.]*")}
    yield from sorted((run for run, t in written.items() if t), key=lambda run: written[run], reverse=True)


def _written(path: Path) -> float:
    """When a file was last written, in unix seconds; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:  # never written, or deleted in the meantime
        return 0.0


def find_run(name: str | Path, folder: Path | None = None) -> RunFolder:
    """A run by path, or by name inside the runs folder. Raises UserError when there is none."""
    path = user_path(str(name), "run")
    for candidate in (path, (folder or runs_folder()) / name):
        if is_file(candidate / "config.yaml"):
            return RunFolder(candidate.resolve())
    where = f"neither a run folder at that path nor one in {quote(folder or runs_folder(), 80)}"
    raise UserError("run", f"There is no run {shown_path(str(name), 40)}: {where}.")


def default_run_name(model: str, train_type: str, train_mode: str, now: datetime | None = None) -> str:
    """model-traintype-mode-date, in characters that are safe in a path, and not too many of them. A folder that is
    called no more than `model` goes by its parent's name."""
    path = Path(model)
    called = path.parent.name if path.name in ("model", "fused") and path.parent.name else path.name
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", called)[:80].strip("-.") or "run"
    return f"{stem}-{train_type}-{train_mode}-{(now or datetime.now()):%Y-%m-%d-%H%M%S}"


def make_run_folder(name: str, folder: Path | None = None, *, reuse: bool = False) -> RunFolder:
    """Make a fresh folder for a run. Without `reuse`, a number is added where the name is taken; with it, an existing
    folder is used unless it holds an event log. Raises UserError when that is so, for a name that leads elsewhere or
    that no folder can have, and where nothing can be written."""
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
