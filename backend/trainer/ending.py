"""How a run ended: finished, stopped on request, or failed. After a GPU error the kind is RESTART, and the run
continues in the next process."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace

from backend.distributed.ranks import LostRankError, WorkerError
from backend.runs.checkpoint import Damaged, DamagedCheckpoint
from backend.runs.events import EventLog
from backend.trainer.control import Stopped
from backend.trainer.machine import GpuError, gpu_error
from backend.utils.disk import DiskError, fault_of
from backend.utils.errors import UserError

RESTART = "restart"


@dataclass(frozen=True, slots=True)
class Ending:
    """The event log's last kind, the step that the run reached, a sentence and an exit code.

    `reason` of a run that finished early: "stop_when" or "early_stopping". `ends_with`: the step whose weights a
    finished run leaves, where that is not its last. `gpu_text`: mlx's own text. `lost_rank`: the machine without which
    the run could not continue. `damaged`: the checkpoint that could not be loaded.
    """

    kind: str
    step: int
    sentence: str
    exit_code: int
    traceback: str = ""
    reason: str = ""
    ends_with: int | None = None
    gpu_error: GpuError | None = None
    gpu_text: str = ""
    lost_rank: int | None = None
    damaged: Damaged | None = None


def ending_of(work: Callable[[], Ending], last_step: Callable[[], int]) -> Ending:
    """Call `work` and turn its exception into an Ending. `last_step` is called afterwards, and returns the last
    finished step."""

    def failed(error: object, exit_code: int = 2) -> Ending:
        return Ending("failed", last_step(), str(error), exit_code)

    try:
        return work()
    except Stopped as stop:
        step = last_step()
        return Ending("stopped", step, f"Stopped at step {step} because {stop}; everything is saved.", 3)
    except LostRankError as lost:
        return replace(failed(lost), lost_rank=lost.rank)
    except WorkerError as error:  # as if it had gone wrong here, but with the machine's name
        gpu = gpu_error(RuntimeError(error.gpu_text)) if error.gpu_text else None
        gpu = gpu and replace(gpu, happened=f"{error.place}: {gpu.happened}")
        ending = failed(error, error.exit_code)
        return replace(ending, traceback=error.traceback, gpu_error=gpu, gpu_text=error.gpu_text)
    except DamagedCheckpoint as error:
        return replace(failed(error), damaged=error.damaged)
    except UserError as error:
        if error.traceback:
            write = getattr(sys.stderr, "write_to_log", sys.stderr.write)  # a terminal gets the sentence alone
            write(error.traceback)
        return failed(error)
    except Exception as error:
        if (gpu := gpu_error(error)) is not None:
            # For log.txt. Without a traceback: where in our code mlx noticed the error says nothing.
            traceback.print_exception(error, limit=0)
            return replace(failed(f"{gpu.happened} {gpu.advice}"), gpu_error=gpu, gpu_text=str(error))
        if (disk := fault_of(error)) is not None:  # from code that is not ours
            return failed(disk)
        traceback.print_exc()
        return replace(failed(f"{type(error).__name__}: {error}", 1), traceback=traceback.format_exc())


def write_ending(event_log: EventLog, ending: Ending) -> Ending:
    """Write the event log's last line. → the ending; a failure if the line could not be written: then the run counts
    as crashed."""
    event = {"step": ending.step, "reason": ending.reason or ending.kind, "sentence": ending.sentence}
    extra = {"ends_with": ending.ends_with, "lost_rank": ending.lost_rank, "traceback": ending.traceback or None}
    event |= {name: value for name, value in extra.items() if value is not None}
    try:
        event_log.write(ending.kind, **event)
    except DiskError as error:
        return after_fault(ending, error)
    error = event_log.take_echo_error()
    return after_fault(ending, error) if error else ending


def after_fault(ending: Ending, error: DiskError) -> Ending:
    """The failure that an ending becomes where the disk is full."""
    if ending.exit_code in (0, 3):
        return replace(ending, kind="failed", exit_code=2, sentence=str(error))
    sentence = ending.sentence if str(error) in ending.sentence else f"{ending.sentence} {error}"
    return replace(ending, kind="failed", sentence=sentence)
