"""Handlers that search Hugging Face and download from it, by means of `backend.models`."""

from __future__ import annotations

import shutil
from typing import Any

from backend.serve.call import QuestionCall
from backend.spec.places import hub_cache


def hub_search(asked: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{words, repo_type: model | dataset} → {found: [a result of `backend.models.hub_search.search`, …]}."""
    from backend.models.hub_search import search

    return {"found": search(asked["words"], asked.get("repo_type", "model"))}


def hub_files(asked: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{id, repo_type} → {commit, files: {name: bytes}, total, free}: what a download fetches, and free bytes on disk."""
    from backend.models.hub_search import plan

    download_plan = plan(asked["id"], asked.get("repo_type", "model"))
    # The cache may not have been made yet; the nearest folder above it is on the same disk.
    existing = next(folder for folder in (hub_cache(), *hub_cache().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    return {"commit": download_plan.commit, "files": download_plan.files, "total": download_plan.total, "free": free}


def download(asked: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{id, repo_type} → {place: folder}. Reports {done, total, phase}. Cancelled, it keeps what has arrived."""
    from backend.models.hub_download import download as fetch

    return {"place": str(fetch(asked["id"], asked.get("repo_type", "model"), call))}


def discard(asked: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{id, repo_type} → {freed: bytes}. Deletes what an unfinished download left behind."""
    from backend.models.hub_download import discard as delete_partial

    return {"freed": delete_partial(asked["id"], asked.get("repo_type", "model"))}
