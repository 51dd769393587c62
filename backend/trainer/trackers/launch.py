"""Starting the trackers of a run. They are processes of their own that read what the run writes; the run waits for
none of them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from backend.runs.run_folder import RunFolder
from backend.trainer.trackers.targets import TRACKERS, chosen, missing_fault
from backend.utils.child_process import module_command
from backend.utils.command import backend_environment
from backend.utils.disk_faults import DiskError, writing
from backend.utils.files import make_private_folder, open_regular
from backend.utils.text import quote

LOOK_S = 1.0
"""Seconds between two looks at the trackers' processes."""
TAIL = 4096
"""Bytes at the end of a tracker's log in which its last line is looked for."""

Tell = Callable[[str], None]


class RunTrackers:
    """The trackers of a run, of which it only ever asks whether they are alive."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._looked = time.monotonic()

    def start(self, report_to: Sequence[str], tell: Tell) -> None:
        """Start a process for each that `report_to` chooses. It ends with the run; one that cannot be started is
        told and no more."""
        for name in chosen(report_to):
            if fault := missing_fault(name):  # a run that is resumed where the package is no more
                tell(f"{fault.sentence} The run goes on without it.")
                continue
            try:
                self._processes[name] = _started(self._run, name)
            except DiskError as fault:
                tell(f"{name} is not started: {fault.faults[0].sentence}")
            else:
                tell(f"What {name} writes of this run is in {TRACKERS[name].place}.")

    def look(self, warn: Tell) -> None:
        """Warn of each that is no more. It follows the run as long as that is locked, so until then it ends for no
        good reason."""
        if not self._processes or time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        for name, process in list(self._processes.items()):
            if (code := process.poll()) is not None:
                del self._processes[name]
                why = _why(code, self._run.trackers / f"{name}.log")
                warn(f"{name} has ended: {why}. The run goes on without it; track --to {name} sends the rest.")

    def let_go(self) -> None:
        """The run is over: let those that somebody has stopped (SIGSTOP) go on, for they would stay for ever."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)


def _why(code: int, log: Path) -> str:
    """Why a process ended: the signal, else the last line of its log, else the exit code."""
    if code < 0:
        name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")
        return f"{name} ended its process"
    return quote(_last_line(log).rstrip("."), 80) or f"exit code {code}"


def _last_line(log: Path) -> str:
    try:
        with open_regular(log) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _started(run: RunFolder, name: str) -> subprocess.Popen[bytes]:
    """Raises DiskError."""
    command = [*module_command("backend.trainer.trackers.follow"), name, str(run.path)]
    with writing(run.trackers):
        make_private_folder(run.trackers)
        with (run.trackers / f"{name}.log").open("ab") as log:
            # A session of its own: neither Ctrl-C in the run's terminal nor the run's end reaches it.
            return subprocess.Popen(
                command,
                cwd=run.trackers,
                env=backend_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
