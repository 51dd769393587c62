"""A run waits while its disk is nearly full, rather than failing at its next save.

Looked at after each step and before each save; the limits are what the next checkpoint takes and a reserve for the lines
of the event log and the completions. Where the system does not say how much is free, nothing is done. Errors of a disk that is full in
another way than by its bytes or its files (a quota, say) are met where they are raised: this only looks ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from backend.runs.events import EventLog
from backend.runs.run_disk_use import RESERVE
from backend.runs.run_folder import RunFolder
from backend.trainer.control import Control
from backend.utils.disk_faults import LONGEST_PLACE, Room, gigabytes, room_on
from backend.utils.text import quote

RESERVED_FILES = 32
"""Files that a save makes, and more."""
CHECK_EVERY_S = 2.0
"""Seconds between two looks at the disk while waiting."""


class DiskSpaceGuard:
    """The room that one run needs. A user who says “resume” while it waits knows better, and is not asked again before there was room."""

    def __init__(self, run: RunFolder, event_log: EventLog, control: Control) -> None:
        self._run, self._event_log, self._control = run, event_log, control
        self._is_overruled = False

    def wait(self, needed: Callable[[], int] = lambda: 0) -> None:
        """Return once there is room for `needed` bytes beside the reserve; paused until then. Raises Stopped where it was asked to stop meanwhile."""
        lacks = self._lacking(needed() + RESERVE)
        if not lacks:
            self._is_overruled = False
            return
        if self._is_overruled or self._control.stop_requested:
            return
        self._event_log.write("note", level="warning", sentence=lacks, during="pause")
        looked = time.monotonic()

        def is_over() -> bool:
            nonlocal looked
            if time.monotonic() - looked < CHECK_EVERY_S:
                return False
            looked = time.monotonic()
            return not self._lacking(needed() + RESERVE)

        is_over_by_itself = self._control.pause_until(is_over, lacks)
        self._is_overruled = not is_over_by_itself
        if is_over_by_itself:
            again = "There is room on the disk again; the run goes on."
            self._event_log.write("note", level="info", sentence=again, during="pause")
        self._control.obey()

    def _lacking(self, needed: int) -> str:
        """A sentence on what the disk lacks; "" where it lacks nothing."""
        room = room_on(self._run.path)
        if room is None or (room.bytes >= needed and _has_files(room)):
            return ""
        where = f"The disk of {quote(self._run.path, LONGEST_PLACE)}"
        if not _has_files(room):
            return f"{where} has room for {room.files} more files only. The run is paused until there are more."
        return f"{where} has {gigabytes(room.bytes)} free, and {gigabytes(needed)} are needed. The run is paused until there is room."


def _has_files(room: Room) -> bool:
    return room.files is None or room.files >= RESERVED_FILES
