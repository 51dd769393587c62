"""How a run ended: finished, stopped on request, or failed, with the sentence and the exit code that go with it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass

from backend.run.control import Stopped
from backend.spec.faults import Mistake


@dataclass(frozen=True, slots=True)
class Ending:
    """The diary's last kind, the step the run reached, a sentence, and the traceback of a bug."""

    kind: str
    step: int
    sentence: str
    exit_code: int
    traceback: str = ""


def ending_of(work: Callable[[], Ending], last_step: Callable[[], int]) -> Ending:
    """Call `work` and turn its exception into an Ending: a requested stop, a fault the user can mend, or a bug.

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
        traceback.print_exc()
        # Inside the handler: after it there is no exception to format, and the report would read "NoneType: None".
        return Ending("failed", last_step(), f"{type(error).__name__}: {error}", 1, traceback.format_exc())
