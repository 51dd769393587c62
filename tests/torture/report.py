"""What a torture says while it runs: how far it is, and each failure with the command that repeats it alone."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

EVERY_S = 30.0
"""Seconds between two lines of progress."""


class Report:
    """Counts the cases and failures of one torture."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cases = 0
        self.failures = 0
        self._told = time.monotonic()

    def passed(self) -> None:
        self.cases += 1
        if time.monotonic() - self._told > EVERY_S:
            self._told = time.monotonic()
            print(f"   {self.cases:,} cases, {self.failures:,} failures", flush=True)

    def failed(self, seed: int, what: str, details: str = "") -> None:
        """A case has failed: `seed` is the one with which it is the first case, `what` a line, `details` what it printed."""
        self.failures += 1
        print(f"   FAILED {what}\n     python -m tests.torture {self.name} --count 1 --seed {seed}", flush=True)
        for line in details.splitlines():
            print(f"     | {line}", flush=True)
        self.passed()

    def ended(self, seed: int, wrong: str) -> None:
        """A case has ended: `wrong` is "" where all is well, else a text whose last line says what went wrong."""
        if wrong:
            self.failed(seed, wrong.strip().splitlines()[-1][:300], wrong)
        else:
            self.passed()


def run_cases(name: str, case: Callable[[int, Path], str], seeds: Iterable[int]) -> int:
    """Run `case(seed, folder)` for each seed and print the seconds of CPU that the slowest took; returns how many failed."""
    report, slowest = Report(name), 0.0
    with tempfile.TemporaryDirectory(prefix=f"torture-{name}-") as folder:
        for seed in seeds:
            began = time.process_time()
            report.ended(seed, case(seed, Path(folder)))
            slowest = max(slowest, time.process_time() - began)
    print(f"   slowest case {slowest:.2f} s", flush=True)
    return report.failures
