"""Writing to disks: files and folders that are never seen half written, why a write failed, and free space.

A file or folder is made beside its place, put on disk, and renamed, so a reader finds the old content or the new one,
also after a kill or a power cut. A failure raises DiskError and leaves the old content; drafts of a killed process are
deleted by the next one that writes the same name. A draft's name can be guessed, so what lies there already, such as a
link into another folder, is deleted and never written through.

Code that writes a file of a run does so inside `writing`. A full disk is no bug: the run ends with a message and exit
code 2, its last checkpoint stands, and it can be resumed once there is room.
"""

import errno
import os
import shutil
import stat
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

from backend.utils.errors import UserError
from backend.utils.file_lock import is_alive
from backend.utils.files import reason, remove_tree
from backend.utils.text import quote

LONGEST_PLACE = 110

CAUSES = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the disk is read-only",
    errno.ENOENT: "its folder is not there any more",
    errno.ENOTDIR: "a file of its folder's name is in the way",
    errno.EEXIST: "a file of its folder's name is in the way",
    errno.EISDIR: "a folder of that name is in the way",
}  # where the system's own words say less

OF_DISKS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG, errno.ESTALE, errno.EMFILE, errno.ENFILE),
)  # errors that no program can cause by a wrong call: wherever they come from, the disk or its limits are at fault
MLX_WRITING = ("[write]", "[save_safetensors]", "[save]", "[load] Failed to write")
"""Beginnings of mlx's RuntimeErrors for a file that it could not write; they keep no errno."""


class DiskError(UserError):
    """A file could not be written. Its setting is "disk"."""

    def __init__(self, sentence: str) -> None:
        super().__init__("disk", sentence)


def disk_fault(path: Path, error: BaseException) -> DiskError:
    """The error for a file that could not be written because of `error`."""
    return DiskError(f"{quote(path, LONGEST_PLACE)} cannot be written: {cause(error)}.")


def cause(error: BaseException) -> str:
    """Why a file could not be written, as the end of a sentence."""
    if not isinstance(error, OSError):
        return f"mlx reports {quote(str(error).rstrip('.'))}"
    return CAUSES.get(error.errno or 0) or reason(error)


def is_of_mlx(error: RuntimeError) -> bool:
    """True if mlx could not write a file; its other RuntimeErrors are about the GPU or the arrays."""
    return str(error).startswith(MLX_WRITING)


@contextmanager
def writing(path: Path, *, also_computes: bool = False) -> Generator[None]:
    """Turn errors of the block, which writes `path`, into DiskError; if it also computes, errors of disks only."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if fault_of(error) is None and (also_computes or not isinstance(error, OSError)):
            raise
        raise disk_fault(path, error) from error


def fault_of(error: BaseException) -> DiskError | None:
    """The disk's fault behind an error of code that does not use `writing`; None for what may be a bug."""
    is_of_disk = isinstance(error, OSError) and error.errno in OF_DISKS
    if not is_of_disk and not (isinstance(error, RuntimeError) and is_of_mlx(error)):
        return None
    name = getattr(error, "filename", None)
    if not isinstance(name, str | bytes):
        return DiskError(f"A file cannot be written: {cause(error)}.")
    return DiskError(f"{quote(Path(os.fsdecode(name)), LONGEST_PLACE)} cannot be used: {cause(error)}.")


def replace_file(path: Path, content: str | Iterable[bytes], *, mode: int | None = None) -> None:
    """Replace a file, by default with the permissions that it has. A lone surrogate is escaped. Raises DiskError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        clear_drafts(path.parent, path.name)
        draft.unlink(missing_ok=True)  # a link itself, not what it leads to
        if mode is None and path.is_file():
            mode = stat.S_IMODE(path.stat().st_mode)
        try:
            handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
            with os.fdopen(handle, "wb") as file:
                if mode is not None:
                    with suppress(OSError):  # a disk without rights
                        os.fchmod(handle, mode)  # the umask may have taken some of it
                file.writelines(_blocks(content))
                file.flush()
                os.fsync(handle)  # before the rename: a power cut must not leave an empty file of the new name
            draft.replace(path)
        finally:
            # As a rule it was renamed; another failure here would hide the one that is being reported.
            with suppress(OSError):
                draft.unlink()
        sync(path.parent)  # a rename is data of the folder


def _blocks(content: str | Iterable[bytes]) -> Iterable[bytes]:
    return [content.encode(errors="backslashreplace")] if isinstance(content, str) else content


def save_as(path: Path, content: str | Iterable[bytes]) -> None:
    """`replace_file` for a place that a person chose, which may be a link, a device or a pipe. Raises DiskError."""
    if not path.exists() or path.is_file():
        return replace_file(Path(os.path.realpath(path)), content)
    with writing(path), path.open("wb") as file:
        file.writelines(_blocks(content))


@contextmanager
def whole_folder(final: Path) -> Generator[Path]:
    """An empty folder beside `final` to be filled, which then takes its place. Raises DiskError; an old one stays then.
    An old one is moved aside between two renames, and of a process killed there it gets its name back first."""
    draft, old = final.with_name(f".{final.name}"), final.with_name(f".{final.name}.old")
    with writing(final):
        restore_folder(final)
        for leftover in (draft, old, _deleted(final)):  # of a killed process
            remove_tree(leftover)
        draft.mkdir(parents=True)
        try:
            yield draft
            sync_tree(draft)
            if final.exists():
                final.rename(old)
            draft.rename(final)
        except BaseException:
            remove_tree(draft)
            restore_folder(final)
            raise
        sync(final.parent)
    remove_tree(old)


def restore_folder(final: Path) -> None:
    """Give a folder its name back that `whole_folder` had moved aside when its process was killed. Raises OSError."""
    old = final.with_name(f".{final.name}.old")
    if old.exists() and not final.exists():
        old.rename(final)


def remove_folder(path: Path) -> None:
    """Delete a folder whose name says that it is whole: it loses that name before its first file. Never raises."""
    remove_tree(_deleted(path))
    with suppress(OSError):
        path.rename(_deleted(path))
        remove_tree(_deleted(path))


def _deleted(path: Path) -> Path:
    return path.with_name(f".{path.name}.deleted")


def sync(path: Path) -> None:
    """fsync a file or a folder. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(top: Path) -> None:
    """fsync a folder and all that is in it, before a rename gives it its name. Raises OSError."""
    for folder, _, files in os.walk(top):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))  # its entries: else the rename may survive a power cut and the files not


def clear_drafts(folder: Path, of: str = "") -> None:
    """Delete drafts of dead processes that `replace_file` left in a folder, or those `of` one file. Raises OSError."""
    for name in os.listdir(folder):
        file, _, number = name.removeprefix(".").rpartition(".")
        is_draft = name.startswith(".") and file and number.isdecimal() and file == (of or file)
        if is_draft and not is_alive(int(number)):
            (folder / name).unlink(missing_ok=True)


def room_on(folder: Path) -> int | None:
    """Free bytes on the disk of `folder`, which need not exist yet; None where the system does not say."""
    try:
        return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    except (OSError, StopIteration):
        return None


def require_room(path: Path, needed: int, what: str) -> None:
    """Raise DiskError unless the disk of `path` has `needed` bytes free for `what`, as far as the system says."""
    room = room_on(path)
    if room is not None and room < needed:
        where = f"on the disk of {quote(path, LONGEST_PLACE)}, which has {gigabytes(room)} free"
        raise DiskError(f"{what} needs {gigabytes(needed)} {where}.")


def gigabytes(size: float) -> str:
    """A number of bytes for people, in decimal units as systems show disks, with three digits."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= 0.9995 * factor:  # what would be 1000 of the next unit
            return f"{size / factor:.3g} {unit}" if size < 999.5 * factor else f"{size / factor:,.0f} {unit}"
    return f"{size / 1e3:.3g} kB"
