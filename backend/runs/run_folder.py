"""One run's folder: its files, how it is found, how a new one is made; and the locks by which one process at a time
trains it. The locks are flocks, which end with their process; an exec or a launcher passes them on."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from backend.utils import file_lock
from backend.utils.disk import replace_file
from backend.utils.errors import UserError
from backend.utils.files import (
    is_file,
    is_folder_name,
    make_private_folder,
    require_plain_files,
    restrict_to_user,
    user_path,
)
from backend.utils.places import runs_folder
from backend.utils.text import quote, shown_path

LOCK_VARIABLE = "GRPO_STUDIO_LOCK"  # the file descriptor of a lock from the program before this one
LAUNCH_VARIABLE = "GRPO_STUDIO_LAUNCHED"  # the folder of the run that this process or its launcher holds
STARTUP_GRACE_S = 20.0  # a process without a lock counts as crashed after this: it imports first
LOCK_PATIENCE_S = 0.5  # a window that tests whether a run is alive holds its lock for an instant
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class Entry:
    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunFolder, owner: type[RunFolder] | None = None) -> Path:
        return run.path / self.name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run. The trainer appends to them; every other process only reads."""

    path: Path

    config = Entry("config.yaml")
    events = Entry("events.jsonl")
    completions = Entry("completions.jsonl")
    log = Entry("log.txt")
    control = Entry("control")
    control_taken = Entry("control.taken")
    change_request = Entry("change.json")  # transient, as `control` is
    changes = Entry("changes.json")  # with config.yaml it determines the run
    parent = Entry("parent.json")  # of a clone
    about = Entry("about.json")  # the user's title, note and tags
    job = Entry("job.json")  # of a run that trains as a Hugging Face job
    lock = Entry("run.lock")
    launch_lock = Entry("launch.lock")  # of the process that starts the ranks of a run on several machines
    gpu_errors = Entry("gpu_errors.jsonl")
    checkpoints = Entry("checkpoints")
    adapters = Entry("adapters")
    model = Entry("model")
    fused = Entry("fused")
    evaluations = Entry("evaluations")
    inspection = Entry("inspection")  # batches of steps with a number that was not finite
    trackers = Entry("trackers")
    uploads = Entry("uploads")

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def has_event_log(self) -> bool:
        return self.events.exists() and self.events.stat().st_size > 0

    @property
    def is_remote(self) -> bool:
        """True for a run that trains as a Hugging Face job, once that is submitted."""
        return self.job.exists()

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
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def may_be_starting(run: RunFolder) -> bool:
    """True for a folder written so recently that a trainer may still be importing, before it takes the lock."""
    # abs: a clock that was set back leaves files of the future.
    return abs(time.time() - max(modified_at(run.config), modified_at(run.log))) < STARTUP_GRACE_S


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
    """Make a folder for a run. A taken name gets a number; with `reuse`, the folder is used if it has no event log."""
    parent = folder or runs_folder()
    if not is_folder_name(name):
        raise UserError("run_name", f"A run cannot be called {quote(name, 40)}: that is no name of a folder.")
    numbers = count(1)
    while True:
        number = next(numbers)
        run = RunFolder(parent / (name if number == 1 else f"{name}-{number}"))
        try:
            make_private_folder(run.path, exist_ok=reuse)
        except FileExistsError:
            if reuse:
                raise UserError("run_name", f"{run.path} exists and is not a folder.") from None
            continue
        except OSError as error:
            raise UserError("runs_dir", f"The runs folder {parent} cannot be written: {error.strerror}.") from None
        if run.has_event_log or run.is_locked():
            raise UserError("run_name", f"The run {name} exists already; choose another name, or resume it.")
        restrict_to_user(run.path)  # with `reuse` it may be a folder that was there
        return run


def hold_lock(run: RunFolder) -> int:
    """Lock the run for this process, until it ends or the returned handle is closed. Raises UserError."""
    handle = _held(run, run.lock)
    # `held_for_launch` takes the two locks in the other order, so that one of two processes sees the other.
    if os.environ.get(LAUNCH_VARIABLE) != str(run.path) and file_lock.is_held(run.launch_lock):
        os.close(handle)
        raise _is_trained(run)
    return handle


@contextmanager
def held_for_launch(run: RunFolder) -> Generator[None]:
    """Let only this process and those that it starts train the run. Raises UserError as `hold_lock`."""
    handle = _held(run, run.launch_lock)
    try:
        if file_lock.is_held(run.lock):
            raise _is_trained(run)
        os.environ[LAUNCH_VARIABLE] = str(run.path)
        yield
    finally:
        os.environ.pop(LAUNCH_VARIABLE, None)
        with suppress(OSError):  # the folder may be gone
            run.launch_lock.unlink()
        os.close(handle)


def _held(run: RunFolder, lock: Path) -> int:
    require_plain_files(run.path)
    until = time.monotonic() + LOCK_PATIENCE_S
    try:
        while (handle := file_lock.try_hold(lock)) is None:
            if time.monotonic() > until:
                raise _is_trained(run)
            time.sleep(0.01)
    except OSError as error:
        if error.errno in NO_LOCKS:
            cause = f"The run folder {run.path} is on a file system without locks ({error.strerror})"
            raise UserError("runs_dir", f"{cause}; choose a folder on another disk.") from None
        raise UserError("run", f"The run folder {run.path} cannot be written: {error.strerror}.") from None
    return handle


def _is_trained(run: RunFolder) -> UserError:
    return UserError("run", f"The run {run.name} is being trained by another process; stop that one first.")


def hand_on_lock(handle: int) -> None:
    """Keep the run locked over an exec of this process; see `inherited_lock`."""
    os.set_inheritable(handle, True)
    os.environ[LOCK_VARIABLE] = str(handle)


def inherited_lock(run: RunFolder) -> int | None:
    """The handle of this run's lock from the program before this one in the same process, else None."""
    try:
        handle = int(os.environ[LOCK_VARIABLE])
        # The number alone would prove nothing: the variable may have come from another process.
        if not os.path.samestat(os.fstat(handle), run.lock.stat()):
            return None
    except (KeyError, ValueError, OSError):
        return None
    del os.environ[LOCK_VARIABLE]
    os.set_inheritable(handle, False)
    return handle if file_lock.take(handle) else None
