"""The event log of a run, events.jsonl: one JSON object per line, one writer, any number of followers.

Every line has `v`, `seq`, `t` (unix seconds), `mono` (seconds on its process's monotonic clock, which stands still while the machine
sleeps; older event logs lack it) and `kind`. A line is written in one piece and flushed, so a process that is killed
leaves at most one line without its newline, which every reader ignores. Readers skip kinds they do not know.

How an event log continues after a kill: each checkpoint's state.json records how many bytes events.jsonl and completions.jsonl had
when its step was done (both files are fsynced first). On resume the trainer takes the newest complete checkpoint, truncates
both files to those lengths and appends from there. Everything written after the checkpoint, a half line or an ending
included, is removed and its steps are trained again, so each step appears once and `seq` has no gaps. With no checkpoint both files
are truncated to 0. A `Follower` that had read past that length compares the last line it read with the bytes now at that
offset; if they differ (or the file is shorter) it starts over from byte 0 and sets `restarted`.
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
from backend.utils.whole_file import replace_file

# The shape of event log events: what a field must be for readers to meet it.

LAST_TIME = 253_402_300_800
MOST_STEPS = 2**53
"""Beyond it a float does not tell two steps apart."""
_NUMBERS = {int, float, NoneType}


def is_step(value: object) -> TypeGuard[int]:
    """Whether a value counts steps."""
    return type(value) is int and 0 <= value < MOST_STEPS


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number; true and false are none, nor is a whole number beyond the range of a float."""
    try:
        return type(value) in (int, float) and math.isfinite(cast("float", value))
    except OverflowError:
        return False


def well_formed(event: dict[str, Any]) -> dict[str, Any] | None:
    """The event with the fields that have their type, or None where it has no kind. `event` may be changed."""
    if type(event.get("kind")) is not str:
        return None
    for key in [
        key for key, value in event.items() if value is not None and key in _FIELDS and not _FIELDS[key](value)
    ]:
        del event[key]
    metrics = event.get("metrics")
    if metrics is not None and event["kind"] in ("step", "eval"):
        event["metrics"] = metrics = _finite(metrics)
        # Runs from before December 2026 have TRL's name alone, which is the same number unless rewards are scaled over the batch.
        if "frac_reward_zero_std" in metrics:
            metrics.setdefault("frac_groups_without_signal", metrics["frac_reward_zero_std"])
    return event


def _finite(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics without what is no number. Most have numbers alone, which is seen without a look at each."""
    values = metrics.values()
    try:
        if set(map(type, values)) <= _NUMBERS and math.isfinite(sum(filter(None, values))):
            return metrics
    except OverflowError:
        pass
    return {key: value for key, value in metrics.items() if value is None or is_number(value)}


def _is_text(value: object) -> bool:
    return type(value) is str


def _is_time(value: object) -> bool:
    """Unix seconds, up to the year 9999: later ones are no dates."""
    return is_number(value) and 0 <= value < LAST_TIME


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict)


def _is_pairs_or_values(value: object) -> bool:
    return isinstance(value, Mapping) and all(type(key) is str for key in cast("Mapping[Any, Any]", value))


_FIELDS: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(("step", "iterations", "seq", "resumed_from", "until", "since"), is_step),
    "t": _is_time,
    **dict.fromkeys(("mono", "progress", "value", "threshold", "seconds", "done", "total"), is_number),
    **dict.fromkeys(
        ("sentence", "advice", "code", "level", "metric", "phase", "word", "source", "reason", "split", "path", "model", "command", "device"), _is_text
    ),
    **dict.fromkeys(("metrics", "versions", "reward_files"), _is_mapping),
    "settings": _is_pairs_or_values,
}  # fmt: skip
"""Field → whether a value is of its type. None is allowed everywhere; fields of later versions pass as they are."""


# ── json values ──────────────────────────────────────────────────────────────────────────────────────────────────────

# Values as JSON can hold them. Apart from the event log, whose parser takes longer to import than the small helper
# processes need for all else.


def json_safe(value: Any) -> Any:
    """`value` in JSON's types: NaN and infinities become None, tuples lists, paths text."""
    if value is None or isinstance(
        value, (str, int)
    ):  # first: a step's rows hold tens of thousands, and Mapping is an abstract class
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in cast("list[Any]", value)]
    return str(value) if isinstance(value, Path) else value


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────────

VERSION = 1

ENDINGS = ("finished", "stopped", "failed")
"""Kinds that end an event log. On resume the file is truncated to the checkpoint, which removes the ending."""

KINDS = (
    "started", "phase", "command", "step", "eval", "checkpoint", "change", "health", "note", *ENDINGS,
)  # fmt: skip

PHASES = ("loading", "sampling", "scoring", "learning", "evaluating", "saving", "exporting", "paused")

Event = dict[str, Any]

LONGEST_LINE = 64 << 20
"""Bytes. A longer line is no event of ours, and is read in pieces that are none."""


class JsonLines:
    """Appends whole JSON lines to a file and counts its bytes in `size`. One writer at a time.

    A line that cannot be written whole is not written: what the disk took of it is cut off again, `size` stays, and DiskError is
    raised. The descriptor has no buffer, since Python's keeps bytes that failed and writes them after the next line, or on closing.
    """

    def __init__(self, path: Path) -> None:
        """Raises DiskError. Half a line at the end, of a process that was killed, is cut off."""
        self.path = path
        with writing(path):
            self._file = path.open("ab+", buffering=0)
            self.size = _whole_lines(self._file.fileno())
            self._file.truncate(self.size)
        self._is_torn = False
        """Whether the file is longer than `size`: part of a line was written, and cutting it off failed too."""
        self._lost: DiskError | None = None
        """Why `sync` failed once."""

    def append(self, value: Mapping[str, Any]) -> None:
        """Append one line. From then on it is the kernel's: it survives a kill of this process, though not a power cut (see `sync`)."""
        # A lone surrogate, as broken text may hold, has no UTF-8; it is written as "?" rather than ending the run.
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
        """fsync: put everything written so far on disk. Raises DiskError, and once it has failed always: the kernel forgets what it could
        not write, so a second fsync that succeeds would prove nothing."""
        if self._lost is not None:
            raise self._lost
        try:
            with writing(self.path):
                os.fsync(self._file.fileno())
        except DiskError as fault:
            self._lost = fault
            raise

    def has_its_name(self) -> bool:
        """Whether the file is the one that its name leads to: an editor, or a program that keeps folders alike, may have put another there."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except OSError:
            return False

    def recreate(self) -> None:
        """Write every line anew under the file's name, and go on there. Raises DiskError."""
        with writing(self.path):
            replace_file(self.path, self._blocks())
            old, self._file = self._file, self.path.open("ab+", buffering=0)
            old.close()

    def _blocks(self) -> Iterator[bytes]:
        for start in range(0, self.size, TAIL_BLOCK):
            yield os.pread(self._file.fileno(), min(TAIL_BLOCK, self.size - start), start)

    def close(self) -> None:
        # What fails here has failed in `append` or `sync` before.
        with contextlib.suppress(OSError):
            self._file.close()


TAIL_BLOCK = 1 << 16


def _whole_lines(handle: int) -> int:
    """How many bytes of an open file are whole lines: up to its last newline."""
    end = os.fstat(handle).st_size
    while end > 0:
        start = max(0, end - TAIL_BLOCK)
        newline = os.pread(handle, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def write_all(file: RawIOBase, data: bytes) -> None:
    """Write every byte to a file without a buffer. The kernel may take a part at a time, as on a disk that is nearly full. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]


class EventLog(JsonLines):
    """Writes a run's events.jsonl. `echo` is called with each event (for `--stream` and the progress display)."""

    def __init__(self, path: Path, echo: Any = None) -> None:
        super().__init__(path)
        self.seq = _next_seq(path)
        self._echo = echo
        self.followers: list[Callable[[Event], None]] = []
        """Called with each event once it is written; they may write events of their own."""
        self._echo_fault: DiskError | None = None

    def write(self, kind: str, **fields: Any) -> Event:
        """Append one event of `kind`; returns it as written. A `t` among the fields is a made-up time, and stands without `mono`.

        Raises DiskError with nothing written. A fault of `echo` is raised by the next call: this event stands in the event log, and whoever
        writes it has to count it, or a resume would write it twice.
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
            except DiskError as fault:
                self._echo_fault = fault
        for follow in self.followers:
            follow(event)
        return event

    def take_echo_fault(self) -> DiskError | None:
        """The fault of the last echo that no `write` has raised yet; once."""
        fault, self._echo_fault = self._echo_fault, None
        return fault


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
    """Every complete event of an event log, from the start; none where there is no file. Raises UserError for one that cannot be read."""
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
    """The event of one line, with the fields that have their type; any other JSON object as it is; None for anything else."""
    try:
        value = from_json(line)  # four times as fast as json, which counts in an event log of 150 MB
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    value = cast("Event", value)
    return well_formed(value) if "kind" in value and "completions" not in value else value


def _next_seq(path: Path) -> int:
    """The number after that of the last line; of an event log whose lines have none, how many there are."""
    seq = 0
    for event in read_events(path):
        number = event.get("seq")
        seq = number + 1 if isinstance(number, int) else seq + 1
    return seq


def truncate_file(path: Path, size: int) -> None:
    """Truncate a file to `size` bytes and fsync; one that is missing or already shorter is left alone. Raises DiskError."""
    if not path.exists():
        return
    with writing(path), path.open("rb+") as file:
        # min: beyond the end, truncate would append zero bytes.
        file.truncate(min(size, os.fstat(file.fileno()).st_size))
        os.fsync(file.fileno())


METRICS = {
    "loss": "", "reward": "", "reward_std": "", "reward_std_within_groups": "", "frac_groups_without_signal": "share",
    "frac_reward_zero_std": "share", "kl": "nats", "entropy": "nats",
    "clip_ratio_low": "share", "clip_ratio_high": "share", "clip_ratio_total": "share",
    "completions/mean_length": "tokens", "completions/min_length": "tokens", "completions/max_length": "tokens",
    "completions/distinct_fraction": "share", "completions/identical_fraction": "share", "completions/distinct_1": "share",
    "completions/distinct_2": "share", "completions/repetition": "share", "process/memory_gb": "GB", "process/cpu_cores": "cores",
    "machine/swap_gb": "GB", "hit_max_tokens_ratio": "share", "learning_rate": "", "grad_norm": "",
    "rollout_tokens_per_second": "tokens/s", "train_tokens_per_second": "tokens/s",
    "time/rollout": "s", "time/reward": "s", "time/train": "s", "time/other": "s", "time/step": "s",
    "peak_memory_gb": "GB", "peak_memory_gb/rollout": "GB", "peak_memory_gb/train": "GB", "num_tokens": "tokens",
}  # fmt: skip
"""Metrics of every step → their unit. For each reward function there are also `rewards/<function>/mean` and `/std`."""


# ── event log ends ───────────────────────────────────────────────────────────────────────────────────────────────────────

# Both ends of an event log, read without what lies between: its first and its last events, and how the run ended.

TAIL_BYTES = 1 << 16


def has_finished(run: RunFolder) -> bool:
    """Whether the run has taken all of its steps: its event log ends so."""
    _, last = first_and_last_events(run.events)
    return bool(last) and last[-1]["kind"] == "finished"


def step_of_end(run: RunFolder) -> int | None:
    """The step whose weights a finished run has left, where that is not its last (`load_best_at_end`)."""
    _, last = first_and_last_events(run.events)
    step = last[-1].get("ends_with") if last and last[-1]["kind"] == "finished" else None
    return step if is_step(step) else None


def first_and_last_events(path: Path) -> tuple[list[Event], list[Event]]:
    """(events of the first TAIL_BYTES of an event log, events of its last TAIL_BYTES or of more until they include a `step`).

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
    """Events at the end of the first `size` bytes of an event log: of TAIL_BYTES, or of more until they include a `step`."""
    reach = TAIL_BYTES
    last = _tail(file, size, reach)
    while reach < size and not any(event["kind"] == "step" for event in last):
        reach *= 4
        last = _tail(file, size, reach)
    return last


def _tail(file: BinaryIO, size: int, reach: int) -> list[Event]:
    """Events of the last `reach` of the first `size` bytes."""
    start = max(0, size - reach)
    file.seek(start)
    tail = file.read(size - start)
    return _events(tail if reach >= size else tail.partition(b"\n")[2])


def _events(data: bytes) -> list[Event]:
    lines = data.rpartition(b"\n")[0].split(b"\n")
    return [event for event in map(parse_line, lines) if event is not None and "kind" in event]


RUN_FORMAT = VERSION
"""That of the event log's lines."""


def check_format(run: RunFolder) -> None:
    """Raise UserError for a run that a newer version of the program has written. Reads only."""
    newest = max(_versions(run), default=RUN_FORMAT)
    if newest > RUN_FORMAT:
        sentence = (
            f"The run {run.name} has format {newest} and this version of GRPO Studio knows formats up to {RUN_FORMAT}; "
            f"update it to go on with the run. Nothing was changed."
        )
        raise UserError("run", sentence)


def _versions(run: RunFolder) -> Iterator[int]:
    for part in first_and_last_events(run.events):
        yield from (v for event in part if (v := _version(event)) is not None)
    for path in [run.changes, *run.checkpoints.glob("[0-9]*/state.json")]:
        if (v := _version(_json(path))) is not None:
            yield v


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none: what is damaged is told where it is needed."""
    try:
        content = read_json(path, "run")
    except UserError:
        return {}
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}


def _version(content: dict[str, Any]) -> int | None:
    value = content.get("v")
    return value if isinstance(value, int) and not isinstance(value, bool) else None
