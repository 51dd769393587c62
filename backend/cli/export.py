"""The verb `export`: write a model for LM Studio, Ollama, a folder or Hugging Face, or settings for TRL."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from backend.cli.common import STOPPED, AllowCode, AsJson, ExistingRunsDir, ignore_sighup, tell, tell_json, verb
from backend.cli.completions import checkpoints, run_names
from backend.config.config import Config, load, read
from backend.export.exports import DEFAULT_FORMAT, FORMATS, TARGETS, settings_of
from backend.rewards.allowed_code import require_allowed
from backend.runs.run_folder import find_run
from backend.trainer.control import StopRequested, raising_stop
from backend.utils.errors import UserError
from backend.utils.files import is_file, user_path

# Any word is read, and one that is no target or format refused with a sentence.
Target = Annotated[str, typer.Option("--to", metavar="<where>", help=f"{', '.join(TARGETS)}.")]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        metavar=f"<{'|'.join(FORMATS)}>",
        help="Form of the weights. full: the base's floats, if left out; fused: a quantised base keeps its bits; "
        "adapter: without the base.",
    ),
]


@verb
@ignore_sighup
def export(
    run: Annotated[
        str, typer.Argument(help="A run folder, or its name; for --to trl a YAML file too.", autocompletion=run_names)
    ],
    to: Target,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the model there (the run's name if left out).")
    ] = None,
    folder: Annotated[Path | None, typer.Option("--folder", help="Parent folder for --to folder and --to trl.")] = None,
    checkpoint: Annotated[
        str,
        typer.Option(
            "--checkpoint", help="best, last or a step; left out: the end of the run.", autocompletion=checkpoints
        ),
    ] = "",
    format_: Format = "",
    quantize: Annotated[
        Literal[4, 6, 8] | None, typer.Option("--quantize", help="The same as --format 4bit, 6bit or 8bit.")
    ] = None,
    held_out: Annotated[
        int, typer.Option("--held-out", min=0, help="Compare rewards on so many held-out prompts, before and after.")
    ] = 0,
    fetch: Annotated[
        bool,
        typer.Option("--fetch", help="Download the original weights where a format needs them and they are not here."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model of that name.")] = False,
    repo: Annotated[
        str, typer.Option("--repo", help="For --to hub: owner/name (you and the run's name if left out).")
    ] = "",
    public: Annotated[bool, typer.Option("--public", help="For --to hub: everybody may see it.")] = False,
    preview: Annotated[
        bool, typer.Option("--preview", help="For --to hub: show the card and the files, and send nothing.")
    ] = False,
    allow_code: AllowCode = False,
    runs_dir: ExistingRunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Export a run's model to LM Studio, Ollama, a folder or Hugging Face and verify it; or its settings for TRL."""
    if to == "trl":
        about_weights = {
            "checkpoint": checkpoint,
            "format": format_,
            "quantize": quantize,
            "held-out": held_out,
            "fetch": fetch,
            "repo": repo,
            "public": public,
            "preview": preview,
        }
        with _stopping():
            export_settings(
                run,
                runs_dir,
                name,
                folder,
                about_weights,
                overwrite=overwrite,
                allow_code=allow_code,
                as_json=as_json,
                report=_report_json if as_json else _ReportLines(),
            )
        return
    from backend.export.export_run import Export, export_run
    from backend.runs.run_folder import find_run

    if quantize and format_ and format_ != f"{quantize}bit":
        raise UserError(
            "quantize", f"--quantize {quantize} and --format {format_} contradict each other; give one of them."
        )
    run_folder = find_run(run, runs_dir)
    if held_out:
        require_allowed(read(run_folder.config), allow=allow_code)
    chosen = f"{quantize}bit" if quantize else format_ or DEFAULT_FORMAT
    request = Export(to, name or run_folder.name, folder, chosen, checkpoint, held_out, overwrite, fetch)
    report = _report_json if as_json else _ReportLines()
    with _stopping():
        if to == "hub":
            from backend.cli import publish

            what = publish.Publication(request, repo, private=not public)
            (publish.preview if preview else publish.publish)(run_folder, what, report, as_json=as_json)
            return
        exported = export_run(run_folder, request, report)
    if as_json:
        _print_json(exported.to_dict())
        return
    for sentence in exported.sentences():
        tell(sentence, file=sys.stderr)
    tell(exported.place)


@contextmanager
def _stopping() -> Iterator[None]:
    """Exit with a message after a stop signal, once temporary files are removed."""
    try:
        with raising_stop():
            yield
    except StopRequested as stop:
        tell(f"Stopped because {stop}; a model is put in its place whole or not at all.", file=sys.stderr)
        raise typer.Exit(STOPPED) from None


class _ReportLines:
    """Prints one stderr line per stage."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, sentence: str, done: float | None = None) -> None:
        if sentence != self._last:
            tell(sentence, file=sys.stderr, flush=True)
        self._last = sentence


def _report_json(sentence: str, done: float | None = None) -> None:
    """Print progress as a JSON line for the window."""
    _print_json({"progress": sentence, "done": None if done is None else round(done, 3)})


def _print_json(content: dict[str, Any]) -> None:
    tell_json(content)


def export_settings(
    run: str,
    runs_dir: Path | None,
    name: str | None,
    folder: Path | None,
    about_weights: Mapping[str, Any],
    *,
    overwrite: bool,
    allow_code: bool,
    as_json: bool,
    report: Callable[[str], None],
) -> None:
    """Write the folder; print ignored settings on stderr and the path on stdout.

    Raises UserError for options in `about_weights` that were given, and for a run's reward file without permission
    here.
    """
    from backend.export.trl_folder import export_trl

    if given := next((option for option, value in about_weights.items() if value), ""):
        raise UserError(given, f"--{given} is about weights, and --to trl takes the settings of a run; leave it out.")
    config, own_name = _settings(run, runs_dir, allow_code=allow_code)
    exported = export_trl(config, name or f"{own_name}-trl", folder, overwrite=overwrite, tell=report)
    if as_json:
        tell_json(exported.to_dict())
        return
    for sentence in exported.sentences() or ["Every setting is carried over."]:
        tell(sentence, file=sys.stderr)
    if exported.by_files:
        tell("README.md there lists what its files do beside TRL's arguments.", file=sys.stderr)
    tell(exported.path)


def _settings(run: str, runs_dir: Path | None, *, allow_code: bool) -> tuple[Config, str]:
    """Return the settings and the name of a run or YAML file."""
    path = user_path(run, "run")
    if path.suffix.lower() in (".yaml", ".yml", ".json") and is_file(path):
        return load(path), path.stem
    folder = find_run(run, runs_dir)
    require_allowed(read(folder.config), allow=allow_code)
    return settings_of(folder), folder.name
