"""Plays a recorded run into a new folder: the same events, completions and log at the recorded times, divided by a
speed.

For demonstrations and tests. The lock is held as a trainer holds it and control words are obeyed, so the window shows a
live run; at the end the folder is as the original is: finished, stopped, failed, or without an ending. No model is
loaded and nothing is trained.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from backend.runs.events import Event, EventLog, JsonLines, parse_line, read_events
from backend.runs.run_folder import RunFolder, make_run_folder
from backend.runs.run_lock import hold_lock
from backend.trainer.control import Control, Stopped
from backend.utils.errors import UserError
from backend.utils.files import open_regular, read_bytes, require_plain_files
from backend.utils.whole_file import replace_file

LOOK_S = 0.1
"""Seconds between two looks at the control file while a replay waits for the next event's time."""
BETWEEN_PROCESSES_S = 2.0
"""The longest wait before the first event of a process: a run may have been resumed the next day."""
LOG_LIMIT = 64 << 20
"""Bytes of a log that is taken along."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The recorded run. Raises UserError, from `check`, where there is nothing to play."""

    run: RunFolder

    def check(self) -> None:
        if next(read_events(self.run.events), None) is None:
            raise UserError("run", f"The run {self.run.name} has no event log yet, so there is nothing to replay.")

    def waits(self) -> Iterator[tuple[float, Event]]:
        """(seconds since the event before, event). A clock that was put back counts as no time."""
        before: float | None = None
        for event in read_events(self.run.events):
            t = event.get("t")
            now = float(t) if isinstance(t, int | float) else before
            wait = max(0.0, now - before) if now is not None and before is not None else 0.0
            if event.get("kind") == "started" or event.get("phase") == "loading":
                wait = min(wait, BETWEEN_PROCESSES_S)
            before = now
            yield wait, event

    def half_line(self) -> bytes:
        """What stands after the last newline of the event log: a process that is killed while it writes leaves it."""
        return _after_last_newline(self.run.events)

    def groups(self) -> Iterator[Event]:
        """The rows of completions.jsonl, in their order."""
        if self.run.completions.exists():
            with open_regular(self.run.completions) as file:
                yield from (row for line in file if line.endswith(b"\n") and (row := parse_line(line)) is not None)


class Replay:
    """One replay into `folder`, which is new. `speed` 2 is twice as fast as the run was, 0 at once."""

    def __init__(self, source: RunFolder, folder: RunFolder, speed: float) -> None:
        self.recorded = Recorded(source)
        self.folder = folder
        self.speed = speed
        self.event_log = EventLog(folder.events)
        self.control = Control(folder, self.event_log)
        self._groups = self.recorded.groups()
        self._next_group = next(self._groups, None)
        self._is_marked = False

    def play(self) -> bool:
        """Play to the end. False where it was stopped before."""
        with closing(self.event_log), closing(JsonLines(self.folder.completions)) as completions:
            try:
                for wait, event in self.recorded.waits():
                    self._wait(wait)
                    self._write_groups(event, completions)
                    self._write(event)
            except Stopped:
                self.event_log.write("stopped", step=None, sentence="The replay was stopped.")
                return False
        with self.folder.events.open("ab") as file:
            file.write(self.recorded.half_line())
        return True

    def _wait(self, seconds: float) -> None:
        self.control.obey()
        paused = self.control.paused_s
        until = time.monotonic() + (seconds / self.speed if self.speed else 0.0)
        while (left := until + self.control.paused_s - paused - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_S))
            self.control.obey()

    def _write_groups(self, event: Event, completions: JsonLines) -> None:
        """Before a step's line, as the trainer does: the completions of that step."""
        step = event.get("step")
        while event.get("kind") == "step" and self._next_group is not None and self._next_group.get("step", 0) <= step:
            completions.append(self._next_group)
            self._next_group = next(self._groups, None)

    def _write(self, event: Event) -> None:
        fields = {key: value for key, value in event.items() if key not in ("v", "seq", "t", "mono", "kind")}
        name = self.recorded.run.name
        if event["kind"] == "started":
            fields |= {"pid": os.getpid(), "command": f"replay of {name}: {event.get('command', '')}"}
        self.event_log.write(event["kind"], **fields)
        if event["kind"] == "started" and not self._is_marked:
            pace = f"{self.speed:g} times as fast as it was" if self.speed else "at once"
            self.event_log.write(
                "note", level="info", sentence=f"A replay of the run {name}, {pace}. Nothing is trained here."
            )
            self._is_marked = True


def replay(source: RunFolder, runs_dir: Path | None = None, name: str = "", speed: float = 1.0) -> Replay:
    """Prepare a replay in a new folder of `runs_dir`. Raises UserError where there is nothing to play, the speed is
    negative, the name is none, or the run's folder holds a link."""
    if speed < 0:
        raise UserError("speed", f"The speed is a number above 0, or 0 for at once, not {speed:g}.")
    require_plain_files(source.path)  # a copy would take what they lead to
    Recorded(source).check()
    folder = make_run_folder(name or f"{source.name}-replay", runs_dir, reuse=bool(name))
    hold_lock(folder)  # until the process ends
    replace_file(folder.config, [read_bytes(source.config, "run")])
    if source.changes.exists():  # with config.yaml they are the run's settings
        replace_file(folder.changes, [read_bytes(source.changes, "run")])
    log = read_bytes(source.log, "run", LOG_LIMIT) if source.log.exists() else b""
    replace_file(folder.log, [f"Replay of {source.name}. Its log:\n".encode(), log])
    return Replay(source, folder, speed)


def _after_last_newline(path: Path) -> bytes:
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        reach = 1 << 16
        while True:
            file.seek(max(0, size - reach))
            tail = file.read()
            if b"\n" in tail or reach >= size:
                return tail[tail.rfind(b"\n") + 1 :]
            reach *= 4
