"""The stopwatch inside a contender's process: waits for a request, times the phases of a step, replies with what they
took.

CPU seconds are those of the whole process, all threads; peaks are mlx's, weights included.
"""

import json
import time
from collections.abc import Iterator
from typing import Any, TextIO


class Stopwatch:
    """`begin` a step, end each phase with `lap`, end the step with `done`."""

    def __init__(self, requests: TextIO, replies: TextIO) -> None:
        self.requests, self.replies = requests, replies
        self.phases: dict[str, dict[str, float]] = {}
        self._mark = (0.0, 0.0)

    def reply(self, **values: Any) -> None:
        """One JSON line."""
        self.replies.write(json.dumps(values) + "\n")
        self.replies.flush()

    def steps(self) -> Iterator[int]:
        """0, 1, …: one number for each step that is requested."""
        number = 0
        while True:
            self.begin()
            yield number
            number += 1

    def begin(self) -> None:
        """Wait for a request; the end of the stream ends the process (SystemExit)."""
        if not self.requests.readline():
            raise SystemExit
        self.restart()

    def restart(self) -> None:
        """Restart the step's clock and peak memory: everything before was preparation."""
        import mlx.core as mx

        self.phases = {}
        mx.reset_peak_memory()
        self._mark = (time.process_time(), time.perf_counter())

    def lap(self, phase: str) -> None:
        """Book the time and peak memory since the last lap on `phase`; a phase may have several laps."""
        import mlx.core as mx

        mx.synchronize()
        cpu, wall = time.process_time(), time.perf_counter()
        sums = self.phases.setdefault(phase, {"s": 0.0, "wall": 0.0, "peak": 0.0})
        sums["s"] += cpu - self._mark[0]
        sums["wall"] += wall - self._mark[1]
        sums["peak"] = max(sums["peak"], mx.get_peak_memory() / 1e6)
        mx.reset_peak_memory()
        self._mark = (time.process_time(), time.perf_counter())

    def done(self, tokens: int, **more: float) -> None:
        """Reply with the step: seconds by phase and in total, peaks in megabytes, completion `tokens`, and `more`."""
        measured: dict[str, float] = {"tokens": tokens}
        for phase, took in self.phases.items():
            measured |= {f"{phase}_s": took["s"], f"{phase}_wall": took["wall"], f"peak_{phase}": took["peak"]}
        measured["step_s"] = sum(took["s"] for took in self.phases.values())
        measured["token_s"] = measured["step_s"] / tokens
        measured["step_wall"] = sum(took["wall"] for took in self.phases.values())
        measured["peak"] = max(took["peak"] for took in self.phases.values())
        self.reply(**measured, **more)
