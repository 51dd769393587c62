"""How a run ended: finished, stopped on request, or failed, with the sentence and the exit code that go with it.

After a GPU error a process may end and its run not: then the kind is RESTART, and the same run goes on in the next process.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass

from backend.run.control import Stopped
from backend.run.gpu_errors import GpuError, gpu_error
from backend.spec.faults import Mistake

RESTART = "restart"
"""The kind of an ending that is none of the run's."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The diary's last kind, the step the run reached, a sentence, the traceback of a bug, and the GPU error if it was one."""

    kind: str
    step: int
    sentence: str
    exit_code: int
    traceback: str = ""
    reason: str = ""
    """Of a finished run that was planned to end early: "stop_when" or "early_stopping"."""
    gpu_error: GpuError | None = None
    gpu_text: str = ""
    """mlx's own words for it."""


def ending_of(work: Callable[[], Ending], last_step: Callable[[], int]) -> Ending:
    """Call `work` and turn its exception into an Ending: a requested stop, a fault the user can mend, a GPU error, or a bug.

    `last_step` is called afterwards, and returns the last step finished by then.
    """
    try:
        return work()
    except Stopped as stop:
        step = last_step()
        return Ending("stopped", step, f"Stopped at step {step} because {stop}; everything is saved.", 3)
    except Mistake as mistake:
        return Ending("failed", last_step(), str(mistake), 2)
    except Exception as error:
        if (gpu := gpu_error(error)) is not None:
            # For log.txt. Without a traceback: where in our code mlx noticed the error says nothing.
            traceback.print_exception(error, limit=0)
            sentence = f"{gpu.happened} {gpu.advice}"
            return Ending("failed", last_step(), sentence, 2, gpu_error=gpu, gpu_text=str(error))
        traceback.print_exc()
        # Inside the handler: after it there is no exception to format, and the report would read "NoneType: None".
        return Ending("failed", last_step(), f"{type(error).__name__}: {error}", 1, traceback.format_exc())
