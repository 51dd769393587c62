"""Break it on purpose, and count what is lost: kills, failing disks, hostile input.

    python -m tests.torture                                    everything at its full size: `make torture`
    python -m tests.torture kills --count 20 --seed 7          one torture, smaller
    python -m tests.torture --list

A torture is a module of this package that TORTURES names, with `main(count, seed) -> int`: it tries `count` cases (0: every case, where
they can be counted), tells each failure through `tests.torture.report`, and returns how many failed. Case number i of seed S is
case 0 of seed S + i, so that every failure is repeated alone with `--count 1`. A small sample of each runs with the suite.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Torture:
    """What `make torture` runs."""

    about: str
    count: int
    """Cases at full size; 0: every one."""


TORTURES: dict[str, Torture] = {
    "kills": Torture(
        "runs, sweeps, exports and clones killed at random moments and gone on with, compared bit for bit", 200
    ),
    "run_folders": Torture(
        "files of run folders broken, and read by the window's models, the readers and the verbs", 20_000
    ),
    "syscalls": Torture("every system call of saves and of a run's end fails in turn, in six ways", 0),
    "datasets": Torture("hostile datasets, given to `check`, a run and the Dataset page", 50_000),
    "configs": Torture("hostile configurations, given to everything that reads one", 100_000),
}
"""Name, which is that of the module too → what it is."""


@dataclass(frozen=True, slots=True)
class Result:
    """How one torture went."""

    name: str
    cases: int
    failures: int
    seconds: float
    cpu_seconds: float

    def row(self) -> str:
        cases = f"{self.cases:,}" if self.cases else "all"
        return f"{self.name:<12} {cases:>9} {self.failures:>9,} {self.seconds:>9,.0f} {self.cpu_seconds:>9,.0f}"


HEADER = f"{'':<12} {'cases':>9} {'failures':>9} {'seconds':>9} {'CPU s':>9}"


def run(name: str, count: int, seed: int) -> Result:
    """Run one torture in this process; an exception of its own counts as a failure."""
    began, cpu_began = time.monotonic(), _cpu_seconds()
    try:
        failures = importlib.import_module(f"tests.torture.{name}").main(count, seed)
    except Exception:
        traceback.print_exc()
        failures = 1
    return Result(name, count, failures, time.monotonic() - began, _cpu_seconds() - cpu_began)


def _cpu_seconds() -> float:
    """Of this process and of every child that has ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="?", choices=sorted(TORTURES), help="one torture; without it all of them")
    parser.add_argument("--count", type=int, help="cases; 0 for every one; its full size by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="what there is, at which size")
    options = parser.parse_args(arguments)
    if options.list:
        for name, torture in TORTURES.items():
            print(f"{name:<12} {f'{torture.count:,}' if torture.count else 'all':>9}  {torture.about}")
        return 0
    results: list[Result] = []
    for name in [options.name] if options.name else TORTURES:
        count = TORTURES[name].count if options.count is None else options.count
        print(f"── {name}: {TORTURES[name].about}", flush=True)
        results.append(run(name, count, options.seed))
    print("\n".join(["", HEADER, *(result.row() for result in results)]), flush=True)
    return 1 if any(result.failures for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
