"""The queue: runs that wait their turn, in queue.json in the folder of runs, and the process that trains them.

An entry is the name of a run that has never begun, or of one to be resumed. It waits as long as its event log is as it
was when it joined, so nothing has to be undone when a process dies.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from backend.runs.events import has_finished
from backend.runs.run_folder import RunFolder, all_runs, may_be_starting
from backend.utils import file_lock, places
from backend.utils.child_process import start_beside
from backend.utils.command import backend_command
from backend.utils.disk import replace_file
from backend.utils.documents import read_json
from backend.utils.errors import UserError
from backend.utils.files import is_folder_name, make_private_folder, resolved
from backend.utils.text import about_path, quote

FILE, LOCK, RUNNER_LOCK, LOG = "queue.json", "queue.lock", "queue-runner.lock", "queue.log"
POLL_S = 1.0
End = Literal["empty", "paused"]
GOOD_ENDINGS = (0, 3)  # exit codes: finished, stopped on request
_ADVICE = "fix or delete it, the runs keep their folders"


@dataclass(frozen=True, slots=True)
class Queue:
    """The content of queue.json. `starting`: the run that the runner has started and that may have written nothing yet.
    `is_paused`: no other run is started. `diaries`: of the runs that began before they joined, name → time of their
    event log's last write, in ns."""

    waiting: tuple[RunFolder, ...] = ()
    starting: RunFolder | None = None
    is_paused: bool = False
    pauses_after_failure: bool = False
    diaries: Mapping[str, int | None] = field(default_factory=dict[str, int | None])

    def without(self, run: RunFolder) -> Queue:
        return replace(self, waiting=tuple(other for other in self.waiting if other != run))

    def moved(self, run: RunFolder, place: int) -> Queue:
        others = self.without(run).waiting
        return replace(self, waiting=(*others[:place], run, *others[place:]))


class QueueFile:
    """The queue of one folder of runs. Raises UserError for a file that cannot be read, which stays, or written."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or places.runs_folder()
        self.path, self.log = self.folder / FILE, self.folder / LOG

    def read(self) -> Queue:
        queue = self._listed()
        starting = queue.starting if self.has_runner() else None
        waiting = tuple(run for run in queue.waiting if run != starting and not run.is_locked())
        return replace(queue, waiting=waiting, starting=starting)

    def holds(self, run: RunFolder) -> bool:
        """True for a run that waits. A broken file holds nothing."""
        with suppress(UserError):
            return run in self.read().waiting
        return False

    def add(self, run: RunFolder, *, first: bool = False) -> int:
        """Add a run at the end or `first`; returns its place, from 0. One that has begun is resumed in its turn."""
        run = self._own(run)
        if not run.config.is_file():
            raise UserError("queue", f"The folder {quote(run.path)} holds no config.yaml.")
        if run.is_locked():
            raise UserError("queue", f"The run {quote(run.name)} is training; only a run that is not can wait.")
        if has_finished(run):
            raise UserError("queue", f"The run {quote(run.name)} has finished; clone it to go on from its end.")
        with self._locked():
            queue = self._listed()
            diaries = {**queue.diaries, run.name: _event_log_written(run)}
            queue = replace(queue, diaries=diaries).moved(run, 0 if first else len(queue.waiting))
            self._write(queue)
            return queue.waiting.index(run)

    def remove(self, run: RunFolder) -> None:
        self._update(lambda queue: queue.without(self._waiting(run)))

    def move(self, run: RunFolder, place: int) -> None:
        """Put a waiting run at a place, from 0; beyond the end is the end."""
        self._update(lambda queue: queue.moved(self._waiting(run), max(0, place)))

    def change(self, **changes: Any) -> None:
        self._update(lambda queue: replace(queue, **changes))

    def has_runner(self) -> bool:
        return file_lock.is_held(self.folder / RUNNER_LOCK)

    def hold_runner_lock(self) -> int:
        """Be the runner until the returned handle is closed. Raises UserError where another process is."""
        with self._locked():
            handle = file_lock.try_hold(self.folder / RUNNER_LOCK)
            if handle is None:
                raise UserError("queue", "The queue is being run by another process already.")
            self._write(replace(self._listed(), starting=None))  # the runner that wrote it is dead
        return handle

    def start_next(self, runner: int) -> RunFolder | End:
        """Take the next run out of the queue. Without one, or while paused, close the handle of the runner's lock under
        the lock on changes, so that a runner that ends leaves no run behind that was added a moment too late."""
        with self._locked():
            queue = self.read()
            if queue.waiting and not queue.is_paused:
                self._write(replace(self._listed(), starting=queue.waiting[0]))
                return queue.waiting[0]
            os.close(runner)
            return "paused" if queue.waiting else "empty"

    def settle(self, run: RunFolder) -> None:
        """Note that the process of this run has ended. A run stays if another process holds it."""
        self._update(lambda queue: replace(queue if run.is_locked() else queue.without(run), starting=None))

    def _update(self, change: Callable[[Queue], Queue]) -> None:
        with self._locked():
            self._write(change(self._listed()))

    @contextmanager
    def _locked(self) -> Generator[None]:
        with ExitStack() as stack:
            try:
                make_private_folder(self.folder)
                stack.enter_context(file_lock.held(self.folder / LOCK))
            except OSError:
                raise UserError("queue", f"The queue cannot be written in {quote(self.folder)}.") from None
            yield

    def _write(self, queue: Queue) -> None:
        names = [run.name for run in queue.waiting]
        content = {
            "runs": names,
            "diaries": {name: t for name in names if (t := queue.diaries.get(name)) is not None},
            "starting": queue.starting.name if queue.starting is not None else None,
            "paused": queue.is_paused,
            "pause_after_failure": queue.pauses_after_failure,
        }
        replace_file(self.path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")

    def _listed(self) -> Queue:
        """The runs of the file that have not been deleted, begun or resumed since they joined."""
        if not os.path.lexists(self.path):
            return Queue()
        content: Any = read_json(self.path, "queue", advice=_ADVICE)
        try:
            names, starting, diaries = [*content["runs"]], content.get("starting"), content.get("diaries", {})
            if not all(map(is_folder_name, [*names, *([] if starting is None else [starting])])):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise UserError("queue", about_path(self.path, f" is no queue; {_ADVICE}.")) from None
        runs = [RunFolder(self.folder / name) for name in dict.fromkeys(names)]
        return Queue(
            tuple(run for run in runs if run.config.is_file() and _event_log_written(run) == diaries.get(run.name)),
            None if starting is None else RunFolder(self.folder / starting),
            content.get("paused", False),
            content.get("pause_after_failure", False),
            diaries,
        )

    def _own(self, run: RunFolder) -> RunFolder:
        if resolved(run.path).parent != resolved(self.folder):
            raise UserError("queue", f"{quote(run.path, 80)} is not in the folder of runs, {quote(self.folder, 80)}.")
        return RunFolder(self.folder / run.name)

    def _waiting(self, run: RunFolder) -> RunFolder:
        entry = self._own(run)
        if entry not in self.read().waiting:
            raise UserError("queue", f"The run {quote(run.name)} does not wait in the queue.")
        return entry


def is_fresh(run: RunFolder) -> bool:
    return run.config.is_file() and not run.has_event_log


def is_waiting(run: RunFolder) -> bool:
    """True for a run that waits in the queue, or has never begun and waits for its sweep."""
    sweep = run.path.parent / "sweeps" / run.name.rpartition("-seed")[0].rpartition("-")[0] / "sweep.yaml"
    return QueueFile(run.path.parent).holds(run) or (is_fresh(run) and sweep.is_file())


def _event_log_written(run: RunFolder) -> int | None:
    """Time of the event log's last write in ns, which a resume changes; None for a run that has never begun."""
    with suppress(OSError):
        status = run.events.stat()
        return status.st_mtime_ns if status.st_size else None
    return None


def training_run(folder: Path | None = None) -> RunFolder | None:
    """A run in `folder` (the runs folder by default) that trains here, or was just launched and may still import."""
    for run in all_runs(folder):
        is_coming = not run.has_event_log and may_be_starting(run) and not is_waiting(run)
        if not run.is_remote and (run.is_locked() or is_coming):
            return run
    return None


def start_training(run: RunFolder) -> subprocess.Popen[bytes]:
    """Train or resume a run in a process that outlives this one."""
    verb = ("train", "--run") if is_fresh(run) else ("resume",)
    with run.log.open("ab") as log:
        return start_beside(backend_command(*verb, str(run.path)), run.path, log)


def train_queue(
    queue: QueueFile,
    say: Callable[[str], None],
    train: Callable[[RunFolder], int] = lambda run: start_training(run).wait(),
) -> End:
    """Train until the queue is empty or paused; returns which. `train` returns an exit code, −n for a signal. Raises
    UserError where another process runs the queue."""
    lock: int | None = queue.hold_runner_lock()
    try:
        while True:
            waits_for: RunFolder | None = None
            while queue.read().waiting and (other := training_run(queue.folder)) is not None:
                if other != waits_for:
                    waits_for = other
                    say(f"Waits for {other.name}, which is training.")
                time.sleep(POLL_S)
            run = queue.start_next(lock)
            if isinstance(run, str):
                lock = None
                return run
            say(f"{run.name} begins.")
            code = train(run)
            is_held = run.is_locked()  # another process trains it: this one was refused, and that is no failure
            queue.settle(run)
            if is_held:
                continue
            if code in GOOD_ENDINGS:
                say(f"{run.name} has {'finished' if code == 0 else 'stopped'}.")
                continue
            if code == -signal.SIGKILL:
                hint = "a smaller Group or Completion helps. It goes on from its last checkpoint."
                say(f"{run.name} was killed, as a system does that runs out of memory: {hint}")
            else:
                say(f"{run.name} failed{f' (signal {-code})' if code < 0 else ''}; its log tells why.")
            if queue.read().pauses_after_failure:
                queue.change(is_paused=True)
                say("The queue is paused, as after every failure.")
    finally:
        if lock is not None:
            os.close(lock)
