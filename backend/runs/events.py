"""The event log of a run, events.jsonl: one JSON object per line, one writer, any number of readers.

Every line has `v`, `seq`, `t` (unix seconds), `mono` (the monotonic clock; older logs lack it) and `kind`. A resume
truncates events.jsonl and completions.jsonl to the lengths in the checkpoint's state.json, so each step appears once.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO, TypeGuard

from pydantic_core import from_json

from backend.runs.run_folder import RunFolder
from backend.utils.disk import DiskError, writing
from backend.utils.documents import read_json
from backend.utils.errors import UserError
from backend.utils.files import json_safe, open_regular, reason, write_all
from backend.utils.text import quote

RUN_FORMAT = 1  # `v` of event log, changes.json and state.json; it goes up when an older program would misread a run

ENDINGS = ("finished", "stopped", "failed")
KINDS = ("started", "phase", "command", "step", "eval", "checkpoint", "change", "health", "note", *ENDINGS)

METRICS = {  # metric of every step → its unit. Each reward function adds `rewards/<function>/mean` and `/std`
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

Event = dict[str, Any]

TAIL_BYTES = 1 << 16
REACH = 16 << 20  # bytes from the end of an event log that are searched: ten thousand steps
STEP_KIND, EVALUATION_KIND = b'"kind": "step"', b'"kind": "eval"'
_NUMBERS = {int, float, NoneType}


def is_step(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 62  # readers keep steps in 64 bits


def is_number(value: Any) -> TypeGuard[float]:
    """True for a number that is finite as a float; not for booleans."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:
        return False


def is_text(value: object) -> bool:
    return type(value) is str


_FIELDS: dict[str, Callable[[object], bool]] = {  # field → check of its type; None is allowed everywhere
    **dict.fromkeys(("step", "iterations", "seq", "resumed_from", "until", "since"), is_step),
    **dict.fromkeys(("mono", "progress", "value", "threshold", "seconds", "done", "total"), is_number),
    **dict.fromkeys(("sentence", "advice", "code", "level", "metric", "phase", "word", "source", "reason"), is_text),
    **dict.fromkeys(("split", "path", "model", "command", "device"), is_text),
    **dict.fromkeys(("metrics", "versions", "reward_files", "settings"), lambda value: isinstance(value, dict)),
    "t": lambda value: is_number(value) and 0 <= value < 253_402_300_800,  # the year 10,000
}


def well_formed(event: Event) -> Event | None:
    """The event without fields of a wrong type, or None if it has no kind. May change `event`."""
    if type(event.get("kind")) is not str:
        return None
    for key in [key for key in event if key in _FIELDS and event[key] is not None and not _FIELDS[key](event[key])]:
        del event[key]
    metrics = event.get("metrics")
    if metrics is not None and event["kind"] in ("step", "eval"):
        try:  # one sum shows that all are finite
            values = metrics.values()
            is_clean = set(map(type, values)) <= _NUMBERS and math.isfinite(sum(filter(None, values)))
        except OverflowError:
            is_clean = False
        if not is_clean:
            metrics = {key: value for key, value in metrics.items() if value is None or is_number(value)}
        # Runs from before December 2026 have only TRL's name, the same number unless rewards are scaled over the batch.
        if "frac_reward_zero_std" in metrics:
            metrics.setdefault("frac_groups_without_signal", metrics["frac_reward_zero_std"])
        event["metrics"] = metrics
    return event


class JsonLines:
    """Appends whole JSON lines to a file and counts its bytes in `size`. A line that cannot be written whole is cut off
    again and raises DiskError. Unbuffered, since Python's buffer keeps bytes that failed and writes them later."""

    def __init__(self, path: Path) -> None:
        """Cuts off half a line at the end, which a killed process leaves. Raises DiskError."""
        self.path = path
        with writing(path):
            self._file = path.open("ab+", buffering=0)
            self.size = self._file.seek(0, 2) - len(after_last_newline(self._file))
            self._file.truncate(self.size)
        self._lost: DiskError | None = None

    def append(self, value: Mapping[str, Any]) -> None:
        """Append one line. It survives a kill of this process, but not a power cut (see `sync`). Raises DiskError."""
        # A lone surrogate, as broken text may hold, has no UTF-8 and is written as "?".
        line = json.dumps(json_safe(value), ensure_ascii=False, allow_nan=False).encode(errors="replace") + b"\n"
        with writing(self.path):
            try:
                write_all(self._file, line)
            except BaseException:
                self._file.truncate(self.size)
                raise
        self.size += len(line)

    def sync(self) -> None:
        """fsync. Raises DiskError, and once it has failed always: the kernel forgets what it could not write."""
        if self._lost is None:
            try:
                with writing(self.path):
                    os.fsync(self._file.fileno())
            except DiskError as error:
                self._lost = error
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what fails here has failed in `append` or `sync` before
            self._file.close()


def after_last_newline(file: Any) -> bytes:
    end = file.seek(0, 2)
    reach = TAIL_BYTES
    while True:
        file.seek(max(0, end - reach))
        tail = file.read(min(reach, end))
        if b"\n" in tail or reach >= end:
            return tail[tail.rfind(b"\n") + 1 :]
        reach *= 4


class EventLog(JsonLines):
    """Writes a run's events.jsonl. `followers`, of which `echo` is the first, are called with each event."""

    def __init__(self, path: Path, echo: Callable[[Event], object] | None = None) -> None:
        super().__init__(path)
        last = [event["seq"] for event in event_ends(path) if is_step(event.get("seq"))]
        self.seq = last[-1] + 1 if last else 0
        self.followers: list[Callable[[Event], object]] = [] if echo is None else [echo]

    def write(self, kind: str, **fields: Any) -> Event:
        """Append one event and return it. Raises DiskError with nothing written."""
        times = {} if "t" in fields else {"t": time.time(), "mono": round(time.monotonic(), 3)}
        event = json_safe({"v": RUN_FORMAT, "seq": self.seq, **times, "kind": kind, **fields})
        self.append(event)
        self.seq += 1
        for follow in self.followers:
            follow(event)
        return event


class Follower:
    """Reads a growing file of JSON lines incrementally. Never raises for anything a writer may do. `restarted`: it was
    truncated or replaced, so that everything read before is void; each read compares the last line before it."""

    def __init__(self, path: Path, *, limit: int = 4 << 20) -> None:
        """`limit`: bytes per read, except for a longer line."""
        self.path, self.limit = path, limit
        self.restarted = False
        self.offset, self._last, self._size = 0, b"", 0

    @property
    def share(self) -> float:
        return self.offset / self._size if self._size else 1.0

    def read(self) -> list[Event]:
        """The events since the last call, about `limit` bytes at most: call again until it returns none."""
        return [event for _, line in self.lines() if (event := parse_line(line)) is not None]

    def lines(self) -> list[tuple[int, bytes]]:
        """(offset, line) of the complete lines since the last call, about `limit` bytes at most."""
        self.restarted = False
        text = self._complete_lines()
        if text is None:  # truncated or replaced: read again from the start
            self.offset, self._last, self.restarted = 0, b"", True
            text = self._complete_lines() or b""
        lines = placed_lines(text, self.offset)
        if lines:
            self.offset, self._last = self.offset + len(text), lines[-1][1]
        return lines

    def _complete_lines(self) -> bytes | None:
        """The bytes after the offset up to the last newline; None when the file was truncated or replaced."""
        try:
            with open_regular(self.path) as file:
                self._size = os.fstat(file.fileno()).st_size
                file.seek(self.offset - len(self._last))
                if file.read(len(self._last)) != self._last:
                    return None
                chunk = file.read(self.limit)
                if b"\n" not in chunk:
                    chunk += file.readline()
        except OSError:  # not written yet, or deleted while it was followed
            return None if self.offset else b""
        # Without a newline rfind gives -1 and the slice is empty: half a line is read again once it is complete.
        return chunk[: chunk.rfind(b"\n") + 1]


def placed_lines(text: bytes, offset: int) -> list[tuple[int, bytes]]:
    """(offset, line) of each line of a part of a file that begins at `offset`."""
    lines = text.splitlines(keepends=True)
    return list(zip(accumulate(map(len, lines), initial=offset), lines, strict=False))


def read_events(path: Path) -> Iterator[Event]:
    """Every complete event; none where there is no file. Raises UserError for an unreadable one."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError("run", f"{quote(path)} cannot be read: {reason(error)}.") from None
    with file:
        yield from (event for line in file if line.endswith(b"\n") and (event := parse_line(line)) is not None)


def parse_line(line: bytes) -> Event | None:
    """The well-formed event of a line; any other JSON object as it is; None for anything else."""
    try:
        value = from_json(line)  # four times as fast as json, which counts in an event log of 150 MB
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    return well_formed(value) if "kind" in value and "completions" not in value else value


def truncate_file(path: Path, size: int) -> None:
    """Truncate a file to `size` bytes and fsync; a missing or shorter one is left alone. Raises DiskError."""
    if not path.exists():
        return
    with writing(path), path.open("rb+") as file:
        file.truncate(min(size, os.fstat(file.fileno()).st_size))  # beyond the end, truncate would append zero bytes
        os.fsync(file.fileno())


def end_of_step(path: Path, step: int) -> int:
    """The length of an event log or of completions.jsonl up to the last line of a step that is not after `step`."""
    end = length = 0
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            length += len(line)
            row = parse_line(line) or {}
            if row.get("kind", "step") in ("step", "eval") and is_step(row.get("step")) and row["step"] <= step:
                end = length
    return end


def last_event(run: RunFolder) -> Event:
    return next(reversed(event_ends(run.events)), {})


def has_finished(run: RunFolder) -> bool:
    return last_event(run).get("kind") == "finished"


def is_paused(run: RunFolder) -> bool:
    phases = [event.get("phase") for event in event_ends(run.events) if event["kind"] == "phase"]
    return run.is_locked() and phases[-1:] == ["paused"]


def step_of_end(run: RunFolder) -> int | None:
    """The step whose weights a finished run has left, where that is not its last (`load_best_at_end`)."""
    last = last_event(run)
    step = last.get("ends_with") if last.get("kind") == "finished" else None
    return step if is_step(step) else None


def event_ends(path: Path) -> list[Event]:
    """The events of the first and of the last TAIL_BYTES of an event log, in order. The last ones begin with a `step`
    where there is any: a long rollout writes thousands of `phase` events after it."""
    try:
        with open_regular(path) as file:
            head = file.read(TAIL_BYTES).rpartition(b"\n")[0]
            first, last, read, has_step = list(map(parse_line, head.split(b"\n"))), list[Event | None](), 0, False
            for line in lines_from_end(file, len(head)):
                if read < TAIL_BYTES or STEP_KIND in line:
                    last.append(event := parse_line(line))
                    has_step = has_step or (event or {}).get("kind") == "step"
                read += len(line) + 1
                if has_step and read >= TAIL_BYTES:
                    break
    except OSError:
        return []
    return [event for event in (*first, *reversed(last)) if event is not None and "kind" in event]


def lines_from_end(file: BinaryIO, begin: int = 0) -> Iterator[bytes]:
    """Whole lines of the last REACH bytes of a file, the last one first, back to the line end `begin`."""
    end, cut = file.seek(0, 2) - len(after_last_newline(file)), b""
    until = max(begin, end - REACH)
    while end > until:
        start = max(begin, end - TAIL_BYTES)
        file.seek(start)
        lines = (file.read(end - start) + cut).split(b"\n")
        cut = lines.pop(0) if start > begin else b""  # its beginning is in the block before
        yield from filter(None, reversed(lines))
        end = start


def check_format(run: RunFolder) -> None:
    """Raise UserError for a run that a newer version of the program has written."""
    contents = event_ends(run.events)
    for path in [run.changes, *run.checkpoints.glob("[0-9]*/state.json")]:
        with contextlib.suppress(UserError):  # what is damaged is reported where it is needed
            content = read_json(path, "run")
            contents += [content] if isinstance(content, dict) else []
    newest = max((v for each in contents if is_step(v := each.get("v"))), default=RUN_FORMAT)
    if newest > RUN_FORMAT:
        knows = f"this version of GRPO Studio knows formats up to {RUN_FORMAT}"
        sentence = f"The run {run.name} has format {newest} and {knows}; update it to continue. Nothing was changed."
        raise UserError("run", sentence)
