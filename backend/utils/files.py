"""Files that a user named: regular files of a limited size, read whole."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO, TypeGuard

from backend.utils.errors import UserError
from backend.utils.text import quote

# Paths that a user supplied, and why the system could not use one.

LONGEST_NAME = 255
"""Bytes of one part of a path, on every file system in use."""
LONGEST_PATH = 1023 if sys.platform == "darwin" else 4095
"""Bytes of a whole path: PATH_MAX without its final NUL."""


def user_path(text: str, setting: str, base: Path | None = None) -> Path:
    """The path that a user wrote, with ~ expanded and, where it is relative, below `base`. Looks at no file.

    Raises UserError for a NUL, a lone surrogate (bytes that are no UTF-8 text; no config.yaml could name them), a user
    that this machine does not have, and a name or path that no file system takes.
    """
    if "\0" in text:
        raise UserError(setting, f"{quote(text)} cannot be a path: it contains a NUL character.")
    if not is_text(text):
        raise UserError(setting, f"{quote(text)} cannot be a path: it contains characters that are not valid text.")
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # pathlib's answer for an unknown user, and for a user without a home
        user = quote(Path(text).parts[0], 40)
        raise UserError(setting, f"{quote(text)} cannot be a path: this machine has no home folder {user}.") from None
    path = path if base is None else base / path
    too_long = next((part for part in path.parts if len(os.fsencode(part)) > LONGEST_NAME), None)
    if too_long is not None:
        raise UserError(
            setting, f"{quote(too_long, 40)} cannot be a file's name: it is longer than {LONGEST_NAME} bytes."
        )
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise UserError(setting, f"{quote(text)} cannot be a path: it is longer than {LONGEST_PATH} bytes.")
    return path


def possible_path(text: str) -> Path | None:
    """`user_path` for a text that may be something else than a path, such as an id; None where it can be none."""
    try:
        return user_path(text, "")
    except UserError:
        return None


def resolved(path: Path) -> Path:
    """`path.resolve()`, which before Python 3.13 raises RuntimeError for a link that leads to itself; that one stays as
    it is."""
    return Path(os.path.realpath(path))


def is_folder_name(value: object) -> TypeGuard[str]:
    """Whether a value names a folder directly inside another, and nothing outside of it."""
    if not isinstance(value, str) or value in ("", ".", "..") or "/" in value or "\0" in value:
        return False
    return is_text(value) and len(value.encode()) <= LONGEST_NAME


def is_text(text: str) -> bool:
    """Whether `text` can be written as UTF-8: it contains no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def reason(error: OSError) -> str:
    """The system's cause in a few words, such as Permission denied, without the path that the sentence names
    already."""
    return quote(error.strerror or error)


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────

TEXT_LIMIT = 16 * 2**20
"""Bytes of a text file, where the caller knows no better limit."""
PART = 2**20
"""Bytes that are read at a time."""
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_OTHER_ENCODINGS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def kind_of(mode: int) -> str:
    """What a path leads to that is no regular file, in words, from its st_mode."""
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def read_bytes(path: Path, setting: str, limit: int = TEXT_LIMIT) -> bytes:
    """A regular file's content. Raises UserError, with the path and the cause, for a file that is missing, not
    readable, longer than `limit` bytes, or no file at all; a pipe or a device is never opened, since that can wait for
    ever."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
        if kind != stat.S_IFREG:
            raise UserError(setting, f"{quote(path)} cannot be read: it is {kind_of(kind)}, not a file.")
        # Not blocking: between the two calls the file may have become a pipe.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            content = _read(stream, limit + 1)
    except FileNotFoundError:
        raise UserError(setting, f"There is no file {quote(path)}.") from None
    except OSError as error:
        raise UserError(setting, f"{quote(path)} cannot be read: {reason(error)}.") from None
    except ValueError:  # a NUL or a lone surrogate in the path
        raise UserError(setting, f"{quote(path)} cannot be a path.") from None
    if len(content) > limit:
        raise UserError(setting, f"{quote(path)} cannot be read: it is larger than {_size(limit)}.")
    return content


def _read(stream: BinaryIO, most: int) -> bytes:
    """Up to `most` bytes, a part at a time: Python asks for the memory of all that it may read before it reads."""
    parts = list[bytes]()
    while most > 0 and (part := stream.read(min(most, PART))):
        parts.append(part)
        most -= len(part)
    return b"".join(parts)


def read_text(path: Path, setting: str, limit: int = TEXT_LIMIT) -> str:
    """A regular file's text, UTF-8 with or without a byte order mark, its lines ending in a newline. Raises UserError
    as `read_bytes` does, and for another encoding."""
    content = read_bytes(path, setting, limit)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        other = _OTHER_ENCODINGS.get(content[:2])
        advice = f"it is {other}; save it as UTF-8" if other else "it is not UTF-8 text"
        raise UserError(setting, f"{quote(path)} cannot be read: {advice}.") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def exists(path: Path) -> bool:
    """Whether something is at `path`; no for a path that no file system could have, where `Path.exists` raises."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_file(path: Path) -> bool:
    """Whether a regular file is at `path`; no for a path that no file system could have, where `Path.is_file`
    raises."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Whether a folder is at `path`; no for a path that no file system could have, where `Path.is_dir` raises."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def names_folder(text: str) -> bool:
    """Whether a text that a user wrote, and that may be something else than a path, names a folder."""
    path = possible_path(text)
    return path is not None and is_folder(path)


def _size(count: int) -> str:
    return f"{count / 2**20:.3g} MB" if count >= 2**20 else f"{count / 2**10:.3g} KB"


def open_regular(path: Path, buffering: int = -1) -> BinaryIO:
    """A file opened for reading; `buffering` as in `open`. Raises OSError as `open` does, and for whatever is not a
    regular file; never waits."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "It is not a file", str(path))
    return os.fdopen(handle, "rb", buffering)


def read_regular(path: Path) -> bytes:
    """A file's content. Raises OSError as `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def walk(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Every entry below a folder, at any depth, without recursion. Follows no links and skips what cannot be read."""
    waiting = [os.fspath(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    yield entry
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError:  # deleted meanwhile, not readable, or deeper than a path may be
            continue


def remove_tree(folder: Path) -> None:
    """Delete a folder of any depth. Never raises: what cannot be deleted stays.

    Folders two levels down are moved up first, so no path grows and nothing recurses.
    """
    top = os.fspath(folder)
    if os.path.islink(top):
        return
    for number in itertools.count():
        inner = [entry.path for entry in _emptied(top) if entry.is_dir(follow_symlinks=False)]
        removed = False
        for name, path in enumerate(inner):
            for each, deep in enumerate(_emptied(path)):
                with suppress(OSError):
                    os.rename(deep.path, os.path.join(top, f".removed-{number}-{name}-{each}"))
            with suppress(OSError):
                os.rmdir(path)
                removed = True
        if not removed:
            break
    with suppress(OSError):
        os.rmdir(top)


def _emptied(folder: str) -> list[os.DirEntry[str]]:
    """The folders in a folder, after its files are deleted."""
    with suppress(OSError):
        os.chmod(folder, 0o700)
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return []
    for entry in entries:
        if not entry.is_dir(follow_symlinks=False):
            with suppress(OSError):
                os.unlink(entry.path)
    return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]


def require_plain_files(folder: Path) -> None:
    """Raise UserError if a run's folder holds a link, a pipe or the like, at any depth.

    Writing, deleting or copying would reach through a link, and wait at a pipe for ever.
    """
    for entry in walk(folder):
        with suppress(OSError):  # deleted meanwhile, or deeper than a path may be
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                rest = "is a link, and a run's own files are never links; put what it leads to in its place."
                raise UserError("run", f"{quote(entry.path)} {rest}")
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                rest = f"is {kind_of(mode)}, and a run's folder holds only files and folders; move it away."
                raise UserError("run", f"{quote(entry.path)} {rest}")


def append_regular(path: Path) -> FileIO:
    """A file opened for appending, made where there is none. Raises OSError, also for a link and whatever is not a
    regular file; never waits."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "It is not a file", str(path))
    return FileIO(handle, "ab")


OWNER_ONLY = 0o700


def make_private_folder(path: Path, *, exist_ok: bool = True) -> None:
    """Make a folder, and every missing one above it, for this user alone. Raises OSError as `Path.mkdir` does."""
    for parent in reversed([parent for parent in path.parents if not parent.exists()]):
        _make(parent, exist_ok=True)
    _make(path, exist_ok=exist_ok)


def _make(path: Path, *, exist_ok: bool) -> None:
    was_there = path.is_dir()
    path.mkdir(mode=OWNER_ONLY, exist_ok=exist_ok)
    if not was_there:
        restrict_to_user(path)


def restrict_to_user(path: Path) -> None:
    """Take the rights to a file or folder from everybody but its owner. What is not ours, is a link, or lies on a disk
    without rights stays as it is."""
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        wanted = stat.S_IMODE(status.st_mode) & OWNER_ONLY
        is_ours = status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode)
        if is_ours and stat.S_IMODE(status.st_mode) != wanted:
            path.chmod(wanted)
