"""The queue: runs that wait their turn, in the order of queue.json in the folder of runs.

An entry is the name of a run folder: a run that has never begun, or one to be resumed (stopped, failed, crashed, or a
clone). It waits as long as its event log is as it was when it joined, so nothing has to be undone when a process dies.
The file is changed under a lock and replaced by rename. The runner (`backend.runs.queue_runner`) has a lock of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from backend.runs.events import has_finished
from backend.runs.run_folder import RunFolder
from backend.utils import file_lock, places
from backend.utils.documents import read_json
from backend.utils.errors import UserError
from backend.utils.files import is_folder_name, make_private_folder, resolved
from backend.utils.text import about_path, quote
from backend.utils.whole_file import replace_file

FILE, LOCK, RUNNER_LOCK, LOG = "queue.json", "queue.lock", "queue-runner.lock", "queue.log"
"""Names in the folder of runs: the order, the lock on changing it, the lock of the runner, what a detached runner
prints."""
_ADVICE = "fix or delete it, the runs keep their folders"


@dataclass(frozen=True, slots=True)
class Queue:
    """What queue.json says.

    Attributes:
        waiting – the folders in their order.
        starting – the run that the runner has started and that may have written nothing yet; it waits again if that
          dies.
        is_paused – no other run is started; one that trains continues.
        diaries – of the runs that began before they joined, name → when their event log was last written, in ns.
    """

    waiting: tuple[RunFolder, ...] = ()
    starting: RunFolder | None = None
    is_paused: bool = False
    pauses_after_failure: bool = False
    diaries: Mapping[str, int] = field(default_factory=dict[str, int])

    def place_of(self, run: RunFolder) -> int | None:
        """The place of a run, from 0; None for one that does not wait."""
        return self.waiting.index(run) if run in self.waiting else None

    def still_waits(self, run: RunFolder) -> bool:
        """Whether a listed run has not been deleted, begun or resumed since it joined."""
        return run.config.is_file() and _event_log_written(run) == self.diaries.get(run.name)

    def moved(self, run: RunFolder, place: int | None) -> Queue:
        """The queue with a run at a place; None is the end."""
        others = tuple(other for other in self.waiting if other != run)
        place = len(others) if place is None else place
        return replace(self, waiting=(*others[:place], run, *others[place:]))

    def without(self, run: RunFolder) -> Queue:
        return replace(self, waiting=tuple(other for other in self.waiting if other != run))


class QueueFile:
    """The queue of one folder of runs. Changing it raises UserError for a file that cannot be read or written."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or places.runs_folder()
        self.path, self.log = self.folder / FILE, self.folder / LOG

    def read(self) -> Queue:
        """The queue now. Raises UserError for a broken file, which stays as it is."""
        listed = self._read_listed()
        starting = listed.starting if listed.starting is not None and self.has_runner() else None
        waiting = (run for run in listed.waiting if run != starting and listed.still_waits(run) and not run.is_locked())
        return replace(listed, waiting=tuple(waiting), starting=starting)

    def holds(self, run: RunFolder) -> bool:
        """Whether this run waits. A broken file holds nothing."""
        try:
            return run in self.read().waiting
        except UserError:
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
        with self._change() as change:
            written = _event_log_written(run)
            joined = {} if written is None else {run.name: written}

            def join(queue: Queue) -> Queue:
                others = {name: t for name, t in queue.diaries.items() if name != run.name}
                return replace(queue.moved(run, 0 if first else None), diaries=others | joined)

            return change(join).waiting.index(run)

    def remove(self, run: RunFolder) -> None:
        """Take a run out of the queue; its folder stays."""
        self._waiting(run)  # before a folder is made for a queue that is not there
        with self._change() as change:
            entry = self._waiting(run)
            change(lambda queue: queue.without(entry))

    def move(self, run: RunFolder, place: int) -> None:
        """Put a waiting run at a place, from 0; beyond the end is the end."""
        self._waiting(run)
        with self._change() as change:
            entry = self._waiting(run)
            change(lambda queue: queue.moved(entry, max(0, place)))

    def set_paused(self, paused: bool) -> None:
        """Start no other run, or start them again."""
        with self._change() as change:
            change(lambda queue: replace(queue, is_paused=paused))

    def set_pauses_after_failure(self, pauses: bool) -> None:
        """Whether a run that fails pauses the queue."""
        with self._change() as change:
            change(lambda queue: replace(queue, pauses_after_failure=pauses))

    def rewrite_settings(self, run: RunFolder, text: str) -> None:
        """Replace a waiting run's config.yaml; refused once the run has begun."""
        with self._change():  # under the lock no runner starts it meanwhile
            if not is_fresh(self._waiting(run)):
                raise UserError("queue", f"The run {run.name} has begun with its settings; clone it to change them.")
            replace_file(run.config, text)

    def has_runner(self) -> bool:
        """Whether a process starts the waiting runs one after the other."""
        return file_lock.is_held(self.folder / RUNNER_LOCK)

    def hold_runner_lock(self) -> int:
        """Be the runner until the returned handle is closed. Raises UserError where another process is."""
        with self._change() as change:
            handle = file_lock.try_hold(self.folder / RUNNER_LOCK)
            if handle is None:
                raise UserError("queue", "The queue is being run by another process already.")
            change(lambda queue: replace(queue, starting=None))  # the runner that wrote it is dead
        return handle

    def start_next(self, otherwise: Callable[[Queue], None]) -> RunFolder | None:
        """Take the run whose turn it is out of the queue. Without one, or where the queue is paused, call `otherwise`.

        That happens under the lock on changes: a runner that gives up its own lock there leaves no run behind that was
        added a moment too late.
        """
        with self._change() as change:
            queue = self.read()
            if queue.waiting and not queue.is_paused:
                run = queue.waiting[0]
                change(lambda queue: replace(queue, starting=run))
                return run
            otherwise(queue)
            return None

    def settle(self, run: RunFolder) -> None:
        """Note that the process that was started for this run has ended.

        A run that wrote nothing is dropped, lest it be started for ever; one that another process holds stays.
        """
        with self._change() as change:
            listed = self._read_listed()
            kept = listed.waiting if run.is_locked() else listed.without(run).waiting
            change(lambda queue: replace(queue, waiting=tuple(filter(queue.still_waits, kept)), starting=None))

    @contextmanager
    def _change(self) -> Generator[Callable[[Callable[[Queue], Queue]], Queue]]:
        """Hold the lock; yields a function that replaces the queue by what its argument makes of it."""
        try:
            make_private_folder(self.folder)
            writable = os.access(self.folder, os.W_OK)
        except OSError:
            writable = False
        if not writable:
            raise UserError("queue", f"The queue cannot be written in {quote(self.folder)}.")
        with file_lock.held(self.folder / LOCK):
            yield self._rewrite

    def _rewrite(self, change: Callable[[Queue], Queue]) -> Queue:
        listed = self._read_listed()
        # A run that is just being started stays: should its process die before the event log's first line, it
        # waits again.
        queue = change(replace(listed, waiting=tuple(filter(listed.still_waits, listed.waiting))))
        names = [run.name for run in queue.waiting]
        content = {
            "runs": names,
            "diaries": {name: queue.diaries[name] for name in names if name in queue.diaries},
            "starting": queue.starting.name if queue.starting is not None else None,
            "paused": queue.is_paused,
            "pause_after_failure": queue.pauses_after_failure,
        }
        replace_file(self.path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")
        return queue

    def _read_listed(self) -> Queue:
        """What the file lists, without a look at the folders."""
        if not os.path.lexists(self.path):
            return Queue()
        raw = read_json(self.path, "queue", advice=_ADVICE)
        content = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
        names, starting, diaries = content.get("runs"), content.get("starting"), content.get("diaries", {})
        flags = [content.get(key, False) for key in ("paused", "pause_after_failure")]
        problem = ""
        if not isinstance(names, list) or not all(map(is_folder_name, cast("list[Any]", names))):
            problem = "runs is no list of names of folders"
        elif starting is not None and not is_folder_name(starting):
            problem = "starting is no name of a folder"
        elif not all(isinstance(flag, bool) for flag in flags):
            problem = "paused and pause_after_failure are true or false"
        elif not isinstance(diaries, dict) or not all(isinstance(t, int) for t in diaries.values()):  # pyright: ignore
            problem = "event logs is no list of times"
        if problem:
            raise UserError("queue", about_path(self.path, f" is no queue ({problem}); {_ADVICE}."))
        waiting = tuple(RunFolder(self.folder / name) for name in dict.fromkeys(cast("list[str]", names)))
        started = RunFolder(self.folder / starting) if starting is not None else None
        return Queue(waiting, started, *flags, diaries=cast("dict[str, int]", diaries))

    def _own(self, run: RunFolder) -> RunFolder:
        """The same run as an entry of this queue. Raises UserError for a folder elsewhere."""
        if resolved(run.path).parent != resolved(self.folder):
            raise UserError("queue", f"{quote(run.path, 80)} is not in the folder of runs, {quote(self.folder, 80)}.")
        return RunFolder(self.folder / run.name)

    def _waiting(self, run: RunFolder) -> RunFolder:
        """The run's entry. Raises UserError for one that does not wait."""
        entry = self._own(run)
        if entry not in self.read().waiting:
            raise UserError("queue", f"The run {quote(run.name)} does not wait in the queue.")
        return entry


def is_fresh(run: RunFolder) -> bool:
    """Whether a run has settings and has never begun."""
    return run.config.is_file() and not run.has_event_log


def is_waiting(run: RunFolder) -> bool:
    """Whether a run waits in the queue of its folder."""
    return QueueFile(run.path.parent).holds(run)


def _event_log_written(run: RunFolder) -> int | None:
    """When the event log was last written, in ns; None for a run that has never begun.

    A resume cuts the event log before it writes, so the time changes with the first thing that a process does to the
    run.
    """
    try:
        status = run.events.stat()
    except OSError:
        return None
    return status.st_mtime_ns if status.st_size else None
