"""The verbs `export`, and `hub`, your account at Hugging Face with the token in the system keychain."""

from __future__ import annotations

import getpass
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from backend.cli.common import AllowCode, AsJson, RunsDir, ignore_sighup, stoppable, tell, tell_error, tell_json, verb
from backend.cli.completions import checkpoints, run_names
from backend.config.config import Config, load, read
from backend.export.exports import DEFAULT_FORMAT, FORMATS, TARGETS, settings_of
from backend.rewards.allowed_code import require_allowed
from backend.runs.run_folder import RunFolder, find_run
from backend.utils.disk import gigabytes
from backend.utils.errors import UserError
from backend.utils.files import is_file, user_path

if TYPE_CHECKING:
    from backend.export.export_run import Export

EVERY_S = 0.2  # between two lines of byte progress
STOPPED = "Stopped because {stop}; a model is put in its place whole or not at all."

# Any word is read, and one that is no target or format refused with a sentence.
Target = Annotated[str, typer.Option("--to", metavar="<where>", help=f"{', '.join(TARGETS)}.")]
FORMAT_HELP = "full: the base's floats (default); fused: a quantised base keeps its bits; adapter: without the base."
Format = Annotated[str, typer.Option("--format", metavar=f"<{'|'.join(FORMATS)}>", help=FORMAT_HELP)]
Quantize = Annotated[Literal[4, 6, 8] | None, typer.Option("--quantize", help="The same as --format 4bit and so on.")]


@verb
@ignore_sighup
def export(
    run: Annotated[
        str, typer.Argument(help="A run folder, or its name; for --to trl a YAML file too.", autocompletion=run_names)
    ],
    to: Target,
    name: Annotated[str | None, typer.Option("--name", help="Name of the model there, instead of the run's.")] = None,
    folder: Annotated[Path | None, typer.Option("--folder", help="Parent folder for --to folder and --to trl.")] = None,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", help="best, last or a step, instead of the end.", autocompletion=checkpoints)
    ] = "",
    format_: Format = "",
    quantize: Quantize = None,
    held_out: Annotated[int, typer.Option(min=0, help="Compare rewards on so many held-out prompts.")] = 0,
    fetch: Annotated[bool, typer.Option("--fetch", help="Download original weights that a format needs.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model of that name.")] = False,
    repo: Annotated[str, typer.Option("--repo", help="For --to hub: owner/name, instead of yours.")] = "",
    public: Annotated[bool, typer.Option("--public", help="For --to hub: everybody may see it.")] = False,
    preview: Annotated[bool, typer.Option("--preview", help="For --to hub: show the files, and send nothing.")] = False,
    allow_code: AllowCode = False,
    runs_dir: RunsDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Progress and result, each a line of JSON.")] = False,
) -> None:
    """Export a run's model to LM Studio, Ollama, a folder or Hugging Face and verify it; or its settings for TRL."""
    report, chosen = _reporter(as_json), f"{quantize}bit" if quantize else format_ or DEFAULT_FORMAT
    weights = {"checkpoint": checkpoint, "format": format_, "quantize": quantize, "held-out": held_out, "fetch": fetch}
    unused = {"repo": repo, "public": public, "preview": preview} if to != "hub" else {}
    unused |= weights if to == "trl" else {"folder": folder} if to != "folder" else {}
    if given := next((option for option, value in unused.items() if value), ""):
        raise UserError(given, f"--{given} has no effect with --to {to}; leave it out.")
    if to == "trl":
        from backend.export.trl_folder import export_trl

        with stoppable(STOPPED):
            config, own_name = given_settings(run, runs_dir, allow_code)
            trl = export_trl(config, name or f"{own_name}-trl", folder, overwrite=overwrite, tell=report)
        remarks = trl.sentences() or ["Every setting is carried over."]
        remarks += ["README.md there lists what its files do beside TRL's arguments."] if trl.by_files else []
        return _tell_export(trl.to_dict(), remarks, trl.path, as_json)
    from backend.export.export_run import Export, export_run

    if to == "folder" and name and folder is None:
        raise UserError("name", f"--name goes with --folder; without it the model is written to {run}'s folder fused.")
    if quantize and format_ and format_ != f"{quantize}bit":
        sentence = f"--quantize {quantize} and --format {format_} contradict each other; give one of them."
        raise UserError("quantize", sentence)
    run_folder = find_run(run, runs_dir)
    if held_out:
        require_allowed(read(run_folder.config), allow=allow_code)
    request = Export(to, name or run_folder.name, folder, chosen, checkpoint, held_out, overwrite, fetch)
    with stoppable(STOPPED):
        if preview:
            return _preview(run_folder, request, repo, not public, report, as_json)
        if to == "hub":
            from backend.export.hub_upload import need_token, whose
            from backend.export.publishing import prepare_upload, send

            token = need_token()
            repo_id = full_repo_id(run_folder, repo, None if "/" in repo else asdict(whose(token)))
            prepared = prepare_upload(run_folder, repo_id, request, report)
            count, size = len(prepared.files()), prepared.bytes  # what was sent is deleted
            done = send(prepared, token, report, private=not public, overwrite=overwrite)
            sentences = [f"{count} files are there as one commit, {done.commit[:7]}."]
            about = {"path": str(run_folder.path), "place": done.url, "bytes": size, "commit": done.commit}
            about |= {"sentences": sentences}
        else:
            exported = export_run(run_folder, request, report)
            about, sentences = exported.to_dict(), exported.sentences()
    _tell_export(about, sentences, about["place"], as_json)


def _tell_export(about: dict[str, Any], sentences: list[str], place: object, as_json: bool) -> None:
    if as_json:
        return tell_json(about)
    for sentence in sentences:
        tell_error(sentence)
    tell(place)


def _reporter(as_json: bool) -> Callable[..., None]:
    last, told_at = "", 0.0

    def report(sentence: str, done: float | None = None, total: int | None = None) -> None:
        """Print a sentence with the share that is done, or, with a `total`, how many of its bytes."""
        nonlocal last, told_at
        words = sentence
        if done is not None and total:
            words = f"{sentence.rstrip('.')}: {gigabytes(done)} of {gigabytes(total)}."
        if not as_json:
            key = f"{sentence} {10 * done // total}" if done is not None and total else sentence  # per 10 % of bytes
            if key != last:
                tell_error(words)
            last = key
        elif done is None or not total:
            tell_json({"progress": sentence, "done": None if done is None else round(done, 3)})
        elif time.monotonic() - told_at > EVERY_S or done == total:
            told_at = time.monotonic()
            tell_json({"progress": words, "done": round(done / total, 4), "bytes": done, "total": total})

    return report


def given_settings(run: str, runs_dir: Path | None, allow_code: bool) -> tuple[Config, str]:
    """(settings, name) of a run or a YAML file. Raises UserError."""
    path = user_path(run, "run")
    if path.suffix.lower() in (".yaml", ".yml", ".json") and is_file(path):
        return load(path), path.stem
    run_folder = find_run(run, runs_dir)
    require_allowed(read(run_folder.config), allow=allow_code)
    return settings_of(run_folder), run_folder.name


def _preview(
    run: RunFolder, export: Export, repo: str, private: bool, report: Callable[..., None], as_json: bool
) -> None:
    from backend.export.hub_upload import find_token, whose
    from backend.export.publishing import prepare_upload

    account, problem, token = None, "You are not logged in to Hugging Face.", find_token()
    if token is not None:
        try:
            account, problem = asdict(whose(token)), ""
        except UserError as error:
            problem = error.faults[0].sentence
    prepared = prepare_upload(run, full_repo_id(run, repo, account or {"name": "your-account"}), export, report)
    if as_json:
        about = prepared.to_dict() | {"private": private, "account": account, "account_problem": problem}
        return tell_json({"preview": about})
    tell(prepared.card)
    for name, size in prepared.files():
        tell(f"{gigabytes(size):>10}  {name}")
    target = f"{prepared.repo_id}, {'private' if private else 'public'}"
    tell(f"\n{gigabytes(prepared.bytes)} would go to {target}. Nothing has been sent.")
    tell(f"Logged in as {account['name']} ({account['source']})." if account else problem)
    tell(f"The card can be edited: {prepared.folder / 'README.md'}")


def full_repo_id(run: RunFolder, repo: str, account: dict[str, Any] | None) -> str:
    """owner/name, by default the account and the run's name. Raises UserError if no owner is known."""
    if "/" in repo:
        return repo
    if account is None:
        raise UserError("repo", "Whose repository? Write owner/name, or log in first with `hub login`.")
    return f"{account['name']}/{repo or re.sub(r'[^A-Za-z0-9._-]+', '-', run.name).strip('-.')}"


hub = typer.Typer(no_args_is_help=True, help="Your account at Hugging Face.")


@hub.command()
@verb
def login(
    from_stdin: Annotated[bool, typer.Option("--from-stdin", help="Read the token from standard input.")] = False,
) -> None:
    """Store a token with write access in the system keychain; the prompt does not echo it."""
    from backend.export.hub_upload import TOKENS_PAGE, log_in

    if not from_stdin:
        tell_error(f"Make a token with write access at {TOKENS_PAGE}.")
    account = log_in(sys.stdin.readline() if from_stdin else getpass.getpass("Token: "))
    tell(f"Logged in as {account.name}; the token is in the keychain.")
    if not account.can_write:
        tell_error("It may only read, so uploads will be refused.")


@hub.command()
@verb
def logout() -> None:
    """Delete the token from the keychain. A token stored by `hf auth login` stays."""
    from backend.export.hub_upload import find_token, log_out

    tell("Logged out." if log_out() else "There was no token in the keychain.")
    if left := find_token():
        tell_error(f"A token of {left.source} is still found.")


@hub.command()
@verb
def whoami(as_json: AsJson = False) -> None:
    """Show the account that uploads use, and the source of its token."""
    from backend.export.hub_upload import need_token, whose

    account = whose(need_token())
    if as_json:
        return tell_json(asdict(account))
    also = f", also of {', '.join(account.organisations)}" if account.organisations else ""
    tell(f"{account.name}{also} (token from {account.source}{'' if account.can_write else ', may only read'})")
