"""What a stop signal means to a rank other than 0: that rank 0 is about to stop the run, and needs this one until it is saved.

Ctrl-C under `mlx.launch`, `mpirun`, a batch system and a machine that shuts down signal every process of a run. Rank 0 gets the signal as well.
Where this rank alone was meant, it ends once its patience is over, and the others find it lost.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

from backend.trainer import control

PATIENCE_S = 30.0
"""How long rank 0 may take to stop and save."""
STOPPED = 3
"""The exit code of a rank that was stopped alone."""


def leave_stops_to_leader(patience_s: float = PATIENCE_S) -> None:
    """To be called in the main thread, as `signal.signal` requires."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    # The main thread may be in a sum of MLX that does not return, where no handler of Python's runs: the C part writes to this pipe at once.
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    control.on_stop_signals(lambda number, frame: None)
    for number in control.STOP_SIGNALS:
        signal.siginterrupt(number, False)  # MLX's sockets take an interrupted call for a lost rank
    threading.Thread(target=_end_late, args=(woken, patience_s), daemon=True, name="stop signals").start()


def _end_late(woken: int, patience_s: float) -> None:
    os.read(woken, 1)
    time.sleep(patience_s)
    with contextlib.suppress(OSError):
        os.write(2, b"a stop signal came, and rank 0 goes on; this process ends.\n")
    os._exit(STOPPED)
