"""Write a folder atomically: build it in a hidden staging folder, then rename it to its target."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from backend.utils import file_lock
from backend.utils.disk import LONGEST_PLACE, gigabytes, sync, sync_tree
from backend.utils.errors import UserError
from backend.utils.text import quote


@contextlib.contextmanager
def staging_folder(parent: Path, target: Path, made_by: str = "export") -> Iterator[Path]:
    """Yield an empty hidden folder in `parent`; a lock keeps two exports of one `target` apart.

    Clears what a killed export left. Raises UserError if the target is being exported or `parent` is not writable.
    """
    folder = parent / f".grpo-studio-{target.name}"
    try:
        folder.mkdir(exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)  # flock works on a folder too
    except FileNotFoundError:
        raise UserError(made_by, f"The folder {parent} is not there any more.") from None
    except OSError as error:
        raise UserError(made_by, f"The folder {parent} cannot be written: {error.strerror}.") from None
    try:
        # Without waiting: an export takes minutes, so a message is more use than a silent wait.
        if not file_lock.take(lock):
            raise UserError(made_by, f"{target} is being written by another process; wait for that one.")
        _clear_staging(folder, target)
        try:
            yield folder
        finally:
            # The next export deletes what cannot be deleted now. If the folder itself was moved to its place, one of
            # this name is another process's.
            with contextlib.suppress(OSError):
                if file_lock.leads_to(folder, lock):
                    _clear_staging(folder, target)
                    folder.rmdir()
    finally:
        os.close(lock)


def _clear_staging(folder: Path, target: Path) -> None:
    if os.path.lexists(folder / "previous") and not os.path.lexists(target):
        (folder / "previous").rename(target)
    for child in folder.iterdir():
        # rmtree refuses a symlink; unlink removes the link and not the folder that it points to.
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()


def move_into_place(new: Path, target: Path, *, overwrite: bool) -> None:
    """Move the finished folder to `target`, across disks through a staging folder. Raises as `check_target`."""
    parent = nearest_existing(target.parent)
    if device_of(new) == device_of(parent):
        return _rename(new, target, overwrite)
    check_free_space(parent, folder_bytes(new))
    with staging_folder(parent, target) as staging:
        # copyfile drops extended attributes, which some disks turn into ._ files.
        shutil.copytree(new, staging / "new", copy_function=shutil.copyfile)
        _rename(staging / "new", target, overwrite)


def _rename(new: Path, target: Path, overwrite: bool) -> None:
    check_target(target, overwrite=overwrite)
    drop_hidden_files(new)
    new_parents = [folder for folder in target.parents if not folder.exists()]
    sync_tree(new)  # a power cut must not leave a model of empty files, least of all in place of an old one
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # rename(2) replaces an empty folder only, so the old one moves aside; if the process dies before the next line,
        # `_clear_staging` restores it. lexists, because a dangling symlink is in the way too.
        if os.path.lexists(target):
            target.rename(new.parent / "previous")
        new.rename(target)
        sync(target.parent)
    except BaseException:
        for folder in new_parents:  # innermost first; rmdir spares those that are no longer empty
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def drop_hidden_files(folder: Path) -> None:
    """Delete the ._ files and .DS_Store that macOS adds."""
    for hidden in folder.glob(".*"):
        hidden.unlink()


def check_target(target: Path, *, overwrite: bool) -> None:
    """Raise UserError if `target` exists, unless it is a model and may be overwritten."""
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise UserError("overwrite", f"There is a model at {target} already; choose another name, or overwrite it.")
    if not any((target / name).is_file() for name in ("config.json", "adapter_config.json", "model.gguf")):
        other = f"{target} is there and holds no model, so it is not replaced"
        raise UserError("overwrite", f"{other}; choose another name.")


def staging_parent(target: Path, candidates: Sequence[Path]) -> Path:
    """First writable candidate on the disk of `target`, else the last one."""
    disk = device_of(target)
    suitable = (folder for folder in candidates if os.access(folder, os.W_OK) and device_of(folder) == disk)
    return next(suitable, candidates[-1])


def check_free_space(folder: Path, needed: int) -> None:
    """Raise UserError unless the disk of `folder` has `needed` bytes free."""
    free = shutil.disk_usage(nearest_existing(folder)).free
    if needed > free:
        disk = f"the disk of {quote(folder, LONGEST_PLACE)} has {gigabytes(free)} free"
        raise UserError("export", f"The model needs {gigabytes(needed)} and {disk}.")


def nearest_existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def device_of(folder: Path) -> int:
    return nearest_existing(folder).stat().st_dev


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
