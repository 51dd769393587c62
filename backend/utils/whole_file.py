"""Files and folders that are never seen half written: made beside their place, put on disk, renamed.

A reader finds the old content or the new one, also after a kill or a power cut. A failure raises DiskError and leaves
the old content; drafts of a killed process are deleted by the next one that writes the same name. A draft's name can be
guessed, so what lies there already, such as a link into another folder, is deleted and never written through.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Generator, Iterable
from pathlib import Path

from backend.utils.disk_faults import writing
from backend.utils.file_lock import is_alive
from backend.utils.files import remove_tree

COPIED_AT_ONCE = 1 << 20


def replace_file(path: Path, content: str | Iterable[bytes], *, mode: int | None = None) -> None:
    """Write a file anew, with the rights `mode`, or those that it has, or those of a new file. Raises DiskError.

    Half of a surrogate pair, which UTF-8 cannot hold, is written as JSON writes it.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        clear_drafts(path.parent, path.name)
        if mode is None and path.is_file():
            mode = stat.S_IMODE(path.stat().st_mode)
        try:
            with os.fdopen(_create(draft, mode), "wb") as file:
                file.writelines(_blocks(content))
                file.flush()
                os.fsync(file.fileno())  # before the rename: a power cut must not leave an empty file of the new name
            draft.replace(path)
        finally:
            # As a rule it was renamed; another failure here would hide the one that is being reported.
            with contextlib.suppress(OSError):
                draft.unlink()
        sync(path.parent)  # a rename is data of the folder


def _blocks(content: str | Iterable[bytes]) -> Iterable[bytes]:
    return [content.encode(errors="backslashreplace")] if isinstance(content, str) else content


def _create(draft: Path, mode: int | None) -> int:
    draft.unlink(missing_ok=True)  # a link itself, not what it leads to
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(draft, flags, 0o666 if mode is None else mode)
    if mode is not None:
        with contextlib.suppress(OSError):  # a disk without rights
            os.fchmod(handle, mode)  # the umask may have taken some of it
    return handle


def save_as(path: Path, content: str | Iterable[bytes]) -> None:
    """`replace_file` for a place that a person chose, which may be a link, a device or a pipe. Raises DiskError."""
    if not path.exists() or path.is_file():
        return replace_file(Path(os.path.realpath(path)), content)
    with writing(path), path.open("wb") as file:
        file.writelines(_blocks(content))


def copy_file(source: Path, target: Path) -> None:
    """Replace `target` by the content of `source`. Raises DiskError naming the target."""
    with writing(target), source.open("rb") as file:
        replace_file(target, iter(lambda: file.read(COPIED_AT_ONCE), b""))


@contextlib.contextmanager
def whole_folder(final: Path) -> Generator[Path]:
    """An empty folder beside `final` to be filled, which then takes its place. Raises DiskError; an old one stays then.

    One process at a time writes a folder. An old one is moved aside between two renames, since rename(2) replaces an
    empty folder only.
    """
    draft, old = final.with_name(f".{final.name}"), _aside(final)
    with writing(final):
        for leftover in (draft, old):  # of a killed process
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
            if old.exists() and not final.exists():
                old.rename(final)
            raise
        sync(final.parent)
    remove_tree(old)


def remove_folder(path: Path) -> None:
    """Delete a folder whose name says that it is whole: it loses that name before its first file. Never raises."""
    old = _aside(path)
    remove_tree(old)
    with contextlib.suppress(OSError):
        path.rename(old)
        remove_tree(old)


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


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def clear_drafts(folder: Path, of: str = "") -> None:
    """Delete drafts of dead processes that `replace_file` left in a folder, or those `of` one file. Raises OSError."""
    for name in os.listdir(folder):
        file, _, number = name.removeprefix(".").rpartition(".")
        is_draft = name.startswith(".") and file and number.isdecimal() and file == (of or file)
        if is_draft and not is_alive(int(number)):
            (folder / name).unlink(missing_ok=True)
