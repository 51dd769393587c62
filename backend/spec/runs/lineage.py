"""Where a cloned run comes from: parent.json in its folder, and by it the children of any run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.spec.faults import Mistake
from backend.spec.run_folder import RunFolder
from backend.spec.user_input.documents import read_json
from backend.spec.user_input.numbers import whole_number
from backend.spec.user_input.paths import user_path
from backend.spec.user_input.text import about_path, shown
from backend.spec.whole_file import replace_file


@dataclass(frozen=True, slots=True)
class Parent:
    """The run that a clone began from. `path`: its folder at that time. `warm`: the clone goes on from `step`; else it took the weights
    alone, and counts from 0. `changed`: key → (the parent's value at that step, the clone's)."""

    run: str
    path: Path
    step: int
    warm: bool
    changed: dict[str, tuple[Any, Any]]

    def to_dict(self) -> dict[str, Any]:
        changed = {key: list(pair) for key, pair in self.changed.items()}
        return {"run": self.run, "path": str(self.path), "step": self.step, "warm": self.warm, "changed": changed}

    def folder_beside(self, clone: RunFolder) -> RunFolder | None:
        """The parent's folder where it was, else beside the clone's, as after both were moved; None if it is gone."""
        places = (self.path, clone.path.parent / self.run)
        return next((RunFolder(path) for path in places if os.path.isfile(path / "config.yaml")), None)


def read_parent(run: RunFolder) -> Parent | None:
    """The parent of a clone; None for a run that is none. Raises Mistake for a file that cannot be read."""
    if not os.path.lexists(run.parent):
        return None
    try:
        kept = read_json(run.parent, "run")
        changed = {str(key): (old, new) for key, (old, new) in kept["changed"].items()}
        path = user_path(str(kept["path"]), "run")
        name = str(user_path(str(kept["run"]), "run"))
        return Parent(name, path, whole_number(kept["step"], "step"), bool(kept["warm"]), changed)
    except (ValueError, TypeError, KeyError, AttributeError, Mistake):
        sentence = about_path(
            run.parent, f" does not tell the parent of the run {shown(run.name, 40)}; mend or delete it."
        )
        raise Mistake("run", sentence) from None


def write_parent(run: RunFolder, parent: Parent) -> None:
    """Raises DiskFault."""
    replace_file(run.parent, json.dumps(parent.to_dict(), ensure_ascii=False, indent=1) + "\n")


def children(run: RunFolder, runs: Iterable[RunFolder]) -> list[RunFolder]:
    """Those of `runs` that were cloned from this one, in their order."""
    return [each for each in runs if _is_child(each, run)]


def _is_child(candidate: RunFolder, run: RunFolder) -> bool:
    parent = _parent_or_none(candidate)
    folder = parent.folder_beside(candidate) if parent else None
    return folder is not None and folder.path == run.path


def _parent_or_none(run: RunFolder) -> Parent | None:
    try:
        return read_parent(run)
    except Mistake:
        return None
