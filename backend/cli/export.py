"""The verb `export`: a finished run's model, fused, in LM Studio or a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from backend.cli.exit_codes import verb
from backend.cli.options import ExistingRunsDir

# `hub` is read, and refused by `backend.models.export` with a sentence; help does not offer what does not work yet.
Target = Annotated[
    Literal["lmstudio", "folder", "hub"],
    typer.Option("--to", metavar="<lmstudio|folder>", help="lmstudio or folder."),
]


@verb
def export(
    run: Annotated[str, typer.Argument(help="A run folder, or its name.")],
    to: Target,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the model there (the run's name if left out).")
    ] = None,
    folder: Annotated[Path | None, typer.Option("--folder", help="Parent folder for --to folder.")] = None,
    quantize: Annotated[
        Literal[4, 6, 8] | None, typer.Option("--quantize", help="4, 6 or 8 bits; left out: full precision.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model of that name.")] = False,
    runs_dir: ExistingRunsDir = None,
) -> None:
    """Put a finished run's model into LM Studio or a folder, loaded back to make sure."""
    from backend.models.export import export as export_run
    from backend.spec.places import find_run

    run_folder = find_run(run, runs_dir)
    exported = export_run(
        run_folder, to, name or run_folder.name, folder=folder, quantize=quantize, overwrite=overwrite,
        progress=lambda sentence: print(sentence, file=sys.stderr, flush=True),
    )  # fmt: skip
    print(exported.path)
