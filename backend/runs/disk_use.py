"""The disk space of a run, part by part, and its checkpoints that can be deleted: all but the best and the newest."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from backend.runs.run_folder import RunFolder, hold_lock
from backend.runs.saved_weights import Checkpoint, all_checkpoints, best_of
from backend.utils.errors import UserError
from backend.utils.files import remove_tree, walk

PARTS = {
    "checkpoints": "Checkpoints",
    "adapters": "Adapters",
    "model": "Model",
    "fused": "Fused model",
    "completions.jsonl": "Completions",
    "events.jsonl": "Event log",
    "evaluations": "Evaluations",
    "uploads": "Uploads",
    "log.txt": "Log",
    "other": "Other",
}
"""File or folder of a run → its title."""
_DELETED = ".deleted-"  # prefix of a checkpoint whose files are being deleted


def disk_use(run: RunFolder) -> dict[str, int]:
    """Part (a key of PARTS) → bytes, the largest first. Links are not followed."""
    sizes: Counter[str] = Counter()
    start = len(os.fspath(run.path)) + 1
    for path, size in _files(run.path):
        part = path[start:].split(os.sep, 1)[0]
        sizes[part if part in PARTS else "other"] += size
    return {part: size for part, size in sizes.most_common() if size}


def _files(folder: Path) -> Iterable[tuple[str, int]]:
    for entry in walk(folder):
        try:
            if not entry.is_dir(follow_symlinks=False):
                yield entry.path, entry.stat(follow_symlinks=False).st_size
        except OSError:  # deleted meanwhile
            continue


def _folder_size(folder: Path) -> int:
    return sum(size for _, size in _files(folder))


def spare_checkpoints(run: RunFolder) -> list[Checkpoint]:
    """Complete checkpoints that are neither the best nor the newest, oldest first."""
    checkpoints = all_checkpoints(run)
    kept = [best_of(checkpoints), *checkpoints[-1:]]
    return [saved for saved in checkpoints if saved not in kept]


@dataclass(frozen=True, slots=True)
class FreeableSpace:
    """The checkpoints that `free_space` would delete of a run."""

    run: RunFolder
    checkpoints: tuple[Checkpoint, ...]
    bytes: int


def freeable_space(runs: Iterable[RunFolder]) -> list[FreeableSpace]:
    """The runs that have checkpoints to spare and are not being trained, the largest saving first."""
    found: list[FreeableSpace] = []
    for run in runs:
        spare = spare_checkpoints(run)
        if spare and not run.is_locked():
            found.append(FreeableSpace(run, tuple(spare), sum(_folder_size(saved.path) for saved in spare)))
    return sorted(found, key=lambda space: -space.bytes)


def free_space(run: RunFolder) -> int:
    """Delete a run's checkpoints but the best and the newest; returns the bytes freed. A checkpoint is renamed before
    its files are deleted, so none is ever half there. Raises UserError."""
    handle = hold_lock(run)
    before = _folder_size(run.checkpoints)
    try:
        for saved in spare_checkpoints(run):
            saved.path.rename(saved.path.with_name(f"{_DELETED}{saved.path.name}"))
        for folder in run.checkpoints.glob(f"{_DELETED}*"):  # also of a deletion that was killed
            remove_tree(folder)
    except OSError as error:
        raise UserError("run", f"A checkpoint of {run.name} cannot be deleted: {error.strerror}.") from None
    finally:
        os.close(handle)
    return before - _folder_size(run.checkpoints)
