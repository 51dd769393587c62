"""How a run ended: finished, stopped on request, or failed, with the sentence and the exit code that go with it.

After a GPU error a process may end without the run: then the kind is RESTART, and the run continues in the next
process.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from backend.distributed.ranks import LostRankError, WorkerError
from backend.runs.events import EventLog
from backend.trainer.control import Stopped
from backend.trainer.machine import GpuError, gpu_error
from backend.utils.disk_faults import DiskError, fault_of
from backend.utils.errors import UserError

RESTART = "restart"
"""The kind of an ending after which the run continues in another process."""

LAST_LINE_RETRY_S = 2.0
"""How long writing the event log's last line is retried on a full disk."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The event log's last kind, the step that the run reached, a sentence and an exit code."""

    kind: str
    step: int
    sentence: str
    exit_code: int
    traceback: str = ""
    """Of a bug."""
    reason: str = ""
    """Of a run that finished early: "stop_when" or "early_stopping"."""
    ends_with: int | None = None
    """The step whose weights a finished run leaves, where that is not its last."""
    gpu_error: GpuError | None = None
    gpu_text: str = ""
    """mlx's own text."""
    lost_rank: int | None = None
    """The rank of the machine without which the run could not continue."""


def ending_of(work: Callable[[], Ending], last_step: Callable[[], int]) -> Ending:
    """Call `work` and turn its exception into an Ending: a requested stop, a UserError, a GPU error, or a bug.

    `last_step` is called afterwards, and returns the last step finished by then.
    """
    try:
        return work()
    except Stopped as stop:
        step = last_step()
        return Ending("stopped", step, f"Stopped at step {step} because {stop}; everything is saved.", 3)
    except LostRankError as lost:
        return Ending("failed", last_step(), str(lost), 2, lost_rank=lost.rank)
    except WorkerError as fault:  # as if it had gone wrong here, but with the machine's name
        gpu = gpu_error(RuntimeError(fault.gpu_text)) if fault.gpu_text else None
        return Ending(
            "failed",
            last_step(),
            str(fault),
            fault.exit_code,
            fault.traceback,
            gpu_error=replace(gpu, happened=f"{fault.place}: {gpu.happened}") if gpu is not None else None,
            gpu_text=fault.gpu_text,
        )
    except UserError as error:
        if error.traceback:
            write = getattr(sys.stderr, "write_to_log", sys.stderr.write)  # a terminal gets the sentence alone
            write(error.traceback)
        return Ending("failed", last_step(), str(error), 2)
    except Exception as error:
        if (gpu := gpu_error(error)) is not None:
            # For log.txt. Without a traceback: where in our code mlx noticed the error says nothing.
            traceback.print_exception(error, limit=0)
            sentence = f"{gpu.happened} {gpu.advice}"
            return Ending("failed", last_step(), sentence, 2, gpu_error=gpu, gpu_text=str(error))
        if (fault := fault_of(error)) is not None:  # of the disk, from code that is not ours
            return Ending("failed", last_step(), str(fault), 2)
        traceback.print_exc()
        return Ending("failed", last_step(), f"{type(error).__name__}: {error}", 1, traceback.format_exc())


def write_ending(event_log: EventLog, ending: Ending) -> Ending:
    """Write the event log's last line. → the ending; a failure if that line could not be written in
    LAST_LINE_RETRY_S seconds, whose sentence is for stderr alone: to its readers the run has crashed, and is resumed
    as such."""
    event: dict[str, Any] = {"step": ending.step, "reason": ending.reason or ending.kind, "sentence": ending.sentence}
    if ending.ends_with is not None:
        event["ends_with"] = ending.ends_with
    if ending.lost_rank is not None:
        event["lost_rank"] = ending.lost_rank
    if ending.traceback:
        event["traceback"] = ending.traceback
    before, until = event_log.seq, time.monotonic() + LAST_LINE_RETRY_S
    while True:
        try:
            event_log.write(ending.kind, **event)
        except DiskError as fault:
            if event_log.seq != before or time.monotonic() > until:  # written, and its echo failed; or no more time
                return after_fault(ending, fault)
            time.sleep(LAST_LINE_RETRY_S / 10)
        else:
            fault = event_log.take_echo_error()
            return after_fault(ending, fault) if fault else ending


def after_fault(ending: Ending, fault: DiskError) -> Ending:
    """The failure that an ending becomes where the disk is full; its own sentence comes first, unless the run went
    well."""
    went_well = ending.exit_code in (0, 3)
    told = str(fault) in ending.sentence
    sentence = str(fault) if went_well else ending.sentence if told else f"{ending.sentence} {fault}"
    return replace(ending, kind="failed", exit_code=2 if went_well else ending.exit_code, sentence=sentence)
