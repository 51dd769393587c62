"""The verb `import`: convert settings of TRL, mlx-lm-lora or mlx-grpo, or a PEFT adapter to mlx-lm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from backend.cli.common import print_problems, tell, tell_error, tell_file, verb
from backend.runs.saved_weights import imported_folder
from backend.utils.errors import UserError
from backend.utils.files import is_folder, user_path
from backend.utils.text import quote


@verb
def import_settings(
    file: Annotated[
        Path, typer.Argument(metavar="FILE|FOLDER", help="Settings in YAML or JSON; or the folder of a PEFT adapter.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT", help="Instead of printing, or of FOLDER-mlx for an adapter."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is there.")] = False,
    our_defaults: Annotated[bool, typer.Option("--our-defaults", help="Leave the rest to our defaults.")] = False,
    model: Annotated[str, typer.Option("--model", metavar="M", help="Adapters: put it on this model.")] = "",
    fetch: Annotated[bool, typer.Option("--fetch", help="Adapters: download the original of a model.")] = False,
) -> None:
    """Convert a TRL, mlx-lm-lora or mlx-grpo file to our format, with that program's defaults; or a PEFT LoRA or DoRA
    adapter to mlx-lm, for chat, evaluation, export and training.
    """
    source = user_path(str(file), "file")
    target = None if output is None else user_path(str(output), "output")
    if is_folder(source):
        if our_defaults:
            sentence = f"{quote(source)} is a folder with an adapter, which has no settings to leave out."
            raise UserError("our_defaults", sentence)
        _import_adapter(source, target, model, overwrite=overwrite, fetch=fetch)
        return
    if model or fetch:
        sentence = f"--model and --fetch are for the folder of an adapter, and {quote(source, 60)} is none."
        raise UserError("model", sentence)
    _import_file(source, target, overwrite=overwrite, their_defaults=not our_defaults)


def _import_file(file: Path, target: Path | None, *, overwrite: bool, their_defaults: bool) -> None:
    from backend.config.other_programs.imported import import_file
    from backend.utils.disk import save_as

    if target is not None and target.exists() and not overwrite:
        raise UserError("output", f"{quote(target)} is there already; take another name, or --overwrite.")
    imported = import_file(file, their_defaults=their_defaults)
    if target is None:
        tell_file(imported.text)
    else:
        save_as(target, imported.text)
        tell(f"{quote(file)} is a file for {imported.program.name}; written to {quote(target)}.")
    if imported.missing:
        tell_error("Still to be given before it can be trained:")
        print_problems(UserError(imported.missing))


def _import_adapter(folder: Path, target: Path | None, model: str, *, overwrite: bool, fetch: bool) -> None:
    from backend.export.original_files import fetch_original
    from backend.models.peft_import import import_adapter

    def report(sentence: str, done: float | None = None) -> None:
        tell_error(sentence)

    imported = import_adapter(
        folder.resolve(),
        model,
        target or imported_folder(folder),
        overwrite=overwrite,
        fetch=(lambda name: fetch_original(name, report)) if fetch else None,
        progress=report,
    )
    for sentence in imported.sentences():
        tell_error(sentence)
    tell(imported.path)
