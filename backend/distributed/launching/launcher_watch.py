"""A rank that ends itself when its launcher is gone, however that has ended: it is then that the rank's stdin ends."""

from __future__ import annotations

import contextlib
import os
import threading

from backend.distributed.channel import LEADER_LOST
from backend.distributed.orders import WATCH_VARIABLE


def end_with_launcher() -> None:
    """Watch stdin from now on, in a process whose launcher holds it open. Over ssh it ends with the connection."""
    if os.environ.get(WATCH_VARIABLE):
        threading.Thread(target=_watch, daemon=True, name="launcher watch").start()


def _watch() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
        os.write(2, b"the launcher is gone; this process ends.\n")
    os._exit(LEADER_LOST)
