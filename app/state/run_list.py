"""Records of all runs for the table, and the queue of waiting runs."""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from pydantic_core import from_json
from PySide6.QtCore import QFile, QObject, QStandardPaths, QTimer, Signal

from app.state.messages import problems_to
from app.state.processes import start_detached
from backend.runs.archive import Summary
from backend.runs.queue import Queue, QueueFile, is_fresh
from backend.runs.run_folder import RunFolder, all_runs, hold_lock
from backend.runs.run_names import name_of, results_of, setting_text
from backend.runs.run_record import RunNotes, RunRecord, read_record, record_of, stamp
from backend.runs.sweep_results import INTERRUPTED, SweepFolder, all_sweeps, shown_state
from backend.utils.command import backend_command
from backend.utils.disk import DiskError, replace_file
from backend.utils.errors import UserError
from backend.utils.files import make_private_folder

CACHE = "runs-cache.jsonl"
SLICE_S = 0.010
CHANGING = ("starting", "running", "queued")
CACHE_FORMAT = [["names 2"], *([field.name for field in fields(part)] for part in (RunRecord, Summary, RunNotes))]
LAUNCH_S = 15.0  # grace of a queue runner from its start to its lock: it imports first


def move_to_trash(run: RunFolder) -> Path | None:
    """Where it lies now, None if the desktop does not say. Raises UserError for a run in training, or without trash."""
    with suppress(OSError):  # Qt makes the trash, but not the folder for it
        make_private_folder(Path(QStandardPaths.writableLocation(QStandardPaths.StandardLocation.GenericDataLocation)))
    handle, file = hold_lock(run), QFile(str(run.path))
    try:
        if not file.moveToTrash():
            raise UserError("run", f"{run.path} could not be moved to the trash: {file.errorString()}.")
    finally:
        os.close(handle)
    place = Path(file.fileName())
    return place if place != run.path and place.exists() else None


def read_named(run: RunFolder) -> RunRecord:
    return replace(read_record(run), name=name_of(run))


@dataclass(frozen=True, slots=True)
class FoldedSweep:
    """A sweep as a row: `record` has its best run's settings and results, and the runs that are done as its steps."""

    record: RunRecord
    members: tuple[str, ...]


def fold(folder: SweepFolder, records: Mapping[Path, RunRecord]) -> FoldedSweep | None:
    """None for a sweep none of whose runs is known."""
    results = results_of(folder)
    runs = [run for each in results.ranked for run in each.runs] if results is not None else []
    known = {run.run: records[path] for run in runs if (path := folder.run(run.run).path) in records}
    if results is None or not known:
        return None
    best, done = results.ranked[0], sum(run.state not in ("waiting", "training") for run in runs)
    shown = results.best_run(best)
    first = known.get(shown.run if shown is not None else "", next(iter(known.values())))
    state = shown_state(folder, results)
    told = ", ".join(setting_text(*pair) for pair in best.settings.items()) if best.value is not None else ""
    summary = replace(
        first.summary,
        name=folder.name,
        path=str(folder.path),
        state={"waiting": "queued", INTERRUPTED: "crashed"}.get(state, state),
        step=done,
        iterations=len(runs),
        sentence=results.sentence,
        began=results.began or None,
        worked_s=results.updated - results.began if results.began else None,
    )
    disk = {"runs": sum(record.bytes for record in known.values())}
    name = folder.name.removeprefix("sweep") if folder.name.startswith("sweep") else f" {folder.name}"
    name = f"Sweep{name}" + (f" · best {told}" if told else "")
    record = replace(first, summary=summary, notes=RunNotes(), parent="", disk=disk, name=name)
    return FoldedSweep(record, tuple(one.summary.path for one in known.values()))


class RunList(QObject):
    """Records of all runs, read on the event loop and only if a file has changed since."""

    listed = Signal(set)  # paths of the runs that exist now
    read = Signal(list)  # records that are new or have changed
    settled = Signal()  # everything listed has been read

    def __init__(self, cache_folder: Path, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.records: dict[Path, RunRecord] = {}
        self.sweeps: dict[str, FoldedSweep] = {}  # by path, once everything is read
        self._waiting: deque[RunFolder] = deque()
        self._cache = cache_folder / CACHE
        self._cached: dict[str, Any] | None = None  # path of a run that has ended → (stamp, record)
        self._is_cache_stale = False
        self.timer = QTimer(self, interval=0)
        self.timer.timeout.connect(self._read_slice)

    @property
    def is_reading(self) -> bool:
        return self.timer.isActive()

    def refresh(self) -> None:
        if self._cached is None:
            self._cached = {}
            with suppress(OSError, ValueError, TypeError, KeyError):  # none yet, or of another version
                cached = from_json(self._cache.read_bytes())
                self._cached = dict(cached["runs"]) if cached["format"] == CACHE_FORMAT else {}
        folders = list(all_runs())
        paths = {folder.path for folder in folders}
        for gone in self.records.keys() - paths:
            del self.records[gone]
        for gone in self._cached.keys() - set(map(str, paths)):
            del self._cached[gone]
            self._is_cache_stale = True
        self.listed.emit(paths | {Path(path) for path in self.sweeps})
        self._waiting = deque(folders)
        self.timer.start()

    def reread(self, path: Path) -> None:
        folder = RunFolder(path)
        if folder.config.exists():
            self.read.emit([self._take(folder, stamp(folder))])

    def _read_slice(self) -> None:
        deadline, fresh = time.perf_counter() + SLICE_S, list[RunRecord]()
        while self._waiting and time.perf_counter() < deadline:
            folder = self._waiting.popleft()
            now, (then, values) = stamp(folder), (self._cached or {}).get(str(folder.path), (None, None))
            if then != now or folder.is_locked():
                fresh.append(self._take(folder, now))
            elif folder.path not in self.records:  # an earlier launch has read it
                self.records[folder.path] = record_of(values)
                fresh.append(self.records[folder.path])
        if fresh:
            self.read.emit(fresh)
        if not self._waiting:
            self.timer.stop()
            if self._is_cache_stale:
                self._is_cache_stale = False
                with suppress(DiskError):  # the next launch reads the runs again
                    text = json.dumps({"format": CACHE_FORMAT, "runs": self._cached}, default=str)
                    replace_file(self._cache, text)
            self.sweeps = {str(folder.path): sweep for folder in all_sweeps() if (sweep := fold(folder, self.records))}
            self.read.emit([sweep.record for sweep in self.sweeps.values()])
            self.settled.emit()

    def _take(self, folder: RunFolder, now: list[int]) -> RunRecord:
        record = self.records[folder.path] = read_named(folder)
        if record.summary.state not in CHANGING and self._cached is not None:
            self._cached[str(folder.path)] = now, asdict(record)
            self._is_cache_stale = True
        return record


class RunQueue(QObject):
    """The queue of the runs folder, read once a second. Its runs are started by a detached process, `queue run`."""

    changed = Signal()
    started = Signal(object)  # RunFolder
    refused = Signal(str)  # why a change was not possible

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.file = QueueFile()
        self.now = Queue()  # as its file has it
        self.has_runner = False
        self.problem = ""  # why the file cannot be read
        self._launched_until = 0.0
        self._timer = QTimer(self, interval=1000)
        self._timer.timeout.connect(self.refresh)
        self._timer.start()
        self.refresh()

    @property
    def waiting(self) -> tuple[RunFolder, ...]:
        return self.now.waiting

    @property
    def is_active(self) -> bool:
        """A run of the queue trains, or the next begins by itself."""
        has_runner = self.has_runner or time.monotonic() < self._launched_until
        return has_runner and not self.now.is_paused and bool(self.waiting or self.now.starting)

    def refresh(self) -> None:
        before, started_before = (self.now, self.has_runner, self.problem), self.now.starting
        try:
            self.now, self.problem = self.file.read(), ""
        except UserError as error:
            self.now, self.problem = Queue(), error.faults[0].sentence
        self.has_runner = self.file.has_runner()
        if self.has_runner:
            self._launched_until = 0.0
        if (self.now, self.has_runner, self.problem) != before:
            self.changed.emit()
        if self.now.starting is not None and self.now.starting != started_before:
            self.started.emit(self.now.starting)

    def add(self, run: RunFolder) -> bool:
        """Queue a run and start a runner; True if it waits."""
        return self.change(self.file.add, run) and self.ensure_runner()

    def remove(self, run: RunFolder) -> None:
        is_new = is_fresh(run)
        if self.change(self.file.remove, run) and is_new:
            with problems_to(self.refused.emit):
                move_to_trash(run)

    def set_paused(self, paused: bool) -> None:
        if self.change(self.file.change, is_paused=paused):
            self.ensure_runner()

    def ensure_runner(self) -> bool:
        self.refresh()
        is_launching = time.monotonic() < self._launched_until
        if self.has_runner or is_launching or self.now.is_paused or not self.waiting:
            return True
        with problems_to(self.refused.emit):
            command = backend_command("queue", "run", "--runs-dir", str(self.file.folder))
            start_detached(command, RunFolder(self.file.folder), self.file.log)
            self._launched_until = time.monotonic() + LAUNCH_S
            self.changed.emit()
            return True
        return False

    def change(self, change: Callable[..., object], *arguments: Any, **fields: Any) -> bool:
        """Call a method of `file`; False if that was not possible."""
        is_done = False
        with problems_to(self.refused.emit):
            change(*arguments, **fields)
            is_done = True
        self.refresh()
        return is_done
