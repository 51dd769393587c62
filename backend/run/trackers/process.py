"""A tracker's own process, as a run starts it: behind everything else on the machine, and silent but for its log."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from backend.spec.faults import Mistake
from backend.spec.places import RunFolder

VERB = "follow-a-run"
"""What a bundled program is called with to be this process (`backend.child_process.module_command`)."""
NICE = 10


def main(arguments: list[str]) -> int:
    """NAME FOLDER → the exit code."""
    # Every verb's program imports this module, for its VERB.
    from backend.run.trackers.follow import track

    name, folder = arguments
    with contextlib.suppress(OSError):
        os.nice(NICE)
    try:
        track(RunFolder(Path(folder)), name, waits=True, say=_say)
    except Mistake as mistake:
        for fault in mistake.faults:
            _say(str(fault))
        return 2
    return 0


def _say(sentence: str) -> None:
    sys.stdout.write(f"{sentence}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
