"""The words for the processes that the check of several machines starts on each of them, and what these have in common."""

from __future__ import annotations

import os
import threading

PROBE, LINK, RECEIVE = "machine-probe", "machine-link", "machine-receive"
MARKER = "grpo-studio "
"""What their lines begin with: a shell's startup files may write to the same stream."""


def end_after(seconds: float) -> None:
    """End this process then, whatever it is doing."""
    timer = threading.Timer(seconds, os._exit, [1])
    timer.daemon = True
    timer.start()
