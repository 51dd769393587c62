"""Plays a recorded run into a new folder, for demonstrations: its events, completions and log at the recorded times,
divided by a speed. The lock is held and control words are obeyed, so the window shows a live run."""

import os
import time
from contextlib import closing
from pathlib import Path

from backend.runs.events import EventLog, JsonLines, after_last_newline, read_events
from backend.runs.run_folder import RunFolder, hold_lock, make_run_folder
from backend.trainer.control import Control, Stopped
from backend.utils.disk import replace_file
from backend.utils.errors import UserError
from backend.utils.files import open_regular, read_bytes, require_plain_files

LOOK_S = 0.1
BETWEEN_PROCESSES_S = 2.0  # longest wait before the first event of a process: a run may have been resumed the next day
LOG_LIMIT = 64 << 20  # bytes of log.txt


class Replay:
    """A replay of `source` in a new folder of `runs_dir`. `speed` 2 is twice as fast as the run was, 0 at once."""

    def __init__(self, source: RunFolder, runs_dir: Path | None = None, name: str = "", speed: float = 1.0) -> None:
        """Makes the folder, with all but what the run recorded. Raises UserError."""
        if speed < 0:
            raise UserError("speed", f"The speed is a number above 0, or 0 for at once, not {speed:g}.")
        require_plain_files(source.path)  # a copy would take what they lead to
        if next(read_events(source.events), None) is None:
            raise UserError("run", f"The run {source.name} has no event log yet, so there is nothing to replay.")
        self.source, self.speed = source, speed
        self.folder = folder = make_run_folder(name or f"{source.name}-replay", runs_dir, reuse=bool(name))
        hold_lock(folder)  # until the process ends
        replace_file(folder.config, [read_bytes(source.config, "run")])
        if source.changes.exists():  # with config.yaml they are the run's settings
            replace_file(folder.changes, [read_bytes(source.changes, "run")])
        log = read_bytes(source.log, "run", LOG_LIMIT) if source.log.exists() else b""
        replace_file(folder.log, [f"Replay of {source.name}. Its log:\n".encode(), log])
        self.event_log = EventLog(folder.events)
        self.control = Control(folder, self.event_log)

    def play(self) -> bool:
        """Play to the end. False where it was stopped before."""
        groups = read_events(self.source.completions)
        group, before, is_marked = next(groups, None), None, False
        with closing(self.event_log), closing(JsonLines(self.folder.completions)) as completions:
            try:
                for event in read_events(self.source.events):
                    kind, now = event["kind"], event.get("t", before)
                    wait = max(0.0, now - before) if now is not None and before is not None else 0.0
                    if kind == "started" or event.get("phase") == "loading":
                        wait = min(wait, BETWEEN_PROCESSES_S)
                    before = now
                    self._wait(wait)
                    # Before a step's line, as the trainer does: the completions of that step.
                    while kind == "step" and group is not None and group.get("step", 0) <= event["step"]:
                        completions.append(group)
                        group = next(groups, None)
                    fields = {key: event[key] for key in event if key not in ("v", "seq", "t", "mono", "kind")}
                    if kind == "started":
                        command = f"replay of {self.source.name}: {event.get('command', '')}"
                        fields |= {"pid": os.getpid(), "command": command}
                    self.event_log.write(kind, **fields)
                    if kind == "started" and not is_marked:
                        pace = f"{self.speed:g} times as fast as it was" if self.speed else "at once"
                        mark = f"A replay of the run {self.source.name}, {pace}. Nothing is trained here."
                        self.event_log.write("note", level="info", sentence=mark)
                        is_marked = True
            except Stopped:
                self.event_log.write("stopped", step=None, sentence="The replay was stopped.")
                return False
        # A process that is killed while it writes leaves half a line.
        with open_regular(self.source.events) as file, self.folder.events.open("ab") as copy:
            copy.write(after_last_newline(file))
        return True

    def _wait(self, seconds: float) -> None:
        self.control.obey()
        paused = self.control.paused_s
        until = time.monotonic() + (seconds / self.speed if self.speed else 0.0)
        while (left := until + self.control.paused_s - paused - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_S))
            self.control.obey()
