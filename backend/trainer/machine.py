"""A run and the machine under it: GPU errors and the smaller steps after them, sleep, heat and Low Power Mode. After a
GPU error Metal refuses the process's work, so the run continues in a new process, with half the micro-batch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import takewhile

from backend.config.config import Config
from backend.runs.events import JsonLines, read_events
from backend.runs.run_folder import RunFolder
from backend.utils.errors import UserError
from backend.utils.machine import printed_by

GPU_TIMEOUT_VARIABLE = "AGX_RELAX_CDM_CTXSTORE_TIMEOUT"
"""Makes macOS wait longer before it stops the GPU's work in favour of the display (mlx#3267)."""


def relax_gpu_timeout(config: Config) -> None:
    """Set the variable on a Mac if the settings say so, before mlx is imported: the driver reads it as Metal starts."""
    if sys.platform == "darwin" and config.relax_gpu_timeout:
        os.environ.setdefault(GPU_TIMEOUT_VARIABLE, "1")


@dataclass(frozen=True, slots=True)
class GpuError:
    """A kind of GPU error. `is_memory`: less memory would have avoided it."""

    kind: str
    happened: str
    advice: str
    is_memory: bool = False


INTERACTIVITY = GpuError(
    "interactivity",
    "macOS stopped the GPU's work because it held up the display (Impacting Interactivity).",
    "Letting the display sleep helps, and so do fewer other windows, a smaller Batch, and Relax GPU timeout.",
)
MEMORY = GpuError(
    "memory",
    "There was not enough memory for the arrays of a step.",
    "Closing other programs helps, and so do Gradient checkpointing, a lower Memory limit, a shorter Completion and a "
    "smaller Group.",
    is_memory=True,
)
BUFFERS = GpuError(
    "buffers",
    "The process held more GPU buffers than macOS allows.",
    "A new process begins with none; should it happen often, please report it with the model's name.",
)
TIMEOUT = GpuError(
    "timeout",
    "A piece of the GPU's work took longer than macOS allows.",
    "Closing other programs that use the GPU helps, and so do a smaller Batch and a shorter Completion.",
)
DISCARDED = GpuError(
    "discarded",
    "macOS discarded the GPU's work after an earlier GPU error, of this program or of another one.",
    "Closing other programs that use the GPU helps.",
)
OTHER = GpuError(
    "other",
    "The GPU could not carry out its work.",
    "log.txt has Metal's own words. Closing other programs that use the GPU may help.",
)

_COMMAND_BUFFER = r"\[METAL\] Command buffer execution failed: .*"

# The first that matches at the start of the text counts.
_PATTERNS = (
    (_COMMAND_BUFFER + r"Impacting ?Interactivity", INTERACTIVITY),
    (_COMMAND_BUFFER + r"(Insufficient Memory|ErrorOutOfMemory)", MEMORY),
    (_COMMAND_BUFFER + r"(GPU (Timeout|Hang) Error|CallbackErrorTimeout|CallbackErrorHang)", TIMEOUT),
    (_COMMAND_BUFFER + r"(InnocentVictim|Innocent Victim|victim of GPU error)", DISCARDED),
    (_COMMAND_BUFFER + r"(SubmissionsIgnored|Ignored \(for causing)", DISCARDED),
    (_COMMAND_BUFFER, OTHER),
    (r"\[metal::malloc\] Resource limit \(\d+\) exceeded", BUFFERS),
    (r"\[metal::malloc\] Attempting to allocate \d+ bytes", MEMORY),
    (r"\[malloc(_async)?\] Unable to allocate \d+ bytes", MEMORY),
    (r"cu\w+(\(.*\))? failed: out of memory", MEMORY),
)


def gpu_error(error: BaseException) -> GpuError | None:
    """The kind of GPU error that mlx has raised, or MEMORY for any lack of memory; None for everything else."""
    if isinstance(error, MemoryError):  # of Python, of numpy, or mlx's std::bad_alloc: the same helps
        return MEMORY
    if type(error) is not RuntimeError:  # what nanobind makes of std::runtime_error; mlx raises no subclass
        return None
    return next((kind for pattern, kind in _PATTERNS if re.match(pattern, str(error), re.DOTALL)), None)


def fault_of_gpu(error: BaseException) -> UserError | None:
    """A GPU error as a UserError, outside of a run. None for what may be a bug."""
    kind = gpu_error(error)
    if kind is None:
        return None
    if kind.is_memory:  # the advice is about the steps of a run
        return UserError("memory_limit", "There was not enough memory. Closing other programs helps.")
    return UserError("gpu", f"{kind.happened} {kind.advice}")


@dataclass(frozen=True, slots=True)
class StepSize:
    """Tokens in a micro-batch, padding included, and completions decoded together. None: the memory plan decides."""

    micro_batch_tokens: int | None = None
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class LoggedError:
    """A GPU error after step `step`. `is_retried`: in a new process, with steps of the size in the last two fields."""

    t: float
    step: int
    kind: str
    text: str
    sentence: str
    is_retried: bool
    micro_batch_tokens: int | None = None
    rows: int | None = None


def _half(size: int | None) -> int | None:
    return None if size is None else max(1, size // 2)


class GpuErrorLog:
    """A run's gpu_errors.jsonl, whose limits later processes keep to."""

    def __init__(self, run: RunFolder) -> None:
        self._path = run.gpu_errors
        self.errors = [LoggedError(**line) for line in read_events(self._path)]

    @property
    def step_size(self) -> StepSize:
        return StepSize(self.errors[-1].micro_batch_tokens, self.errors[-1].rows) if self.errors else StepSize()

    def add(self, error: GpuError, text: str, *, step: int, in_use: StepSize, retries: int) -> LoggedError:
        """Log an error of a process whose steps had the size `in_use`. `retries`: allowed without a finished step."""
        retried = takewhile(lambda earlier: earlier.is_retried and earlier.step >= step, reversed(self.errors))
        done = len([*retried])
        is_retried, size = done < retries, in_use
        if error.kind != BUFFERS.kind:  # half the micro-batch; after a lack of memory half the rows too
            size = StepSize(_half(in_use.micro_batch_tokens), _half(in_use.rows) if error.is_memory else in_use.rows)
        follows = ""
        if is_retried:
            smaller = "" if size == in_use else " with half the micro-batch"
            follows = f"The run goes on in a new process{smaller} (retry {done + 1} of {retries})."
        elif done:
            follows = f"{'One retry' if done == 1 else f'{done} retries'} in a new process did not help."
        sentence = " ".join(filter(None, (error.happened, follows, error.advice)))
        about = {"t": time.time(), "step": step, "kind": error.kind, "text": text, "sentence": sentence}
        logged = LoggedError(**about, is_retried=is_retried, **asdict(size))
        file = JsonLines(self._path)
        file.append(asdict(logged))
        file.sync()
        file.close()
        self.errors.append(logged)
        return logged


class KeepAwake:
    """Keeps a Mac awake while a run works, with `caffeinate`, which is part of macOS."""

    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if sys.platform != "darwin" or self._process is not None:
            return
        # -i holds off idle sleep, -s system sleep on mains power; the display may sleep, which helps the GPU. -w PID
        # ends caffeinate with this process however it ends.
        self._process = subprocess.Popen(
            ["caffeinate", "-is", "-w", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal must not end it while the trainer saves
        )

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait()


SLOWDOWN_EVERY_S = 60.0  # least seconds between two checks; one takes about 20 ms

# Readable without administrator rights. The documented `pmset -g therm` reports nothing on Apple silicon.
THERMAL_LEVEL = ("/usr/bin/notifyutil", "-g", "com.apple.system.thermalpressurelevel")
POWER_SETTINGS = ("/usr/bin/pmset", "-g")

HOT = 2  # level of thermal pressure from which macOS slows the machine down markedly

IS_HOT = "macOS slows the machine down because it is hot: steps take longer. Air, a cooler room or a stand help."
IS_COOL = "The machine has cooled down; macOS no longer slows it."
LOW_POWER = (
    "Low Power Mode is on: macOS slows the machine down, and steps take longer. System Settings, Battery, turns it off."
)
FULL_POWER = "Low Power Mode is off."


@dataclass(slots=True)
class SlowdownWatch:
    """`look` between two steps: calls `note` when a Mac begins or ends to be slowed down."""

    note: Callable[[str], None]
    _next: float = 0.0
    _is_hot: bool = False
    _is_low_power: bool = False

    def look(self) -> None:
        if sys.platform != "darwin" or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + SLOWDOWN_EVERY_S
        # 0 nominal to 4 sleeping (libkern/OSThermalNotification.h).
        level = re.match(r"com\.apple\.system\.thermalpressurelevel\s+(\d+)\s*$", printed_by(THERMAL_LEVEL))
        # None on a desktop Mac.
        modes = re.findall(r"^\s*(?:lowpowermode|powermode)\s+(\d+)\s*$", printed_by(POWER_SETTINGS), re.MULTILINE)
        # Cool only at 0: between 1 and 2 the level fluctuates under a steady load.
        if level is not None and (level[1] == "0" if self._is_hot else int(level[1]) >= HOT):
            self._is_hot = not self._is_hot
            self.note(IS_HOT if self._is_hot else IS_COOL)
        if modes and ("1" in modes) != self._is_low_power:
            self._is_low_power = not self._is_low_power
            self.note(LOW_POWER if self._is_low_power else FULL_POWER)
