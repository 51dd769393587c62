"""The verb itself: takes the tasks, shows a line for each outcome, keeps the file whole, prints the tables at the end."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Literal, Protocol

from pydantic import TypeAdapter
from rich.console import Console

from backend.bench import about, child, plan, report
from backend.bench.schema import BenchSettings, DeviceFile, Ended, Machine, Numbers, Outcome, Task
from backend.config.config import Config
from backend.trainer.machine import KeepAwake
from backend.utils.child_process import ChildEnded, ChildProcess, ChildTimeout, describe_exit, module_command
from backend.utils.command import backend_environment

# Runs the tasks within a time limit: a child process for each model, an outcome for every task that was begun.

GRACE_S = 2.0
"""How long a child may take to end by itself."""
PATIENCE, LEAST_PATIENCE_S = 8, 90.0
"""A task is killed after so many times its allowance, or so many seconds: its first run traces and compiles."""

NUMBERS: TypeAdapter[Numbers] = TypeAdapter(Numbers)

Clock = Callable[[], float]


class Unmeasured(Exception):
    """A task has no numbers; the message is a sentence that says why."""


class TaskTaker(Protocol):
    def take(self, task: Task, allowance_s: float, timeout_s: float) -> Numbers:
        """Raises Unmeasured."""
        ...

    def stop(self) -> None: ...


class ModelProcesses:
    """Asks a child process, which makes the model of its first task; a task on another model gets another child."""

    def __init__(self, command: Sequence[str] | None = None) -> None:
        # In a session of its own, as ChildProcess has it: Ctrl-C reaches this process alone, which stops the child.
        self._child = ChildProcess(
            command or module_command("backend.bench.child", child.VERB), grace_s=GRACE_S,
            environment=backend_environment() | {"HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        self._model = ""

    def take(self, task: Task, allowance_s: float, timeout_s: float) -> Numbers:
        if task.model_name != self._model:
            self.stop()
            self._model = task.model_name
        try:
            reply = self._child.request({"task": task.model_dump(), "allowance_s": allowance_s}, timeout_s)
        except ChildEnded as ended:
            raise Unmeasured(last_words(ended)) from None
        except ChildTimeout:
            raise Unmeasured(f"It was not done after {timeout_s:.0f} seconds.") from None
        if "error" not in reply:
            return NUMBERS.validate_python(reply["numbers"])
        if not reply["is_usable"]:
            self.stop()
        raise Unmeasured(impersonal(reply["error"]))

    def stop(self) -> None:
        self._child.stop()


def last_words(ended: ChildEnded) -> str:
    """How the child ended, and the last line of its stderr."""
    last_line = (ended.stderr.splitlines() or [""])[-1].strip().rstrip(".")
    how = f"The process ended with {describe_exit(ended.exit_code)}"
    return impersonal(f"{how}: {last_line}." if last_line else f"{how}.")


def impersonal(sentence: str) -> str:
    """Without the paths of this machine, which hold its user's name."""
    return re.sub(r"(~|/[\w.+-]+)(/[\w.+@-]*\w)+/?", "…", sentence.replace(str(Path.home()), "~"))


@dataclass(slots=True)
class TimedRun:
    """The tasks of one bench, taken in turn within `limit_s`. What it holds is whole after every task."""

    tasks: Sequence[Task]
    limit_s: float
    clock: Clock = time.monotonic
    outcomes: list[Outcome] = field(default_factory=list)
    ended: Ended = "interrupted"
    """"interrupted" until it has ended otherwise."""
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.began

    @property
    def unmeasured(self) -> Sequence[Task]:
        return self.tasks[len(self.outcomes) :]

    def run(self, taker: TaskTaker, starting: Callable[[Task], None], finished: Callable[[Outcome], None]) -> None:
        """Take the tasks in their order until the time is up or Ctrl-C is pressed."""
        try:
            while self.unmeasured and self.elapsed_s < self.limit_s:
                starting(self.unmeasured[0])
                outcome = self._outcome(taker, self.unmeasured[0])
                if outcome.error and self.elapsed_s >= self.limit_s:
                    break  # stopped by the end of the time, so it says nothing about the task
                self.outcomes.append(outcome)
                finished(outcome)
            self.ended = "out of time" if self.unmeasured else "finished"
        except KeyboardInterrupt:
            self.ended = "interrupted"
        finally:
            taker.stop()

    def _outcome(self, taker: TaskTaker, task: Task) -> Outcome:
        at_s, left_s = self.elapsed_s, self.limit_s - self.elapsed_s
        allowance_s = left_s / len(self.unmeasured)
        timeout_s = min(left_s, max(LEAST_PATIENCE_S, PATIENCE * allowance_s))
        numbers, error = None, ""
        try:
            numbers = taker.take(task, allowance_s, timeout_s)
        except Unmeasured as reason:
            error = str(reason)
        return Outcome(task=task, at_s=at_s, took_s=self.elapsed_s - at_s, numbers=numbers, error=error)


# ── command ──────────────────────────────────────────────────────────────────────────────────────────────────────────

SEND = (
    "Please attach it to an issue of the project: it holds the chip, versions and these numbers, and nothing of yours."
)


def bench_device(
    minutes: float, scale: plan.Scale, device: Machine, folder: Path, taker: TaskTaker | None = None
) -> tuple[DeviceFile, Path]:
    """Measure, and write device-<chip>-<date>.json into `folder` after every task."""
    console = Console()
    timed_run = TimedRun(plan.tasks(scale), 60 * minutes - GRACE_S)

    clock: Literal["wall", "CPU"] = "wall" if device.computes_on == "gpu" else "CPU"
    settings = BenchSettings(minutes=minutes, scale=scale.name, sampling=_sampling_in_words(), clock=clock)

    def file() -> DeviceFile:
        return DeviceFile(
            date=date.today().isoformat(), machine=device, versions=about.versions(),
            settings=settings,
            ended=timed_run.ended, took_s=timed_run.elapsed_s, outcomes=timed_run.outcomes,
            unmeasured=[f"{task.model_name}: {task.title}" for task in timed_run.unmeasured],
        )  # fmt: skip

    path = folder / file().file_name
    awake = KeepAwake(console.print)
    with contextlib.ExitStack() as held:
        status = held.enter_context(console.status(""))
        held.callback(awake.stop)
        awake.start()

        def starting(task: Task) -> None:
            minutes_left = (timed_run.limit_s - timed_run.elapsed_s) / 60
            status.update(f"{task.model_name}: {task.title} … ({minutes_left:.1f} minutes left)")

        def finished(outcome: Outcome) -> None:
            console.print(report.line(outcome), highlight=False, markup=False, soft_wrap=True)
            file().write(path)

        timed_run.run(taker or ModelProcesses(), starting, finished)
    result = file()
    result.write(path)
    return result, path


def _sampling_in_words() -> str:
    config = Config()
    return f"temperature {config.temperature:g}; default filters: top-k {config.top_k}, top-p {config.top_p:g}"
