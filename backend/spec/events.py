"""The diary: one JSON object a line, one writer, any number of followers.

Every line carries `v`, `seq`, `t` (unix seconds) and `kind`. Lines are whole and flushed. Followers skip kinds they do
not know and keep an unfinished line until its newline. Resuming cuts the file back; a follower notices and starts over.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

VERSION = 1

ENDINGS = ("finished", "stopped", "failed")
"""Kinds that end a diary; a resumed run is cut back and goes on."""

KINDS = (
    "started", "phase", "command", "step", "eval", "checkpoint", "health", "note", *ENDINGS,
)  # fmt: skip

PHASES = ("loading", "sampling", "scoring", "learning", "evaluating", "saving", "exporting", "paused")

Event = dict[str, Any]


def plain(value: Any) -> Any:
    """`value` as JSON can say it: NaN and infinities become None, tuples lists, paths text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in cast("list[Any]", value)]
    return str(value) if isinstance(value, Path) else value


class JsonLines:
    """Appends whole JSON lines to a file and knows how many bytes stand in it. One writer at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab")
        self.size = self._file.tell()

    def append(self, value: Mapping[str, Any]) -> None:
        # A lone surrogate, as broken text may hold, has no UTF-8; it is written as "?" rather than ending the run.
        line = json.dumps(plain(value), ensure_ascii=False, allow_nan=False).encode(errors="replace") + b"\n"
        self._file.write(line)
        self._file.flush()
        self.size += len(line)

    def sync(self) -> None:
        """Have the operating system put everything written so far on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class Diary(JsonLines):
    """The writer of a run's events.jsonl. `echo` is called with each event (for `--stream` and progress)."""

    def __init__(self, path: Path, echo: Any = None) -> None:
        self.seq = sum(1 for _ in read_events(path)) if path.exists() else 0
        super().__init__(path)
        self._echo = echo

    def write(self, kind: str, **carries: Any) -> Event:
        """Append one event of `kind`; returns it as written."""
        event = cast("Event", plain({"v": VERSION, "seq": self.seq, "t": time.time(), "kind": kind, **carries}))
        self.append(event)
        self.seq += 1
        if self._echo is not None:
            self._echo(event)
        return event


class Follower:
    """Reads a growing file of JSON lines from where it stopped last time. Never raises for what a writer may do.

    After `read`, `restarted` tells whether the file was cut back or replaced, so that what was read before is void.
    That shows on the last line that was read: it is looked at again each time, and must still stand where it stood.
    """

    def __init__(self, path: Path, *, limit: int = 4 << 20) -> None:
        self.path = path
        self.limit = limit
        """Most bytes one `read` takes, so that a window stays quick however large the file is; a longer line is read
        whole."""
        self.restarted = False
        self._place, self._last = 0, b""

    @property
    def place(self) -> int:
        """Bytes of whole lines read so far."""
        return self._place

    def read(self) -> list[Event]:
        """The events since the last call; at most about `limit` bytes of them (call again while there are some)."""
        self.restarted = False
        whole = self._whole_lines()
        if whole is None:  # cut back under our feet: read again from the start
            self._place, self._last = 0, b""
            self.restarted = True
            whole = self._whole_lines() or b""
        self._place += len(whole)
        if whole:
            self._last = whole[whole.rfind(b"\n", 0, -1) + 1 :]
        return [event for event in map(parse_line, whole.split(b"\n")) if event is not None]

    def _whole_lines(self) -> bytes | None:
        """The bytes after our place up to a newline; None when this is not the file that was read before."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._place - len(self._last))
                if file.read(len(self._last)) != self._last:
                    return None
                chunk = file.read(self.limit)
                if b"\n" not in chunk:
                    chunk += file.readline()
        except OSError:
            return None if self._place else b""
        return chunk[: chunk.rfind(b"\n") + 1]


def read_events(path: Path) -> Iterator[Event]:
    """Every whole event of a diary, from the start."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            event = parse_line(line) if line.endswith(b"\n") else None
            if event is not None:
                yield event


def parse_line(line: bytes) -> Event | None:
    """The event of one line, or None for what is not a JSON object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast("Event", value) if isinstance(value, dict) else None


def cut_back(path: Path, size: int) -> None:
    """Shorten a file to `size` bytes and put that on disk; one that is missing or shorter already is left alone."""
    if not path.exists():
        return
    with path.open("rb+") as file:
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
"""Metrics that every step carries → their unit. Per reward function come `rewards/<function>/mean` and `/std`."""
