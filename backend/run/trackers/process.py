"""A tracker's own process, as a run starts it: behind everything else on the machine, and silent but for its log."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from pathlib import Path

from backend.spec.faults import Mistake
from backend.spec.places import RunFolder
from backend.spec.user_input.text import shown

VERB = "follow-a-run"
"""What a bundled program is called with to be this process (`backend.child_process.module_command`)."""
NICE = 10


def main(arguments: list[str]) -> int:
    """NAME FOLDER → the exit code."""
    # Every verb's program imports this module, for its VERB.
    from backend.run.trackers.follow import track

    name, folder = arguments
    run = RunFolder(Path(folder))

    def say(sentence: str) -> None:
        _say(run, name, sentence)

    def end_with_thread(what: threading.ExceptHookArgs) -> None:
        """A thread of a package has died, as tensorboardX's writer does on a full disk: what is sent to it waits for ever."""
        with contextlib.suppress(OSError):
            traceback.print_exception(what.exc_value)
        say(_of_error(what.exc_value))
        os._exit(1)

    threading.excepthook = end_with_thread
    with contextlib.suppress(OSError):
        os.nice(NICE)
    try:
        track(run, name, waits=True, say=say)
    except Mistake as mistake:
        for fault in mistake.faults:
            say(str(fault))
        return 2
    except Exception as error:  # whatever a package raises
        with contextlib.suppress(OSError):
            traceback.print_exc()
        say(_of_error(error))  # last: the run tells the last line of this log
        return 1
    return 0


def _of_error(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {shown(error, 120)}"


def _say(run: RunFolder, name: str, sentence: str) -> None:
    """Write a line into the tracker's log; and into that of a run that is over, which can tell nothing itself any more. A full disk keeps
    both from nothing else."""
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{sentence}\n")
        sys.stdout.flush()
    if not run.is_locked():
        # Not created: the folder may have been moved away.
        with contextlib.suppress(OSError):
            log = os.open(run.log, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
            os.write(log, f"{name}: {sentence}\n".encode(errors="replace"))
            os.close(log)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
