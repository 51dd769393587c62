"""Handlers that search Hugging Face, download from it and log in to it, by means of `backend.models`."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from typing import Any

from backend.serve.question_call import QuestionCall
from backend.utils.hub_cache import hub_cache


def hub_search(request: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{words, repo_type: model | dataset} → {found: [a result of `backend.models.hub.search`, …]}."""
    from backend.models.hub import search

    return {"found": search(request["words"], request.get("repo_type", "model"))}


def hub_files(request: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{id, repo_type} → {commit, files: {name: bytes}, total, free}: the content of a download, and free bytes on disk."""
    from backend.models.hub import plan

    download_plan = plan(request["id"], request.get("repo_type", "model"))
    # The cache may not exist yet; the nearest folder above it is on the same disk.
    existing = next(folder for folder in (hub_cache(), *hub_cache().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    return {"commit": download_plan.commit, "files": download_plan.files, "total": download_plan.total, "free": free}


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
