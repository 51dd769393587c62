"""The verb `track`: send the metrics and completions of a run to a tracker."""

from __future__ import annotations

import os
import sys
import threading
from typing import Annotated

import typer

from backend.cli.common import BUG, USER_ERROR, ExistingRunsDir, print_problems, tell, verb
from backend.cli.completions import RunName
from backend.utils.disk import disk_fault, fault_of


@verb
def track(
    run: RunName,
    to: Annotated[str, typer.Option("--to", help="csv, tensorboard, trackio or wandb.")],
    runs_dir: ExistingRunsDir = None,
    upload: Annotated[bool, typer.Option("--upload", help="wandb only: send it to your account.")] = False,
) -> None:
    """Write a run's metrics and completions to a tracker, with TRL's metric names."""
    from backend.runs.run_folder import find_run
    from backend.trainer.trackers.follow import track as follow
    from backend.trainer.trackers.targets import TRACKERS
    from backend.utils.errors import UserError
    from backend.utils.text import quote

    if to not in TRACKERS:
        raise UserError("to", f"There is no tracker {quote(to, 40)}; there are {', '.join(TRACKERS)}.")
    if upload and to != "wandb":
        raise UserError("upload", f"{to} uploads nothing; --upload goes with wandb.")
    folder = find_run(run, runs_dir)
    before = threading.excepthook

    def end(what: threading.ExceptHookArgs) -> None:
        """Exit if a tracker's thread dies, as tensorboardX's writer does on a full disk: it blocks the main thread."""
        error = what.exc_value
        is_of_disk = error is not None and fault_of(error) is not None
        if error is not None and is_of_disk:
            print_problems(disk_fault(folder.trackers / to, error))
        else:
            before(what)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(USER_ERROR if is_of_disk else BUG)

    threading.excepthook = end
    try:
        follow(folder, to, may_upload=upload, say=print)
    finally:
        threading.excepthook = before
    place = "your account at Weights & Biases" if upload else TRACKERS[to].place
    tell(f"What {to} writes of {folder.name} is in {place}.")
