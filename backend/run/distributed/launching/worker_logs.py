"""The logs of a run's workers: what each of them printed since the ranks were started last, in the run's folder.

The launcher writes them. Under MPI a worker on another machine writes its own there, in the folder for temporary files.
"""

from __future__ import annotations

import os
from pathlib import Path

from backend.spec.disk_faults import writing
from backend.spec.private_files import make_private_folder
from backend.spec.run_folder import RunFolder

TAIL_BYTES = 4_096


def logs_folder(run: RunFolder) -> Path:
    """The folder of the logs, made if need be. Raises DiskFault."""
    folder = run.path / "ranks"
    with writing(folder):
        make_private_folder(folder)
    return folder


def last_line(log: Path) -> str:
    """The last line that is not empty; "" where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
