"""The verb `import`: a file for TRL, mlx-lm-lora or mlx-grpo, as a file of ours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from backend.cli.exit_codes import print_faults, verb
from backend.spec.faults import Mistake
from backend.spec.user_input.paths import user_path
from backend.spec.user_input.text import shown


@verb
def import_settings(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A file for TRL, mlx-lm-lora or mlx-grpo, YAML or JSON.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OUT.yaml", help="Where it goes; else it is printed.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.yaml if it is there.")] = False,
    our_defaults: Annotated[
        bool, typer.Option("--our-defaults", help="Leave what the file leaves out to GRPO Studio's defaults.")
    ] = False,
) -> None:
    """Translate a file for TRL, mlx-lm-lora or mlx-grpo into one of ours, with that program's defaults for what it leaves out."""
    from backend.spec.other_programs.imported import import_file
    from backend.spec.whole_file import save_as

    target = None if output is None else user_path(str(output), "output")
    if target is not None and target.exists() and not overwrite:
        raise Mistake("output", f"{shown(target)} is there already; take another name, or --overwrite.")
    imported = import_file(file, their_defaults=not our_defaults)
    if target is None:
        print(imported.text, end="")
    else:
        save_as(target, imported.text)
        print(f"{shown(file)} is a file for {imported.program.name}; written to {shown(target)}.")
    if imported.missing:
        print("Still to be given before it can be trained:", file=sys.stderr)
        print_faults(Mistake(imported.missing))
