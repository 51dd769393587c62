"""The verb `track`: a run's metrics and completions for a tracker, of a run that trains or of any that has ended."""

from __future__ import annotations

from typing import Annotated

import typer

from backend.cli.exit_codes import verb
from backend.cli.options import ExistingRunsDir


@verb
def track(
    run: Annotated[str, typer.Argument(help="A run folder, or the name of a run.")],
    to: Annotated[str, typer.Option("--to", help="csv, tensorboard, trackio or wandb.")],
    runs_dir: ExistingRunsDir = None,
    upload: Annotated[
        bool, typer.Option("--upload", help="wandb only: send it to your account, over the network.")
    ] = False,
) -> None:
    """Write a run's metrics and completions for a tracker, under the names that TRL gives them."""
    from backend.run.trackers.follow import track as follow
    from backend.spec.faults import Mistake
    from backend.spec.run_folder import find_run
    from backend.spec.trackers import TRACKERS
    from backend.spec.user_input.text import shown

    if to not in TRACKERS:
        raise Mistake("to", f"There is no tracker {shown(to, 40)}; there are {', '.join(TRACKERS)}.")
    if upload and to != "wandb":
        raise Mistake("upload", f"{to} uploads nothing; --upload goes with wandb.")
    folder = find_run(run, runs_dir)
    follow(folder, to, may_upload=upload, say=print)
    place = "your account at Weights & Biases" if upload else TRACKERS[to].place
    print(f"What {to} writes of {folder.name} is in {place}.")
