"""Keep a Mac awake while a run works: `caffeinate`, which macOS ships, as a child process.

`-i` holds off idle sleep and `-s` system sleep on mains power; the display may sleep, which helps the GPU. `-w PID` ends caffeinate with
that process however it ends, so a killed trainer leaves no Mac awake. Does nothing on other systems.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable

END_S = 2.0
"""Seconds that caffeinate has to end before it is killed."""


class KeepAwake:
    """`start` when the run begins to work, `stop` when it pauses or ends; either may be repeated.

    `warn` is called with a sentence if the Mac cannot be kept awake, once.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._process: subprocess.Popen[bytes] | None = None
        self._has_warned = False

    def start(self) -> None:
        if sys.platform != "darwin" or self._process is not None:
            return
        program = shutil.which("caffeinate") or "/usr/bin/caffeinate"
        try:
            self._process = subprocess.Popen(
                [program, "-is", "-w", str(os.getpid())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal must not end it while the trainer saves
            )  # fmt: skip
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                self._warn(
                    f"The Mac may fall asleep during this run: caffeinate cannot be started ({error.strerror}). System Settings can "
                    f"keep it awake."
                )

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
