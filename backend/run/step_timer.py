"""What a step costs: seconds and peak memory, by phase. Measures; decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx

PARTS = ("rollout", "reward", "train")
"""Phases that add up to the step; what is left of it is called other."""


class StepTimer:
    """One step, from when this is made. `clock` gives seconds; it may stand still while the run is paused."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._peaks: dict[str, int] = {}
        mx.reset_peak_memory()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time and memory of what is done inside belong to this phase, which may come more than once."""
        began = self._clock()
        self._close("other")
        try:
            yield
        finally:
            self._close(name)
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - began

    def _close(self, name: str) -> None:
        """The peak since the last call was of this phase."""
        self._peaks[name] = max(self._peaks.get(name, 0), mx.get_peak_memory())
        mx.reset_peak_memory()

    def elapsed(self) -> float:
        """Seconds of the step so far."""
        return self._clock() - self._began

    def speed(self, count: float, name: str) -> float:
        """`count` by the seconds of a phase."""
        return count / max(self.seconds[name], 1e-9)

    def metrics(self) -> dict[str, float]:
        """`time/<phase>` in seconds: the three parts and `time/other` add up to `time/step`. `peak_memory_gb`, of the whole
        step and of sampling and learning."""
        self._close("other")
        whole = self.elapsed()
        told = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        other = whole - sum(self.seconds[name] for name in PARTS)
        peaks = {f"peak_memory_gb/{name}": self._peaks.get(name, 0) / 1e9 for name in ("rollout", "train")}
        return told | peaks | {
            "time/other": other, "time/step": whole, "peak_memory_gb": max(self._peaks.values()) / 1e9,
        }  # fmt: skip
