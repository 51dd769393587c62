"""Commands of the operating system that tell something of the machine."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

READ_S = 2.0
"""Seconds that a command may take."""


def printed_by(command: Sequence[str]) -> str:
    """What a command prints; "" where it fails."""
    try:
        # Without close_fds Python uses posix_spawn, which copies nothing of a process with gigabytes of memory.
        return subprocess.run(command, capture_output=True, text=True, timeout=READ_S, close_fds=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
