"""Where mlx keeps the functions that it has compiled for a CPU: `<temporary folder>/mlx/<version>/cpu`, a source and a library for each.

It writes there without a lock, and takes a library that is there for a whole one: of two processes that compile the same function at the same
time, one may load half of what the other writes. The ranks of a run do so at every first step, so those that share a machine with
another process of the run have folders of their own.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from backend.utils import file_lock

CACHE = "mlx"
MOST_FOLDERS = 64
"""As many ranks as a hosts file may have."""
SETTLED_S = 60.0
"""How long a library must not have been written to that is taken for whole; compiling one takes a second or two."""


def use_own_folder() -> Path | None:
    """Give this process a folder for what it compiles, which no other process uses as long as this one lives; the next one finds it again.

    Whole libraries that are in the common folder are linked into it. Only mlx is led there, and processes that this one starts: Python's own
    temporary files stay where they are. → the folder; None where none can be made, and mlx goes on in the common one.
    """
    common = (
        Path(tempfile.gettempdir()) / CACHE
    )  # from now on Python remembers this place, whatever the environment says
    for number in range(1, MOST_FOLDERS + 1):
        own = common / f"rank-{number}"
        try:
            own.mkdir(parents=True, exist_ok=True)
            lock = file_lock.try_hold(own / "in-use.lock")
        except OSError:  # another user's, or a full disk: mlx could not write there either
            return None
        if lock is not None:  # held until this process ends
            _link_whole_libraries(common, own / CACHE)
            os.environ["TMPDIR"] = str(own)
            return own
    return None


def _link_whole_libraries(common: Path, own: Path) -> None:
    newest = time.time() - SETTLED_S
    with suppress(OSError):  # then they are compiled again
        for library in common.glob("*/cpu/*.so"):
            link = own / library.relative_to(common)
            if library.stat().st_mtime < newest and not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.hardlink_to(library)
