"""The verb `clone`: a new run from a checkpoint of another, with some settings changed."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from backend.cli.completions import changes as changes_offered
from backend.cli.completions import checkpoints, run_names
from backend.cli.exit_codes import verb
from backend.cli.new_run import PreparedRun, check_settings, parse_changes
from backend.cli.options import AllowCode, ExistingRunsDir, Live, Stream
from backend.cli.output import tell
from backend.config.config import load, read
from backend.distributed.allowed_hosts import allow_hosts
from backend.rewards.catalogue.allowed_code import allow_named, require_allowed
from backend.runs.run_folder import find_run


@verb
def clone(
    run: Annotated[str, typer.Argument(help="A run folder, or its name.", autocompletion=run_names)],
    step: Annotated[
        str, typer.Option("--step", help="The checkpoint: a step, best or last.", autocompletion=checkpoints)
    ] = "last",
    warm: Annotated[
        bool, typer.Option("--warm/--cold", help="Go on from that step, or start at 0 with its weights.")
    ] = True,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, for the clone.", autocompletion=changes_offered)
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Name of the clone's folder.")] = "",
    reference: Annotated[
        Literal["base", "clone"],
        typer.Option("--reference", help="Of a cold clone: stay near the base model, or the weights it starts from."),
    ] = "base",
    start: Annotated[bool, typer.Option("--start", help="Train it at once.")] = False,
    allow_code: AllowCode = False,
    runs_dir: ExistingRunsDir = None,
    stream: Stream = False,
    progress: Live = None,
) -> None:
    """Make a new run from any checkpoint of a run; prints the new folder. Starts it only with --start."""
    parent, changed = find_run(run, runs_dir), parse_changes(changes or [])
    from backend.runs.clone import clone as make_clone
    from backend.runs.clone import clone_settings

    if changed:
        settings = clone_settings(parent, step, changed, warm=warm)[1].model_dump()
        allow_named(changed)
        require_allowed(settings, allow=allow_code)
        check_settings(settings)
    folder = make_clone(parent, step, changed, warm=warm, name=name, runs_dir=runs_dir, reference=reference)
    if start:
        from backend.cli.run_session import train_and_exit

        require_allowed(read(folder.config), allow=allow_code)
        if changed.get("hosts"):
            allow_hosts(load(folder.config).hosts)
        train_and_exit(PreparedRun(folder, load(folder.config)), stream, progress)
    tell(folder.path)
