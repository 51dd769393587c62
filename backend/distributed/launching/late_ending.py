"""The last line of an event log whose trainer could not write it: it was killed, or failed before it had begun."""

from __future__ import annotations

import os

from backend.runs.events import ENDINGS, EventLog, first_and_last_events
from backend.runs.run_folder import RunFolder
from backend.runs.run_lock import hold_lock
from backend.utils.errors import UserError


def write_late_ending(run: RunFolder, kind: str, sentence: str) -> bool:
    """End the event log, unless it has an ending, or another process trains the run. → whether it was written."""
    try:
        lock = hold_lock(run)
    except UserError:
        return False
    try:
        _, last = first_and_last_events(run.events)
        if last and last[-1]["kind"] in ENDINGS:
            return False
        step = max((int(event["step"]) for event in last if event["kind"] == "step"), default=0)
        event_log = EventLog(run.events)
        event_log.write(kind, step=step, reason=kind, sentence=sentence)
        event_log.close()
        return True
    finally:
        os.close(lock)
