"""The name of this machine's processor, as measurements state it."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path


def processor() -> str:
    """The processor's own name, as the system tells it."""
    if platform.system() == "Darwin":
        asked = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
        return asked.stdout.strip() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())
