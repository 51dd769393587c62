"""The event log of a run, events.jsonl: one JSON object per line, one writer, any number of readers.

Every line has `v`, `seq`, `t` (unix seconds), `mono` (seconds on its process's monotonic clock; older logs lack it) and
`kind`. A line is written in one piece and flushed, so a killed process leaves at most one line without its newline,
which readers ignore. Readers skip kinds they do not know.

Each checkpoint's state.json records how many bytes events.jsonl and completions.jsonl had when its step was done (both
are fsynced first). A resume takes the newest complete checkpoint, truncates both files to those lengths, without a
checkpoint to 0, and appends from there. Later steps are trained again, so each step appears once and `seq` has no gaps.
A `Follower` that had read past that length starts over from byte 0 and sets `restarted`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from io import RawIOBase
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO, TypeGuard, cast

from pydantic_core import from_json

from backend.runs.run_folder import RunFolder
from backend.utils.disk_faults import DiskError, writing
from backend.utils.documents import read_json
from backend.utils.errors import UserError
from backend.utils.files import open_regular, reason
from backend.utils.text import quote

VERSION = 1
RUN_FORMAT = VERSION
"""Version of the run folder's format: lines of the event log, changes.json and each state.json carry it as `v`.

Within a version files may gain keys, which older programs ignore and newer ones fill with defaults. It goes up when an
older program would misread a run; no program touches a run of a newer version.
"""

ENDINGS = ("finished", "stopped", "failed")
"""Kinds that end an event log; a resume truncates them away."""
KINDS = ("started", "phase", "command", "step", "eval", "checkpoint", "change", "health", "note", *ENDINGS)
PHASES = ("loading", "sampling", "scoring", "learning", "evaluating", "saving", "exporting", "paused")

METRICS = {
    **dict.fromkeys(("loss", "reward", "reward_std", "reward_std_within_groups"), ""),
    **dict.fromkeys(("frac_groups_without_signal", "frac_reward_zero_std"), "share"),
    **dict.fromkeys(("kl", "entropy"), "nats"),
    **dict.fromkeys(("clip_ratio_low", "clip_ratio_high", "clip_ratio_total"), "share"),
    **dict.fromkeys(("completions/mean_length", "completions/min_length", "completions/max_length"), "tokens"),
    **dict.fromkeys(("completions/distinct_fraction", "completions/identical_fraction"), "share"),
    **dict.fromkeys(("completions/distinct_1", "completions/distinct_2", "completions/repetition"), "share"),
    "process/memory_gb": "GB",
    "process/cpu_cores": "cores",
    "machine/swap_gb": "GB",
    "hit_max_tokens_ratio": "share",
    **dict.fromkeys(("learning_rate", "grad_norm"), ""),
    **dict.fromkeys(("rollout_tokens_per_second", "train_tokens_per_second"), "tokens/s"),
    **dict.fromkeys(("time/rollout", "time/reward", "time/train", "time/other", "time/step"), "s"),
    **dict.fromkeys(("peak_memory_gb", "peak_memory_gb/rollout", "peak_memory_gb/train"), "GB"),
    "num_tokens": "tokens",
}
"""Metrics of every step → their unit. For each reward function there are also `rewards/<function>/mean` and `/std`."""

Event = dict[str, Any]

LONGEST_LINE = 64 << 20
"""Bytes. Longer lines are not ours, and are read in pieces that parse as nothing."""
TAIL_BYTES = TAIL_BLOCK = 1 << 16
LAST_TIME = 253_402_300_800
"""Unix seconds of the year 10,000."""
MOST_STEPS = 2**53
"""Beyond it a float does not tell two steps apart."""
_NUMBERS = {int, float, NoneType}


def is_step(value: object) -> TypeGuard[int]:
    """Whether a value counts steps."""
    return type(value) is int and 0 <= value < MOST_STEPS


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number within the range of a float; true and false are not."""
    try:
        return type(value) in (int, float) and math.isfinite(cast("float", value))
    except OverflowError:
        return False


def _is_text(value: object) -> bool:
    return type(value) is str


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict)


_FIELDS: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(("step", "iterations", "seq", "resumed_from", "until", "since"), is_step),
    **dict.fromkeys(("mono", "progress", "value", "threshold", "seconds", "done", "total"), is_number),
    **dict.fromkeys(("sentence", "advice", "code", "level", "metric", "phase", "word", "source", "reason"), _is_text),
    **dict.fromkeys(("split", "path", "model", "command", "device"), _is_text),
    **dict.fromkeys(("metrics", "versions", "reward_files", "settings"), _is_mapping),
    "t": lambda value: is_number(value) and 0 <= value < LAST_TIME,
}
"""Field → check of its type. None is allowed everywhere, and so is any value of an unknown field."""


def well_formed(event: Event) -> Event | None:
    """The event without fields of another type than theirs, or None if it has no kind. May change `event`."""
    if type(event.get("kind")) is not str:
        return None
    for key in [key for key in event if key in _FIELDS and event[key] is not None and not _FIELDS[key](event[key])]:
        del event[key]
    metrics = event.get("metrics")
    if metrics is not None and event["kind"] in ("step", "eval"):
        event["metrics"] = metrics = _finite(metrics)
        # Runs from before December 2026 have only TRL's name, the same number unless rewards are scaled over the batch.
        if "frac_reward_zero_std" in metrics:
            metrics.setdefault("frac_groups_without_signal", metrics["frac_reward_zero_std"])
    return event


def _finite(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics without what is not a number. Most have only numbers, which one sum shows."""
    values = metrics.values()
    try:
        if set(map(type, values)) <= _NUMBERS and math.isfinite(sum(filter(None, values))):
            return metrics
    except OverflowError:
        pass
    return {key: value for key, value in metrics.items() if value is None or is_number(value)}


def json_safe(value: Any) -> Any:
    """`value` in JSON's types: NaN and infinities become None, tuples lists, paths text."""
    if value is None or isinstance(value, (str, int)):  # first: a step's rows hold tens of thousands
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in cast("list[Any]", value)]
    return str(value) if isinstance(value, Path) else value


class JsonLines:
    """Appends whole JSON lines to a file and counts its bytes in `size`. One writer at a time.

    A line that cannot be written whole is cut off again, `size` stays, and DiskError is raised. The descriptor has no
    buffer, since Python's keeps bytes that failed and writes them later.
    """

    def __init__(self, path: Path) -> None:
        """Cuts off half a line at the end, which a killed process leaves. Raises DiskError."""
        self.path = path
        with writing(path):
            self._file = path.open("ab+", buffering=0)
            self.size = _whole_lines(self._file.fileno())
            self._file.truncate(self.size)
        self._is_torn = False
        """A part of a line was written, and cutting it off failed."""
        self._lost: DiskError | None = None
        """Why `sync` failed once."""

    def append(self, value: Mapping[str, Any]) -> None:
        """Append one line. It survives a kill of this process, but not a power cut (see `sync`). Raises DiskError."""
        # A lone surrogate, as broken text may hold, has no UTF-8 and is written as "?".
        line = json.dumps(json_safe(value), ensure_ascii=False, allow_nan=False).encode(errors="replace") + b"\n"
        with writing(self.path):
            if self._is_torn:
                self._file.truncate(self.size)
                self._is_torn = False
            try:
                write_all(self._file, line)
            except BaseException:
                self._is_torn = True
                with contextlib.suppress(OSError):  # then before the next line
                    self._file.truncate(self.size)
                    self._is_torn = False
                raise
        self.size += len(line)

    def sync(self) -> None:
        """fsync. Raises DiskError, and once it has failed always: the kernel forgets what it could not write."""
        if self._lost is not None:
            raise self._lost
        try:
            with writing(self.path):
                os.fsync(self._file.fileno())
        except DiskError as error:
            self._lost = error
            raise

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what fails here has failed in `append` or `sync` before
            self._file.close()


def _whole_lines(handle: int) -> int:
    """How many bytes of an open file are whole lines."""
    end = os.fstat(handle).st_size
    while end > 0:
        start = max(0, end - TAIL_BLOCK)
        newline = os.pread(handle, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def write_all(file: RawIOBase, data: bytes) -> None:
    """Write every byte to a file without a buffer; the kernel may take a part at a time. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]


class EventLog(JsonLines):
    """Writes a run's events.jsonl. `echo` is called with each event (for `--stream` and the progress display)."""

    def __init__(self, path: Path, echo: Any = None) -> None:
        super().__init__(path)
        self.seq = 0
        for event in read_events(path):
            number = event.get("seq")
            self.seq = number + 1 if isinstance(number, int) else self.seq + 1
        self._echo = echo
        self.followers: list[Callable[[Event], None]] = []
        """Called with each event once it is written; they may write events of their own."""
        self._echo_fault: DiskError | None = None

    def write(self, kind: str, **fields: Any) -> Event:
        """Append one event and return it. With a `t` among the fields it has no `mono`.

        Raises DiskError with nothing written. An error of `echo` is raised by the next call, since this event is
        written.
        """
        if (fault := self.take_echo_fault()) is not None:
            raise fault
        times = {} if "t" in fields else {"t": time.time(), "mono": round(time.monotonic(), 3)}
        event = cast("Event", json_safe({"v": VERSION, "seq": self.seq, **times, "kind": kind, **fields}))
        self.append(event)
        self.seq += 1
        if self._echo is not None:
            try:
                self._echo(event)
            except DiskError as error:
                self._echo_fault = error
        for follow in self.followers:
            follow(event)
        return event

    def take_echo_fault(self) -> DiskError | None:
        """The error of the last echo that no `write` has raised yet; once."""
        fault, self._echo_fault = self._echo_fault, None
        return fault


class Follower:
    """Reads a growing file of JSON lines incrementally. Never raises for anything a writer may do.

    After `read`, `restarted` says whether the file was truncated or replaced, so that earlier events are void. To
    notice that, each `read` compares the last line read before with the bytes now at its offset: a resumed run may have
    grown past the old length between two reads.
    """

    def __init__(self, path: Path, *, limit: int = 4 << 20) -> None:
        self.path = path
        self.limit = limit
        """Most bytes per `read`, except for a longer line."""
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
        return [event for event in map(parse_line, lines.split(b"\n")) if event is not None]

    def _complete_lines(self) -> bytes | None:
        """The bytes after the offset up to the last newline; None when the file was truncated or replaced."""
        try:
            with open_regular(self.path) as file:
                file.seek(self._offset - len(self._last))
                if file.read(len(self._last)) != self._last:
                    return None
                chunk = file.read(self.limit)
                if b"\n" not in chunk:
                    chunk += file.readline(LONGEST_LINE)
        except OSError:  # not written yet, or deleted while it was followed
            return None if self._offset else b""
        # Without a newline rfind gives -1 and the slice is empty: half a line is read again once it is complete.
        return chunk[: chunk.rfind(b"\n") + 1]


def read_events(path: Path) -> Iterator[Event]:
    """Every complete event of an event log; none where there is no file. Raises UserError for an unreadable one."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError("run", f"{quote(path)} cannot be read: {reason(error)}.") from None
    with file:
        while line := file.readline(LONGEST_LINE):
            event = parse_line(line) if line.endswith(b"\n") else None
            if event is not None:
                yield event


def parse_line(line: bytes) -> Event | None:
    """The well-formed event of a line; any other JSON object as it is; None for anything else."""
    try:
        value = from_json(line)  # four times as fast as json, which counts in an event log of 150 MB
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    value = cast("Event", value)
    return well_formed(value) if "kind" in value and "completions" not in value else value


def truncate_file(path: Path, size: int) -> None:
    """Truncate a file to `size` bytes and fsync; a missing or shorter one is left alone. Raises DiskError."""
    if not path.exists():
        return
    with writing(path), path.open("rb+") as file:
        file.truncate(min(size, os.fstat(file.fileno()).st_size))  # beyond the end, truncate would append zero bytes
        os.fsync(file.fileno())


def has_finished(run: RunFolder) -> bool:
    """Whether the run has done all of its steps."""
    _, last = first_and_last_events(run.events)
    return bool(last) and last[-1]["kind"] == "finished"


def step_of_end(run: RunFolder) -> int | None:
    """The step whose weights a finished run has left, where that is not its last (`load_best_at_end`)."""
    _, last = first_and_last_events(run.events)
    step = last[-1].get("ends_with") if last and last[-1]["kind"] == "finished" else None
    return step if is_step(step) else None


def first_and_last_events(path: Path) -> tuple[list[Event], list[Event]]:
    """(events of the first TAIL_BYTES of an event log, events of its last TAIL_BYTES or of more, up to a `step`).

    A step may be far from the end: a long rollout or evaluation writes thousands of `phase` events after it.
    """
    try:
        with open_regular(path) as file:
            head = file.read(TAIL_BYTES)
            last = last_events(file, file.seek(0, 2))
    except OSError:
        return [], []
    return _events(head), last


def last_events(file: BinaryIO, size: int) -> list[Event]:
    """Events at the end of the first `size` bytes of an event log: of TAIL_BYTES, or of more up to a `step`."""
    reach = TAIL_BYTES
    while True:
        start = max(0, size - reach)
        file.seek(start)
        tail = file.read(size - start)
        last = _events(tail if reach >= size else tail.partition(b"\n")[2])
        if reach >= size or any(event["kind"] == "step" for event in last):
            return last
        reach *= 4


def _events(data: bytes) -> list[Event]:
    lines = data.rpartition(b"\n")[0].split(b"\n")
    return [event for event in map(parse_line, lines) if event is not None and "kind" in event]


def check_format(run: RunFolder) -> None:
    """Raise UserError for a run that a newer version of the program has written."""
    contents = [event for part in first_and_last_events(run.events) for event in part]
    for path in [run.changes, *run.checkpoints.glob("[0-9]*/state.json")]:
        with contextlib.suppress(UserError):  # what is damaged is reported where it is needed
            content = read_json(path, "run")
            contents += [cast("dict[str, Any]", content)] if isinstance(content, dict) else []
    newest = max((v for each in contents if is_step(v := each.get("v"))), default=RUN_FORMAT)
    if newest > RUN_FORMAT:
        knows = f"this version of GRPO Studio knows formats up to {RUN_FORMAT}"
        sentence = f"The run {run.name} has format {newest} and {knows}; update it to continue. Nothing was changed."
        raise UserError("run", sentence)
