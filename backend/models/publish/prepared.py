"""What is about to be uploaded: the model's files, its card, curves and settings in a folder, looked at before anything leaves.

It lies in the run, under uploads/OWNER--NAME. The record beside it is written last and says what it was made from: while that has not
changed, the folder is sent as it is, so a card that a person has edited there stays edited.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from backend.models.publish.card import CURVES_FILE, SETTINGS_FILE, model_card
from backend.models.publish.card_facts import CURVES, CardFacts
from backend.models.publish.curves import draw_curves
from backend.models.publish.privacy import clean_json_files, refuse_leaks
from backend.models.publish.upload import files_of
from backend.spec.faults import Mistake
from backend.spec.run_folder import RunFolder
from backend.spec.whole_file import replace_file

CARD = "README.md"


@dataclass(frozen=True, slots=True)
class PreparedUpload:
    """A complete folder, ready to be sent."""

    repo_id: str
    folder: Path

    @property
    def card(self) -> str:
        return (self.folder / CARD).read_text(encoding="utf-8")

    def files(self) -> list[tuple[str, int]]:
        """(name, bytes) of each file, largest first."""
        found = ((path.relative_to(self.folder).as_posix(), path.stat().st_size) for path in files_of(self.folder))
        return sorted(found, key=lambda row: (-row[1], row[0]))

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.files())

    def to_dict(self) -> dict[str, Any]:
        files = [{"name": name, "bytes": size} for name, size in self.files()]
        return {
            "repo": self.repo_id,
            "folder": str(self.folder),
            "bytes": self.bytes,
            "files": files,
            "card": self.card,
        }

    def discard(self) -> None:
        """Delete it, once it was sent or another takes its place."""
        _record(self.folder).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def check_repo_id(repo_id: str) -> None:
    """Raise Mistake for what cannot be the name of a repository."""
    try:
        validate_repo_id(repo_id)
        is_valid = repo_id.count("/") == 1
    except HFValidationError:
        is_valid = False
    if not is_valid:
        raise Mistake(
            "repo",
            f"{repo_id or 'Nothing'} cannot be the name of a repository: write owner/name, of letters, digits, -, _ and full stops.",
        )


def folder_for(run: RunFolder, repo_id: str) -> Path:
    return run.uploads / repo_id.replace("/", "--")


def find_prepared(run: RunFolder, repo_id: str, made_from: Mapping[str, Any]) -> PreparedUpload | None:
    """The folder that was prepared from the same things; None where there is none."""
    folder = folder_for(run, repo_id)
    try:
        record = json.loads(_record(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return PreparedUpload(repo_id, folder) if record == dict(made_from) and (folder / CARD).is_file() else None


def finish_preparing(folder: Path, facts: CardFacts, made_from: Mapping[str, Any]) -> PreparedUpload:
    """Add card, curves and settings to a folder with the model's files, and clean it of this machine's paths. Raises Mistake where
    something is left that must not leave."""
    clean_json_files(folder, facts.base)
    draw_curves(facts.curves, CURVES, folder / CURVES_FILE)
    (folder / SETTINGS_FILE).write_text(facts.settings, encoding="utf-8")
    (folder / CARD).write_text(model_card(facts), encoding="utf-8")
    refuse_leaks(folder)
    replace_file(_record(folder), json.dumps(dict(made_from)))
    return PreparedUpload(facts.repo_id, folder)


def _record(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")
