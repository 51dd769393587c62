#!/usr/bin/env python3
"""Seconds from starting the frozen window's process until its window is on the screen. Linux with X; needs xdotool.

    DISPLAY=:0 python packaging/cold_start.py ["dist/GRPO Studio"] [TIMES]

Each start has an empty environment and a home folder of its own, as on the first day. The CPU seconds are the process's
own until then: on a busy machine they say more than the wall clock. Xvfb needs -noreset: otherwise it starts anew
whenever its last window goes. "Warm" is the disk's cache; empty it before (as root: echo 3 > /proc/sys/vm/drop_caches)
for the first start after booting.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TITLE = "GRPO Studio"
TIMES = 5


def seconds_to_window(program: Path) -> tuple[float, float]:
    """(wall seconds, CPU seconds of the process) until the window is mapped; the process is ended then."""
    with tempfile.TemporaryDirectory() as home:
        environment = {"HOME": home, "DISPLAY": os.environ["DISPLAY"], "PATH": "/nowhere"}
        began = time.perf_counter()
        process = subprocess.Popen([str(program)], env=environment, stderr=subprocess.DEVNULL)
        try:
            wait = ["xdotool", "search", "--sync", "--onlyvisible", "--name", TITLE]
            subprocess.run(wait, check=True, stdout=subprocess.DEVNULL, timeout=60)
            wall = time.perf_counter() - began
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            return wall, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        finally:
            process.terminate()
            process.wait()


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "dist/GRPO Studio")
    program = folder / "grpo-studio"
    if not program.exists() or "DISPLAY" not in os.environ:
        print(__doc__, file=sys.stderr)
        return 2
    starts = [seconds_to_window(program) for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else TIMES)]
    for wall, cpu in starts:
        print(f"{wall:.2f} s, of which {cpu:.2f} s of CPU")
    print(f"median {statistics.median(wall for wall, _ in starts):.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
