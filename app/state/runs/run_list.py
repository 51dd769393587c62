"""The runs folder as records, read in short slices on the event loop, and only where a file has changed since.

Records are kept over launches in a file of the preferences, so that a thousand runs are listed without reading them again. The file
holds nothing that is not in the runs: deleting it costs one slower start.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path

from PySide6.QtCore import QObject, QTimer, Signal

from backend.runs.archive import Summary
from backend.runs.run_folder import RunFolder, all_runs
from backend.runs.run_record import RunNotes, RunRecord, read_record, record_of, stamp
from backend.utils.disk_faults import DiskError
from backend.utils.whole_file import replace_file

CACHE = "runs-cache.jsonl"
SLICE_S = 0.010
"""How long one turn of the event loop may read."""
CHANGING = ("starting", "running", "queued")
"""States that may change without a change of a file of the run."""
_FORMAT = [[field.name for field in fields(part)] for part in (RunRecord, Summary, RunNotes)]
"""The cache of a version with other fields is not read."""


class RunList(QObject):
    """Signals:
    listed(set of paths) – the runs that exist now; records of others are gone.
    read(list of RunRecord) – records that are new or have changed.
    settled – everything listed has been read.
    """

    listed = Signal(set)
    read = Signal(list)
    settled = Signal()

    def __init__(
        self,
        cache_folder: Path,
        reader: Callable[[RunFolder], RunRecord] = read_record,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self.records: dict[Path, RunRecord] = {}
        self._reader = reader
        self._stamps: dict[Path, list[int]] = {}
        self._waiting: deque[RunFolder] = deque()
        self._cache = cache_folder / CACHE
        self._lines: dict[Path, str] | None = None
        self._is_cache_stale = False
        self._timer = QTimer(self, interval=0)
        self._timer.timeout.connect(self._read_slice)

    @property
    def is_reading(self) -> bool:
        return self._timer.isActive()

    def refresh(self) -> None:
        """List the folder, and begin to read what has changed. A refresh during a refresh starts over; nothing is read twice."""
        if self._lines is None:
            self._lines = _cached_lines(self._cache)
        folders = list(all_runs())
        paths = {folder.path for folder in folders}
        for gone in self.records.keys() - paths:
            del self.records[gone], self._stamps[gone]
        for gone in self._lines.keys() - paths:
            del self._lines[gone]
            self._is_cache_stale = True
        self.listed.emit(paths)
        self._waiting = deque(folders)
        self._timer.start()

    def reread(self, path: Path) -> None:
        """Read one run now: the caller has just changed it."""
        folder = RunFolder(path)
        if folder.config.exists():
            self.read.emit([self._take(folder, stamp(folder))])

    def stop(self) -> None:
        self._timer.stop()

    def family_of(self, path: Path) -> dict[str, list[str]]:
        """Run → its clones by name, for the oldest ancestor of a run and all that descend from it; empty for a run without family."""
        parents = {record.summary.name: record.parent for record in self.records.values() if record.parent}
        root, seen = path.name, {path.name}
        while (parent := parents.get(root)) and parent not in seen:
            seen.add(parent)
            root = parent
        children: dict[str, list[str]] = {}
        for name, parent in sorted(parents.items()):
            children.setdefault(parent, []).append(name)
        family: dict[str, list[str]] = {}
        unvisited = deque([root])
        while unvisited:
            name = unvisited.popleft()
            if name in family:
                continue
            family[name] = children.get(name, [])
            unvisited.extend(family[name])
        return family if len(family) > 1 else {}

    def _read_slice(self) -> None:
        deadline, fresh = time.perf_counter() + SLICE_S, list[RunRecord]()
        while self._waiting and time.perf_counter() < deadline:
            folder = self._waiting.popleft()
            now = stamp(folder)
            if self._is_current(folder, now):
                continue
            cached = self._from_cache(folder, now)
            fresh.append(cached if cached is not None else self._take(folder, now))
        if fresh:
            self.read.emit(fresh)
        if not self._waiting:
            self._timer.stop()
            self._write_cache()
            self.settled.emit()

    def _is_current(self, folder: RunFolder, now: list[int]) -> bool:
        record = self.records.get(folder.path)
        return (
            record is not None
            and record.summary.state not in CHANGING
            and self._stamps.get(folder.path) == now
            and not folder.is_locked()
        )

    def _from_cache(self, folder: RunFolder, now: list[int]) -> RunRecord | None:
        """The record of an earlier launch, if the run has not changed since."""
        line = (self._lines or {}).get(folder.path)
        if line is None or folder.path in self.records or folder.is_locked():
            return None
        try:
            then, values = json.loads(line)
            record = record_of(values)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        if then != now or record.summary.state in CHANGING:
            return None
        self.records[folder.path], self._stamps[folder.path] = record, now
        return record

    def _take(self, folder: RunFolder, now: list[int]) -> RunRecord:
        record = self._reader(folder)
        self.records[folder.path], self._stamps[folder.path] = record, now
        if record.summary.state not in CHANGING and self._lines is not None:
            self._lines[folder.path] = json.dumps([now, asdict(record)], default=str)
            self._is_cache_stale = True
        return record

    def _write_cache(self) -> None:
        """Replace the file by a rename; without it (a full disk) the next launch reads the runs again."""
        if not self._is_cache_stale or self._lines is None:
            return
        self._is_cache_stale = False
        lines = (f"{json.dumps(str(path))}\t{line}\n" for path, line in self._lines.items())
        with suppress(DiskError):
            replace_file(self._cache, json.dumps(_FORMAT) + "\n" + "".join(lines))


def _cached_lines(path: Path) -> dict[Path, str]:
    """Path of a run → its line of the cache, which is parsed when the run is listed."""
    try:
        first, *lines = path.read_text(encoding="utf-8").split("\n")
        if json.loads(first) != _FORMAT:
            return {}
        pairs = (line.partition("\t") for line in lines if line)
        return {Path(json.loads(name)): text for name, _, text in pairs}
    except (OSError, ValueError, RecursionError):
        return {}
