"""The GPU errors of a run, and the smaller steps with which it is taken up again: gpu_errors.jsonl in the run folder.

After a GPU error the process is of no use: Metal refuses the work of one that caused errors before. So the run goes on in a new
process, from its newest checkpoint, with half the micro-batch. The file outlives both: it has the limits that every later process keeps
to, and the sentences that a resume may cut from the diary. Each line is one error; nothing is ever removed.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, fields
from typing import Any

from backend.run.machine.gpu_errors import BUFFERS, GpuError
from backend.spec.events import JsonLines, read_events
from backend.spec.faults import Mistake
from backend.spec.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class StepSize:
    """How much of a step the device computes at once. Where a value is None, the memory plan decides alone."""

    micro_batch_tokens: int | None = None
    """Tokens in a micro-batch, padding included."""
    rows: int | None = None
    """Completions decoded together."""

    def smaller_after(self, error: GpuError) -> StepSize:
        """Half the micro-batch; for want of memory half the rows too. Too many buffers are no matter of size."""
        if error.kind == BUFFERS.kind:
            return self
        rows = _half(self.rows) if error.is_memory else self.rows
        return StepSize(_half(self.micro_batch_tokens), rows)


def _logged_error(line: dict[str, Any]) -> LoggedError:
    known = {field.name for field in fields(LoggedError)}  # a later version may write more
    try:
        return LoggedError(**{key: value for key, value in line.items() if key in known})
    except TypeError as error:
        sentence = (
            "gpu_errors.jsonl in the run folder is damaged; delete it, and steps begin with their usual size again."
        )
        raise Mistake("retry_on_gpu_error", sentence) from error


def _half(size: int | None) -> int | None:
    return None if size is None else max(1, size // 2)


@dataclass(frozen=True, slots=True)
class LoggedError:
    """One GPU error: when (unix seconds), after which finished step, mlx's text, and what was done about it."""

    t: float
    step: int
    kind: str
    text: str
    sentence: str
    """For the diary: what happened, what follows, what helps."""
    is_retried: bool
    """Whether the run went on in a new process. If not, it ended."""
    micro_batch_tokens: int | None = None
    """The size of a step from then on, as `StepSize`."""
    rows: int | None = None


class GpuErrorLog:
    """Reads and appends to a run's gpu_errors.jsonl. One writer: the trainer that holds the run's lock."""

    def __init__(self, run: RunFolder) -> None:
        self._path = run.gpu_errors
        self.errors = [_logged_error(line) for line in read_events(self._path)]

    @property
    def step_size(self) -> StepSize:
        """What the last error has left of a step."""
        return StepSize(self.errors[-1].micro_batch_tokens, self.errors[-1].rows) if self.errors else StepSize()

    def retries_without_progress(self, step: int) -> int:
        """How often in a row the run was taken up again without finishing a step beyond those it had, `step` being its last now.

        A person who resumes a run that ended with a GPU error begins a new row.
        """
        count = 0
        for error in reversed(self.errors):
            if not error.is_retried or error.step < step:
                break
            count += 1
        return count

    def add(self, error: GpuError, text: str, *, step: int, in_use: StepSize, retries: int) -> LoggedError:
        """Log an error after step `step` of a process whose steps had the size `in_use`; decides whether it is retried.

        `retries`: how many without progress are allowed.
        """
        done = self.retries_without_progress(step)
        is_retried = done < retries
        size = in_use.smaller_after(error)
        if is_retried:
            smaller = "" if size == in_use else " with half the micro-batch"
            follows = f"The run goes on in a new process{smaller} (retry {done + 1} of {retries})."
        else:
            follows = f"{_times(done)} in a new process did not help." if done else ""
        logged = LoggedError(
            time.time(), step, error.kind, text, " ".join(filter(None, (error.happened, follows, error.advice))), is_retried,
            size.micro_batch_tokens, size.rows,
        )  # fmt: skip
        self._append(logged)
        return logged

    def _append(self, logged: LoggedError) -> None:
        file = JsonLines(self._path)
        file.append(asdict(logged))
        file.sync()
        file.close()
        self.errors.append(logged)


def _times(count: int) -> str:
    return "One retry" if count == 1 else f"{count} retries"
