"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from backend.utils.errors import UserError
from backend.utils.files import user_path


def _folder(path: Path | None) -> Path | None:
    """The folder of an option, with ~ expanded. Raises typer's own mistake, because options are read before the verb begins."""
    try:
        return None if path is None else user_path(str(path), "runs_dir")
    except UserError as mistake:
        raise typer.BadParameter(mistake.faults[0].sentence) from None


AsJson = Annotated[bool, typer.Option("--json", help="One line of JSON on stdout.")]
ExistingRunsDir = Annotated[Path | None, typer.Option("--runs-dir", callback=_folder, help="Where run folders are.")]
NewRunsDir = Annotated[Path | None, typer.Option("--runs-dir", callback=_folder, help="Where run folders go.")]
Hosts = Annotated[
    str | None,
    typer.Option("--hosts", metavar="FILE", help="Train on the machines of this hosts file; none is this one alone."),
]
AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Run reward files of this run that were never allowed on this machine.")
]
Stream = Annotated[bool, typer.Option("--stream", help="Repeat the event log on stdout, one JSON object a line.")]
Live = Annotated[bool | None, typer.Option("--progress/--no-progress", help="A live display (default on a terminal).")]
