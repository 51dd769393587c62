"""A tracker's own process, as a run starts it: behind everything else on the machine, and silent but for its log."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any

from backend.runs.run_folder import RunFolder
from backend.utils.disk_faults import disk_fault, fault_of
from backend.utils.errors import UserError
from backend.utils.text import quote

VERB = "follow-a-run"
"""What a bundled program is called with to be this process (`backend.utils.child_process.module_command`)."""
NICE = 10
LONGEST = 160
"""Characters of a sentence about what a package has said or raised."""


def main(arguments: list[str]) -> int:
    """NAME FOLDER → the exit code."""
    # Every verb's program imports this module, for its VERB.
    from backend.trainer.trackers.follow import track

    name, folder = arguments
    words = _Words(RunFolder(Path(folder)), name)
    threading.excepthook = words.end_with_thread
    warnings.showwarning = words.pass_on
    with contextlib.suppress(OSError):
        os.nice(NICE)
    try:
        track(words.run, name, waits=True, say=words.complain)
    except UserError as mistake:
        for fault in mistake.faults:
            words.end(str(fault))
        return 2
    except Exception as error:  # whatever a package raises
        words.end_with(error)
        return 1
    return 0


class _Words:
    """What a tracker's process has to say: in its own log, and where the run does not tell it also in the run's, which the window shows."""

    def __init__(self, run: RunFolder, name: str) -> None:
        self.run, self._name = run, name
        self._told: set[str] = set()

    def complain(self, sentence: str) -> None:
        """Say what goes wrong, once, and go on."""
        if sentence not in self._told:
            self._told.add(sentence)
            _print(sentence)
            self._append(sentence)

    def end(self, sentence: str) -> None:
        """The last words, which a run that goes on reads from the end of this process's log and tells itself."""
        _print(sentence)
        if not self.run.is_locked():
            self._append(sentence)

    def end_with(self, error: BaseException | None) -> None:
        if error is not None and fault_of(error) is not None:
            return self.end(disk_fault(self.run.trackers / self._name, error).faults[0].sentence)
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
        self.end(f"{type(error).__name__}: {quote(error, LONGEST)}")

    def end_with_thread(self, what: threading.ExceptHookArgs) -> None:
        """A thread of a package has died, as tensorboardX's writer does on a full disk: what is sent to it waits for ever."""
        self.end_with(what.exc_value)
        os._exit(1)

    def pass_on(self, message: Warning | str, category: type[Warning], *_: Any) -> None:
        """A package's warning to its user: so trackio tells that its database cannot be written. Those to programmers are left out."""
        if category is UserWarning:
            self.complain(quote(message, LONGEST))

    def _append(self, sentence: str) -> None:
        """In one piece, as every line of that log; it is not created, for the folder may have been moved away."""
        with contextlib.suppress(OSError):
            log = os.open(self.run.log, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
            os.write(log, f"{self._name}: {sentence}\n".encode(errors="replace"))
            os.close(log)


def _print(sentence: str) -> None:
    with contextlib.suppress(OSError):  # the disk is full
        sys.stdout.write(f"{sentence}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
