"""What a trainer does to its run folder, done by a test: the lock, events, checkpoints."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from backend.runs.events import EventLog
from backend.runs.run_folder import RunFolder, hold_lock


@contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Hold the run's lock, as its trainer does."""
    handle = hold_lock(folder)
    try:
        yield
    finally:
        os.close(handle)


def write_event(folder: RunFolder, kind: str, **fields) -> None:
    event_log = EventLog(folder.events)
    event_log.write(kind, **fields)
    event_log.close()


def add_checkpoints(run: RunFolder, scores: dict[int, float | None], size: int = 1) -> None:
    """A checkpoint at each step with its score; its files have `size` bytes."""
    for step, score in scores.items():
        folder = run.checkpoints / f"{step:06d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"step": step, "updates": step, "cursor": step, "score": score}))
        for name in ("adapters.safetensors", "optimizer.safetensors"):
            (folder / name).write_bytes(b"x" * size)


def age(folder: RunFolder) -> None:
    """Set the time of every file to an hour ago: none looks as if a process had just been launched."""
    for path in folder.path.iterdir():
        os.utime(path, (time.time() - 3600,) * 2)
