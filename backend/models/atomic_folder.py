"""How a finished folder gets to its place: built in a hidden folder, moved in by one rename, or not at all.

Knows folders, disks and locks, not what is in them. Nothing is replaced unless told to, and what was to be replaced
comes back when the replacement fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from backend.spec.faults import Mistake


@contextlib.contextmanager
def stage(parent: Path, target: Path) -> Iterator[Path]:
    """An empty hidden folder in `parent` to build `target` in; it is gone afterwards, whatever happens.

    Its name is always the same, and the lock on it dies with its process: so what a killed export left is found and
    cleared by the next, and two exports of one model cannot meet. Raises Mistake when they would, or when `parent`
    cannot be written.
    """
    folder = parent / f".grpo-studio-{target.name}"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise Mistake("export", f"The folder {parent} cannot be written: {error.strerror}.") from None
    lock = os.open(folder, os.O_RDONLY)
    try:
        _hold(lock, target)
        _clear(folder, target)
        try:
            yield folder
        finally:
            _clear(folder, target)
            folder.rmdir()
    finally:
        os.close(lock)


def _hold(lock: int, target: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Mistake("export", f"{target} is being exported by another process; wait for that one.") from None


def _clear(folder: Path, target: Path) -> None:
    """Empty a stage. A model that was moved aside and not replaced goes back first; if it cannot, nothing is deleted."""
    if os.path.lexists(folder / "previous") and not os.path.lexists(target):
        (folder / "previous").rename(target)
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()


def publish(new: Path, target: Path, *, overwrite: bool) -> None:
    """Bring the finished folder `new`, which stands in a stage, to `target`. Raises Mistake as `refuse_taken`.

    One rename where both are on one disk; from another disk, a copy to a hidden neighbour of `target` comes first.
    """
    near = existing(target.parent)
    if disk(new) == disk(near):
        return _swap_in(new, target, overwrite)
    check_room(near, folder_bytes(new))
    with stage(near, target) as here:
        shutil.copytree(new, here / "new", copy_function=shutil.copyfile)
        _swap_in(here / "new", target, overwrite)


def _swap_in(new: Path, target: Path, overwrite: bool) -> None:
    """Rename `new` to `target`. What stands there steps aside into the stage, which puts it back or deletes it."""
    refuse_taken(target, overwrite=overwrite)
    for hidden in new.glob(".*"):  # macOS writes ._ files by itself on disks that know no extended attributes
        hidden.unlink()
    made = [folder for folder in target.parents if not folder.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(target):
            target.rename(new.parent / "previous")
        new.rename(target)
    except BaseException:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def refuse_taken(target: Path, *, overwrite: bool) -> None:
    """Raise Mistake when something stands at `target`, unless it is a model and may be overwritten."""
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise Mistake("overwrite", f"There is a model at {target} already; choose another name, or overwrite it.")
    if not (target / "config.json").is_file():
        raise Mistake("overwrite", f"{target} is there and holds no model, so it is not replaced; choose another name.")


def workshop(near: Path, candidates: Sequence[Path]) -> Path:
    """The first candidate that can be written and is on the disk of `near`; if none is, the last one."""
    fit = (one for one in candidates if os.access(one, os.W_OK) and disk(one) == disk(near))
    return next(fit, candidates[-1])


def check_room(folder: Path, needed: int) -> None:
    """Raise Mistake unless the disk of `folder` has `needed` bytes free."""
    free = shutil.disk_usage(existing(folder)).free
    if needed > free:
        raise Mistake(
            "export", f"The model needs {needed / 1e9:.2f} GB and the disk of {folder} has {free / 1e9:.2f} GB free."
        )


def existing(folder: Path) -> Path:
    """`folder`, or the nearest folder above it that is there."""
    return next(one for one in (folder, *folder.parents) if one.exists())


def disk(folder: Path) -> int:
    return existing(folder).stat().st_dev


def folder_bytes(folder: Path) -> int:
    """Bytes of the files right inside `folder`."""
    return sum(file.stat().st_size for file in folder.iterdir())
