"""The verb itself: takes the tasks, shows a line for each outcome, keeps the file whole, prints the tables at the end."""

from __future__ import annotations

import contextlib
from datetime import date
from pathlib import Path
from typing import Literal

from rich.console import Console

from backend.bench import about, plan, report
from backend.bench.runner import GRACE_S, ModelProcesses, TaskTaker, TimedRun
from backend.bench.schema import BenchSettings, DeviceFile, Machine, Outcome, Task
from backend.run.machine.keep_awake import KeepAwake
from backend.spec.config import Config

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
