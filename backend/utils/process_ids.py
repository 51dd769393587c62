"""Whether the process of a number is alive: for names of files that their writer has put its number into."""

from __future__ import annotations

import os


def is_alive(pid: int) -> bool:
    """Whether there is a process of this number, whoever's it is by now."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
