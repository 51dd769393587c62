"""Seconds and peak memory of a step, by phase, and what it used of the machine. Measures; decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx

from backend.run.machine.resource_use import ResourceUse

TIMED_PHASES = ("rollout", "reward", "train")
"""Phases of a step; the rest of its time is `time/other`."""


class StepTimer:
    """Times one step, from its construction. `clock` returns seconds; it may stop while the run is paused."""

    def __init__(self, clock: Callable[[], float], use: ResourceUse | None = None) -> None:
        self._clock = clock
        self._use = use or ResourceUse()
        self._use.begin()
        self._began = clock()
        self.seconds: dict[str, float] = dict.fromkeys(TIMED_PHASES, 0.0)
        self._peaks: dict[str, int] = {}
        mx.reset_peak_memory()

    def of_next_step(self) -> StepTimer:
        """A timer of the step that begins now, in the same process."""
        return StepTimer(self._clock, self._use)

    def close(self) -> None:
        """Read nothing more of the machine."""
        self._use.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's time and peak memory to this phase; a phase may have several blocks."""
        began = self._clock()
        self._record_peak("other")
        try:
            yield
        finally:
            self._record_peak(name)
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - began

    def count_as(self, name: str, seconds: float) -> None:
        """Count seconds of the rollout to another phase, which went on within it."""
        self.seconds[name] += seconds
        self.seconds["rollout"] -= seconds

    def _record_peak(self, name: str) -> None:
        """Count the peak since the last call to this phase. MLX has one counter of the peak, so each change of phase reads
        and resets it."""
        self._peaks[name] = max(self._peaks.get(name, 0), mx.get_peak_memory())
        mx.reset_peak_memory()

    def elapsed(self) -> float:
        """Seconds of the step so far."""
        return self._clock() - self._began

    def rate(self, count: float, name: str) -> float:
        """`count` per second of a phase."""
        return count / max(self.seconds[name], 1e-9)

    def metrics(self) -> dict[str, float]:
        """The metrics of `ResourceUse`; `time/<phase>` in seconds (the phases and `time/other` add up to `time/step`), and
        `peak_memory_gb` of the step, of its rollout and of its training."""
        self._record_peak("other")
        elapsed = self.elapsed()
        times = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        other = elapsed - sum(self.seconds[name] for name in TIMED_PHASES)
        peaks = {f"peak_memory_gb/{name}": self._peaks.get(name, 0) / 1e9 for name in ("rollout", "train")}
        return self._use.metrics(elapsed) | times | peaks | {
            "time/other": other, "time/step": elapsed, "peak_memory_gb": max(self._peaks.values()) / 1e9,
        }  # fmt: skip
