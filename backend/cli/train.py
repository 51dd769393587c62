"""The verb `train`: a new run from a YAML file, or in a folder that the window has prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from backend.cli.completions import changes as changes_offered
from backend.cli.exit_codes import verb
from backend.cli.launch_session import hosts_setting
from backend.cli.lost_terminal import ignore_sighup
from backend.cli.new_run import apply_changes, new_run, prepared_run
from backend.cli.options import AllowCode, Hosts, Live, NewRunsDir, Stream
from backend.cli.run_session import train_and_exit
from backend.config.config import read
from backend.utils.errors import UserError


@verb
@ignore_sighup
def train(
    config: Annotated[Path | None, typer.Argument(help="The settings, a YAML file.")] = None,
    run: Annotated[Path | None, typer.Option("--run", help="Train in this folder, which holds config.yaml.")] = None,
    runs_dir: NewRunsDir = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the run folder.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, over the file.", autocompletion=changes_offered)
    ] = None,
    hosts: Hosts = None,
    allow_code: AllowCode = False,
    stream: Stream = False,
    progress: Live = None,
) -> None:
    """Train from a YAML file; prints the run folder."""
    if (config is None) == (run is None):
        raise UserError("config", "Give either a YAML file or --run with a run folder.")
    if run is not None:
        if name or changes or runs_dir or hosts:
            what = "--set, --name, --hosts and --runs-dir go with a YAML file"
            raise UserError("run", f"{what}; the folder of --run is as it is.")
        prepared = prepared_run(run, allow_code=allow_code)
    else:
        raw = apply_changes(read(config or ""), changes or []) | hosts_setting(hosts)
        prepared = new_run(raw, runs_dir, name)
    train_and_exit(prepared, stream, progress)
