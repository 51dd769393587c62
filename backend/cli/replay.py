"""The verb `replay`: play a recorded run into a new folder, as if it were training."""

from __future__ import annotations

from typing import Annotated

import typer

from backend.cli.exit_codes import STOPPED, verb
from backend.cli.options import NewRunsDir
from backend.cli.output import tell


@verb
def replay(
    run: Annotated[str, typer.Argument(help="A run folder, or the name of a run.")],
    speed: Annotated[float, typer.Option("--speed", help="How many times as fast as it was; 0: at once.")] = 1.0,
    runs_dir: NewRunsDir = None,
    name: Annotated[
        str, typer.Option("--name", help="Name of the new folder; by default the run's, with -replay.")
    ] = "",
) -> None:
    """Play a recorded run into a new folder, at its own pace or faster. Nothing is trained."""
    from backend.runs import replay as replays
    from backend.runs.run_folder import find_run

    playing = replays.replay(find_run(run), runs_dir, name, speed)
    tell(playing.folder.path, flush=True)
    playing.control.listen_to_signals()
    if not playing.play():
        raise typer.Exit(STOPPED)
