"""The stopwatch inside a worker: waits to be asked for a step, times its phases, says what they took.

CPU seconds are those of the whole process, all threads; peaks are mlx's, weights included.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, TextIO


class Stopwatch:
    """`begin` a step, end each phase with `lap`, end the step with `done`."""

    def __init__(self, ask: TextIO, tell: TextIO) -> None:
        self.ask, self.tell = ask, tell
        self.phases: dict[str, dict[str, float]] = {}
        self._mark = (0.0, 0.0)

    def say(self, **what: Any) -> None:
        self.tell.write(json.dumps(what) + "\n")
        self.tell.flush()

    def steps(self) -> Iterator[int]:
        """0, 1, …: one for each step that is asked for."""
        number = 0
        while True:
            self.begin()
            yield number
            number += 1

    def begin(self) -> None:
        """Wait until a step is asked for; no more of them ends the process."""
        if not self.ask.readline():
            raise SystemExit
        self.begin_again()

    def begin_again(self) -> None:
        """What was done so far in this step does not count."""
        import mlx.core as mx

        self.phases = {}
        mx.reset_peak_memory()
        self._mark = (time.process_time(), time.perf_counter())

    def lap(self, phase: str) -> None:
        """What happened since the last mark was `phase`; a phase may come in several pieces."""
        import mlx.core as mx

        mx.synchronize()
        cpu, wall = time.process_time(), time.perf_counter()
        so_far = self.phases.setdefault(phase, {"s": 0.0, "wall": 0.0, "peak": 0.0})
        so_far["s"] += cpu - self._mark[0]
        so_far["wall"] += wall - self._mark[1]
        so_far["peak"] = max(so_far["peak"], mx.get_peak_memory() / 1e6)
        mx.reset_peak_memory()
        self._mark = (time.process_time(), time.perf_counter())

    def done(self, tokens: int, **more: float) -> None:
        """Say what the step took: seconds by phase and whole, peaks in megabytes, completion `tokens`, and `more`."""
        told: dict[str, float] = {"tokens": tokens}
        for phase, took in self.phases.items():
            told |= {f"{phase}_s": took["s"], f"{phase}_wall": took["wall"], f"peak_{phase}": took["peak"]}
        told["step_s"] = sum(took["s"] for took in self.phases.values())
        told["step_wall"] = sum(took["wall"] for took in self.phases.values())
        told["peak"] = max(took["peak"] for took in self.phases.values())
        self.say(**told, **more)
