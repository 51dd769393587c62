"""Publish a run on Hugging Face in two steps: prepare the folder that can be looked at, then send it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from backend.export.build import Progress, silent
from backend.export.export_run import Export, export_run
from backend.export.exports import format_named
from backend.export.original.original_files import find_original
from backend.export.publish.card_facts import read_facts
from backend.export.publish.hub_token import HubToken
from backend.export.publish.prepared import PreparedUpload, check_repo_id, find_prepared, finish_preparing, folder_for
from backend.export.publish.privacy import refuse_leaks
from backend.export.publish.upload import ByteProgress, Upload, Uploaded, upload
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import END, find_choice
from backend.runs.steering import run_config
from backend.trainer.evaluation import evaluation_rows
from backend.utils.hub_cache import local_folder


def prepare_upload(run: RunFolder, repo_id: str, export: Export, progress: Progress = silent) -> PreparedUpload:
    """The folder to send: the one that lies there where it was made from the same weights and evaluations, else a new one.

    Sends nothing; asks the Hub for the licence of the base at most. Raises as `export_run`.
    """
    check_repo_id(repo_id)
    made_from = _made_from(run, export)
    if found := find_prepared(run, repo_id, made_from):
        return found
    folder = folder_for(run, repo_id)
    PreparedUpload(repo_id, folder).discard()
    run.uploads.mkdir(exist_ok=True)
    export_run(run, replace(export, to="hub", name=folder.name), progress)
    progress("Writing the card.")
    format_ = format_named(export.format)
    facts = read_facts(
        run, repo_id, format_, export.checkpoint, _original(run) if format_.names == "original" else None
    )
    return finish_preparing(folder, facts, made_from)


def send(
    prepared: PreparedUpload, token: HubToken, progress: ByteProgress, *, private: bool, overwrite: bool
) -> Uploaded:
    """Upload a prepared folder, and delete it here once it is there. Raises UserError; the folder then stays, and sending it again goes
    on where this one ended."""
    refuse_leaks(prepared.folder, token.value)  # a person may have edited the card
    done = upload(Upload(prepared.repo_id, prepared.folder, private, overwrite), token.value, progress)
    prepared.discard()
    return done


def _original(run: RunFolder) -> str:
    """The model whose original weights the run's base was made of."""
    name = run_config(run).model
    base = local_folder(name)
    return find_original(base, name).name if base else name


def _made_from(run: RunFolder, export: Export) -> dict[str, Any]:
    """What a prepared folder depends on."""
    weights = find_choice(run, export.checkpoint or END).path
    newest = evaluation_rows.evaluations_of(run)[:1]
    return {"format": export.format, "weights": _stamp(weights), "evaluation": [_stamp(path) for path in newest]}


def _stamp(path: Path) -> list[Any]:
    about = path.stat()
    return [path.name, about.st_mtime_ns, about.st_size]
