"""The verb `resume`: continue a run from its newest complete checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from backend.cli import sweep
from backend.cli.completions import run_names
from backend.cli.exit_codes import verb
from backend.cli.gpu_timeout import relax_gpu_timeout
from backend.cli.new_run import PreparedRun
from backend.cli.options import Live, NewRunsDir, Stream
from backend.cli.run_session import train_and_exit
from backend.spec.archive import first_and_last_events
from backend.spec.config import load
from backend.spec.places import RunFolder, find_run
from backend.spec.sweep_results import find_sweep


@verb
def resume(
    run: Annotated[str, typer.Argument(help="A run or a sweep: its folder or its name.", autocompletion=run_names)],
    runs_dir: NewRunsDir = None,
    stream: Stream = False,
    progress: Live = None,
) -> None:
    """Go on from the newest whole checkpoint; without one, start over. A sweep goes on with all of its runs."""
    if find_sweep(run, runs_dir) is not None:
        return sweep.resume_sweep(run, runs_dir)
    folder = find_run(run, runs_dir)
    if has_finished(folder):
        print(f"The run {folder.name} has finished; there is nothing to resume.")
        return
    settings = load(folder.config)
    relax_gpu_timeout(settings)
    train_and_exit(PreparedRun(folder, settings), stream, progress)


def has_finished(folder: RunFolder) -> bool:
    _, last_events = first_and_last_events(folder.events)
    return bool(last_events) and last_events[-1]["kind"] == "finished"
