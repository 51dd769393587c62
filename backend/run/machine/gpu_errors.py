"""GPU errors: which of mlx's exceptions they are, and a sentence for each on what happened and what helps.

mlx raises every one as a plain RuntimeError, so its text is all there is to go by. Sources of the texts: mlx/backend/metal/device.cpp
and eval.cpp (`[METAL] Command buffer execution failed: ` and then Metal's own description, which ends in
`(0000000e:kIOGPUCommandBufferCallbackError…)`), mlx/backend/metal/allocator.cpp (`[metal::malloc]`, `[malloc]`),
mlx/backend/cuda/utils.cpp and allocator.cpp (`CALL failed: REASON`). Descriptions as seen: mlx#3267 (interactivity), mlx#479 (memory),
mlx#3224, mlx#3390 (how they reach a program).

A command buffer fails after the call that queued it, so mlx raises at a later one: at the next evaluation, or at
`mx.synchronize` (mlx#3523). The trainer therefore synchronises before it counts a step as finished.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from backend.spec.faults import Mistake


@dataclass(frozen=True, slots=True)
class GpuError:
    """A kind of GPU error. `happened` and `advice` are sentences for a person."""

    kind: str
    happened: str
    advice: str
    is_memory: bool = False
    """Whether less memory would have avoided it."""


INTERACTIVITY = GpuError(
    "interactivity",
    "macOS stopped the GPU's work because it held up the display (Impacting Interactivity).",
    "Letting the display sleep helps, and so do closing programs that draw much, a smaller Batch, and Relax GPU timeout.",
)
MEMORY = GpuError(
    "memory",
    "There was not enough memory for the arrays of a step.",
    "Closing other programs helps, and so do Gradient checkpointing, a lower Memory limit, a shorter Completion and a smaller Group.",
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
_PATTERNS = [
    (re.compile(pattern, re.DOTALL), error)
    for pattern, error in (
        (_COMMAND_BUFFER + r"Impacting ?Interactivity", INTERACTIVITY),
        (_COMMAND_BUFFER + r"(Insufficient Memory|ErrorOutOfMemory)", MEMORY),
        (_COMMAND_BUFFER + r"GPU (Timeout|Hang) Error", TIMEOUT),
        (_COMMAND_BUFFER + r"(CallbackErrorTimeout|CallbackErrorHang)", TIMEOUT),
        (_COMMAND_BUFFER + r"(InnocentVictim|Innocent Victim|victim of GPU error)", DISCARDED),
        (_COMMAND_BUFFER + r"(SubmissionsIgnored|Ignored \(for causing)", DISCARDED),
        (_COMMAND_BUFFER, OTHER),
        (r"\[metal::malloc\] Resource limit \(\d+\) exceeded", BUFFERS),
        (r"\[metal::malloc\] Attempting to allocate \d+ bytes", MEMORY),
        (r"\[malloc(_async)?\] Unable to allocate \d+ bytes", MEMORY),
        (r"cu\w+(\(.*\))? failed: out of memory", MEMORY),
    )
]


def gpu_error(error: BaseException) -> GpuError | None:
    """The kind of GPU error that mlx has raised, or want of memory anywhere; None for everything else.

    An exception of a reward function is none, whatever it says: it arrives as a RewardError.
    """
    if isinstance(error, MemoryError):  # of Python, of numpy, or mlx's std::bad_alloc: no GPU's, and the same helps
        return MEMORY
    if type(error) is not RuntimeError:  # what nanobind makes of std::runtime_error; mlx raises no subclass
        return None
    text = str(error)
    return next((kind for pattern, kind in _PATTERNS if pattern.match(text)), None)


def fault_of_gpu(error: BaseException) -> Mistake | None:
    """The same as a fault, for what is no run: a verb, a question of the window. None for what may be a bug."""
    kind = gpu_error(error)
    if kind is None:
        return None
    if kind.is_memory:  # the advice is about the steps of a run
        return Mistake("memory_limit", "There was not enough memory. Closing other programs helps.")
    return Mistake("gpu", f"{kind.happened} {kind.advice}")
