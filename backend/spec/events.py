"""The diary of a run, events.jsonl: one JSON object per line, one writer, any number of followers.

Every line has `v`, `seq`, `t` (unix seconds), `mono` (seconds on its process's monotonic clock, which stands still while the machine
sleeps; older diaries lack it) and `kind`. A line is written in one piece and flushed, so a process that is killed
leaves at most one line without its newline, which every reader ignores. Readers skip kinds they do not know.

How a diary continues after a kill: each checkpoint's state.json records how many bytes events.jsonl and completions.jsonl had
when its step was done (both files are fsynced first). On resume the trainer takes the newest complete checkpoint, truncates
both files to those lengths and appends from there. Everything written after the checkpoint, a half line or an ending
included, is removed and its steps are trained again, so each step appears once and `seq` has no gaps. With no checkpoint both files
are truncated to 0. A `Follower` that had read past that length compares the last line it read with the bytes now at that
offset; if they differ (or the file is shorter) it starts over from byte 0 and sets `restarted`.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from pydantic_core import from_json

from backend.spec.sound_events import sound_event

VERSION = 1

ENDINGS = ("finished", "stopped", "failed")
"""Kinds that end a diary. On resume the file is truncated to the checkpoint, which removes the ending."""

KINDS = (
    "started", "phase", "command", "step", "eval", "checkpoint", "change", "health", "note", *ENDINGS,
)  # fmt: skip

PHASES = ("loading", "sampling", "scoring", "learning", "evaluating", "saving", "exporting", "paused")

Event = dict[str, Any]


def json_safe(value: Any) -> Any:
    """`value` in JSON's types: NaN and infinities become None, tuples lists, paths text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in cast("list[Any]", value)]
    return str(value) if isinstance(value, Path) else value


class JsonLines:
    """Appends whole JSON lines to a file and counts its bytes in `size`. One writer at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Opened for appending, the position is the end of the file: `size` continues where an earlier process stopped.
        self._file = path.open("ab")
        self.size = self._file.tell()

    def append(self, value: Mapping[str, Any]) -> None:
        # A lone surrogate, as broken text may hold, has no UTF-8; it is written as "?" rather than ending the run.
        line = json.dumps(json_safe(value), ensure_ascii=False, allow_nan=False).encode(errors="replace") + b"\n"
        self._file.write(line)
        # From here the line is the kernel's: it survives a kill of this process, though not a power cut (see `sync`).
        self._file.flush()
        self.size += len(line)

    def sync(self) -> None:
        """fsync: put everything written so far on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class Diary(JsonLines):
    """Writes a run's events.jsonl. `echo` is called with each event (for `--stream` and the progress display)."""

    def __init__(self, path: Path, echo: Any = None) -> None:
        self.seq = sum(1 for _ in read_events(path)) if path.exists() else 0
        super().__init__(path)
        self._echo = echo
        self.followers: list[Callable[[Event], None]] = []
        """Called with each event once it is written; they may write events of their own."""

    def write(self, kind: str, **fields: Any) -> Event:
        """Append one event of `kind`; returns it as written. A `t` among the fields is a made-up time, and stands without `mono`."""
        times = {} if "t" in fields else {"t": time.time(), "mono": round(time.monotonic(), 3)}
        event = cast("Event", json_safe({"v": VERSION, "seq": self.seq, **times, "kind": kind, **fields}))
        self.append(event)
        self.seq += 1
        if self._echo is not None:
            self._echo(event)
        for follow in self.followers:
            follow(event)
        return event


class Follower:
    """Reads a growing file of JSON lines incrementally. Never raises for anything a writer may do.

    After `read`, `restarted` says whether the file was truncated or replaced, so that earlier events are void. To detect
    that, each `read` compares the last line read before with the bytes now at its offset: size and modification time
    are not enough, since a resumed run may have grown past the old length between two reads.
    """

    def __init__(self, path: Path, *, limit: int = 4 << 20) -> None:
        self.path = path
        self.limit = limit
        """Most bytes per `read`, so that a window stays responsive with a file of any size; a longer line is read
        whole."""
        self.restarted = False
        self._offset, self._last = 0, b""

    @property
    def offset(self) -> int:
        """Bytes of complete lines read so far."""
        return self._offset

    def read(self) -> list[Event]:
        """The events since the last call, about `limit` bytes at most: call again until it returns none."""
        self.restarted = False
        lines = self._complete_lines()
        if lines is None:  # truncated or replaced: read again from the start
            self._offset, self._last = 0, b""
            self.restarted = True
            lines = self._complete_lines() or b""
        self._offset += len(lines)
        if lines:
            # From after the last newline but one; rfind gives -1 where there is one line only.
            self._last = lines[lines.rfind(b"\n", 0, -1) + 1 :]
        return [event for event in map(self.parse, lines.split(b"\n")) if event is not None]

    def parse(self, line: bytes) -> Event | None:
        """What a line holds; None for nothing."""
        return parse_line(line)

    def _complete_lines(self) -> bytes | None:
        """The bytes after the offset up to the last newline; None when the file was truncated or replaced."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset - len(self._last))
                if file.read(len(self._last)) != self._last:
                    return None
                chunk = file.read(self.limit)
                if b"\n" not in chunk:
                    chunk += file.readline()
        except OSError:  # not written yet, or deleted while it was followed
            return None if self._offset else b""
        # Without a newline rfind gives -1 and the slice is empty: half a line is read again once it is complete.
        return chunk[: chunk.rfind(b"\n") + 1]


def read_events(path: Path) -> Iterator[Event]:
    """Every complete line of a file of JSON objects, from the start; none where there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            event = parse_line(line) if line.endswith(b"\n") else None
            if event is not None:
                yield event


class DiaryFollower(Follower):
    """A Follower of a diary: what is no event is left out, whatever it is."""

    def parse(self, line: bytes) -> Event | None:
        return parse_event(line)


def read_diary(path: Path) -> Iterator[Event]:
    """Every event of a diary, from the start; what is no event is left out."""
    return (event for line in read_events(path) if (event := sound_event(line)) is not None)


def parse_event(line: bytes) -> Event | None:
    """The event of one line of a diary; None for what is no event, whatever it is."""
    value = parse_line(line)
    return None if value is None else sound_event(value)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The object in one line of JSON; None for anything else."""
    try:
        value = from_json(line)  # four times as fast as json, which counts in a diary of 150 MB
    except ValueError:
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def truncate_file(path: Path, size: int) -> None:
    """Truncate a file to `size` bytes and fsync; one that is missing or already shorter is left alone."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        # min: beyond the end, truncate would append zero bytes.
        file.truncate(min(size, os.fstat(file.fileno()).st_size))
        os.fsync(file.fileno())


METRICS = {
    "loss": "", "reward": "", "reward_std": "", "frac_reward_zero_std": "share", "kl": "nats", "entropy": "nats",
    "clip_ratio_low": "share", "clip_ratio_high": "share", "clip_ratio_total": "share",
    "completions/mean_length": "tokens", "completions/min_length": "tokens", "completions/max_length": "tokens",
    "hit_max_tokens_ratio": "share", "learning_rate": "", "grad_norm": "",
    "rollout_tokens_per_second": "tokens/s", "train_tokens_per_second": "tokens/s",
    "time/rollout": "s", "time/reward": "s", "time/train": "s", "time/other": "s", "time/step": "s",
    "peak_memory_gb": "GB", "peak_memory_gb/rollout": "GB", "peak_memory_gb/train": "GB", "num_tokens": "tokens",
}  # fmt: skip
"""Metrics of every step → their unit. For each reward function there are also `rewards/<function>/mean` and `/std`."""
