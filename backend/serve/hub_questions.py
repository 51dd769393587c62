"""Questions about Hugging Face."""

from __future__ import annotations

import shutil
from typing import Any

from backend.serve.call import QuestionCall
from backend.spec.places import hub_cache


def hub_search(asked: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{words, repo_type: model | dataset} → {found: [what `backend.models.hub_search.search` gives, …]}."""
    from backend.models.hub_search import search

    return {"found": search(asked["words"], asked.get("repo_type", "model"))}


def hub_files(asked: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{id, repo_type} → {commit, files: {name: bytes}, total, free}: what a download would bring, and the room for it."""
    from backend.models.hub_search import plan

    found = plan(asked["id"], asked.get("repo_type", "model"))
    place = next(folder for folder in (hub_cache(), *hub_cache().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    return {"commit": found.commit, "files": found.files, "total": found.total, "free": free}


def download(asked: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{id, repo_type} → {place}, after progress {done, total, phase}. Taken back, it keeps what has arrived."""
    from backend.models.hub_download import download as fetch

    return {"place": str(fetch(asked["id"], asked.get("repo_type", "model"), call))}


def discard(asked: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{id, repo_type} → {freed: bytes}: what an unfinished download left behind is thrown away."""
    from backend.models.hub_download import discard as throw_away

    return {"freed": throw_away(asked["id"], asked.get("repo_type", "model"))}
