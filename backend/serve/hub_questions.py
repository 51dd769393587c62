"""Handlers that search Hugging Face, download from it and log in to it, by means of `backend.models`."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backend.distributed.hosts_file import parse_hosts
from backend.models import inventory
from backend.models.peft_import import import_adapter as carry
from backend.runs.saved_weights import imported_folder
from backend.serve.questions import QuestionCall
from backend.utils.about import is_newer, our_version, release_in
from backend.utils.disk import room_on
from backend.utils.errors import UserError
from backend.utils.files import names_folder, resolved
from backend.utils.hub_cache import RepoType, hub_cache, local_folder


def hub_search(request: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{words, repo_type: model | dataset, is_reward?} → {found: [a result of `backend.models.hub.search`, …]}."""
    from backend.models.hub import search

    is_reward = bool(request.get("is_reward"))
    return {"found": search(request["words"], request.get("repo_type", "model"), is_reward=is_reward)}


def hub_files(request: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{id, repo_type} → {commit, files: {name: bytes}, total, free bytes on disk}: the content of a download."""
    from backend.models.hub import plan

    download_plan = plan(request["id"], request.get("repo_type", "model"))
    files = download_plan.files
    free = room_on(hub_cache())
    return {"commit": download_plan.commit, "files": files, "total": sum(files.values()), "free": free}


def download(request: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{id, repo_type} → {place: folder}. Reports {done, total, phase}. A cancelled download keeps its partial files."""
    from backend.models.hub import download as fetch

    return {"place": str(fetch(request["id"], request.get("repo_type", "model"), call))}


def discard(request: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{id, repo_type} → {freed: bytes}. Deletes the partial files of an unfinished download."""
    from backend.models.hub import discard as delete_partial

    return {"freed": delete_partial(request["id"], request.get("repo_type", "model"))}


def hub_login(request: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{token} → {name, organisations, can_write, source}: whose it is, once it is in the system's keychain."""
    from backend.export.hub_upload import log_in

    return asdict(log_in(str(request["token"])))


def hub_account(request: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{} → as `hub_login`; {source, problem} where nobody can say whose token it is; {} without a token."""
    from backend.export.hub_upload import find_token, whose

    token = find_token()
    try:
        return asdict(whose(token)) if token is not None else {}
    except UserError as error:
        return {"source": token.source if token is not None else "", "problem": error.faults[0].sentence}


def hub_hardware(request: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{} → {hardware: [a `backend.jobs.hub_jobs.Hardware` as a dict, …]}: GPUs for jobs, cheapest first."""
    from backend.jobs.hub_jobs import hardware

    return {"hardware": [asdict(each) for each in hardware()]}


def models(request: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{paths: [folder, …]} → {found: [an InventoryItem as a dict, …]}, the bundled model last."""
    return _found(inventory.models(request.get("paths", ())), "model")


def reward_models(request: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{paths: [folder, …]} → {found: [an InventoryItem as a dict, …]}."""
    return {"found": [asdict(item) for item in inventory.reward_models(request.get("paths", ()))]}


def datasets(request: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{paths: [path, …]} → {found: [an InventoryItem as a dict, …]}, the bundled dataset last."""
    return _found(inventory.datasets(request.get("paths", ())), "dataset")


def _found(items: list[inventory.InventoryItem], repo_type: RepoType) -> dict[str, Any]:
    bundled = inventory.bundled(repo_type)
    others = [item for item in items if item.place != bundled.place]
    return {"found": [asdict(item) for item in (*others, bundled)]}


def model_facts(request: dict[str, Any], call: QuestionCall) -> dict[str, Any] | None:
    """{name: id or path} → its InventoryItem; None where it is not on this machine, or not all of it."""
    folder = local_folder(request["name"])
    if folder is None:
        return None
    name, is_path = request["name"], names_folder(request["name"])
    if not is_path and inventory.is_incomplete(folder):
        return None
    return asdict(inventory.model_at(folder, "" if is_path else name, "folder" if is_path else "cache", name))


def check_machines(request: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{hosts: the content of a hosts file, name, backend, model, reward_file, copies} → a MachineReport as a mapping.
    Reports {rank, stage, share}. A cancelled check leaves no process, and of a copy what has arrived."""
    from backend.distributed.machine_check import check_machines

    name = str(request["name"])
    hosts = parse_hosts(request["hosts"], name)
    wanted = {key: request[key] for key in ("backend", "model", "reward_file", "copies")}

    def reached(rank: int, stage: str, share: float | None) -> None:
        call.report({"rank": rank, "stage": stage, "share": share})

    return asdict(check_machines(hosts, name, **wanted, reached=reached, check=call.check))


TIMEOUT_S = 10.0
MOST_BYTES = 4 << 20


def newer_release(request: dict[str, Any], call: QuestionCall) -> dict[str, str] | None:
    """{feed: address} → {version, page} of a release that is newer than this program; None where there is none."""
    address = str(request["feed"])
    if not address.startswith(("https://", "http://127.0.0.1", "http://localhost")):
        raise UserError("updates", "The list of releases must have an address that begins with https://.")
    asked = urllib.request.Request(address, headers={"User-Agent": "grpo-studio", "Accept": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
            content = answer.read(MOST_BYTES + 1)
    except Exception as error:  # of any kind: urllib parses what a server answered
        reason = getattr(error, "reason", None) or error
        raise UserError("updates", f"The list of releases cannot be read: {reason}.") from None
    if len(content) > MOST_BYTES:
        raise UserError("updates", "The list of releases is too large to be one.")
    try:
        release = release_in(json.loads(content))
    except (ValueError, RecursionError):
        raise UserError("updates", "The list of releases is not JSON.") from None
    return release if is_newer(release["version"], our_version()) else None


def import_adapter(request: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{folder, model: id or path} → {path: the new folder beside it, sentences}. Replaces an earlier import."""

    def report(sentence: str, done: float | None = None) -> None:
        call.check()
        call.report({"sentence": sentence, "done": done})

    folder = resolved(Path(request["folder"]))
    imported = carry(folder, request["model"], imported_folder(folder), overwrite=True, progress=report)
    return {"path": str(imported.path), "sentences": imported.sentences()}
