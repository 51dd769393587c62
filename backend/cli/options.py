"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="One line of JSON on stdout.")]
ExistingRunsDir = Annotated[Path | None, typer.Option("--runs-dir", help="Where run folders are.")]
NewRunsDir = Annotated[Path | None, typer.Option("--runs-dir", help="Where run folders go.")]
AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Run reward files of this run that were never allowed on this machine.")
]
Stream = Annotated[bool, typer.Option("--stream", help="Repeat the diary on stdout, one JSON object a line.")]
Live = Annotated[bool | None, typer.Option("--progress/--no-progress", help="A live display (default on a terminal).")]
