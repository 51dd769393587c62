"""Handlers that list models and datasets on this machine, Hugging Face's cache included."""

from __future__ import annotations

from typing import Any

from backend.models import inventory
from backend.serve.question_call import QuestionCall
from backend.utils.files import names_folder
from backend.utils.hub_cache import RepoType, local_folder


def models(request: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{paths: [folder, …]} → {found: [an InventoryItem as a dict, …]}, the bundled model last."""
    return _found(inventory.models(request.get("paths", ())), "model")


def datasets(request: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{paths: [path, …]} → {found: [an InventoryItem as a dict, …]}, the bundled dataset last."""
    return _found(inventory.datasets(request.get("paths", ())), "dataset")


def _found(items: list[inventory.InventoryItem], repo_type: RepoType) -> dict[str, Any]:
    bundled = inventory.bundled(repo_type)
    return {"found": [item.to_dict() for item in (*(item for item in items if item.place != bundled.place), bundled)]}


def model_facts(request: dict[str, Any], call: QuestionCall) -> dict[str, Any] | None:
    """{name: id or path} → its InventoryItem; None where it is not on this machine, or not all of it."""
    folder = local_folder(request["name"])
    if folder is None:
        return None
    name = request["name"]
    is_path = names_folder(name)
    if not is_path and inventory.is_incomplete(folder):
        return None
    return inventory.model_at(folder, "" if is_path else name, "folder" if is_path else "cache", name).to_dict()
