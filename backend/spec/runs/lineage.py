"""Where a cloned run comes from: parent.json in its folder, and from it the ancestors and children of any run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.spec.faults import Mistake
from backend.spec.places import RunFolder


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
        return next((RunFolder(path) for path in places if (path / "config.yaml").is_file()), None)


def read_parent(run: RunFolder) -> Parent | None:
    """The parent of a clone; None for a run that is none. Raises Mistake for a file that cannot be read."""
    try:
        kept = json.loads(run.parent.read_text(encoding="utf-8"))
        changed = {str(key): (old, new) for key, (old, new) in kept["changed"].items()}
        return Parent(str(kept["run"]), Path(kept["path"]), int(kept["step"]), bool(kept["warm"]), changed)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise Mistake("run", f"{run.parent} cannot be read, so the run {run.name} does not tell its parent.") from None


def write_parent(run: RunFolder, parent: Parent) -> None:
    """Raises OSError."""
    run.parent.write_text(json.dumps(parent.to_dict(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def ancestors(run: RunFolder) -> list[Parent]:
    """The parent, its parent and so on; ends at a run that is no clone, that is gone, or whose parent.json cannot be read."""
    found: list[Parent] = []
    seen = {run.path}
    folder: RunFolder | None = run
    while folder is not None and (parent := _parent_or_none(folder)) is not None:
        found.append(parent)
        folder = parent.folder_beside(folder)
        if folder is not None and folder.path in seen:  # files edited by hand
            break
        seen.update([folder.path] if folder else [])
    return found


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
