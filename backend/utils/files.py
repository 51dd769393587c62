"""Files and paths that a user named: regular files of a limited size, read whole."""

import errno
import itertools
import math
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from io import FileIO, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from backend.utils.errors import UserError
from backend.utils.text import quote

LONGEST_NAME = 255  # bytes of one part of a path, on every file system in use
LONGEST_PATH = 1023 if sys.platform == "darwin" else 4095  # bytes of a whole path: PATH_MAX without its final NUL
TEXT_LIMIT = 16 * 2**20  # bytes of a text file, where the caller knows no better limit
DEPTH = 50  # levels of lists and mappings, far below Python's recursion limit
OWNER_ONLY = 0o700
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def user_path(text: str, setting: str, base: Path | None = None) -> Path:
    """The path that a user wrote, ~ expanded, below `base` if relative. Looks at no file. Raises UserError."""
    if "\0" in text or not is_text(text):
        what = "a NUL character" if "\0" in text else "characters that are not valid text"
        raise UserError(setting, f"{quote(text)} cannot be a path: it contains {what}.")
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # pathlib's answer for an unknown user, and for a user without a home
        user = quote(Path(text).parts[0], 40)
        raise UserError(setting, f"{quote(text)} cannot be a path: this machine has no home folder {user}.") from None
    path = path if base is None else base / path
    for part in path.parts:
        if len(os.fsencode(part)) > LONGEST_NAME:
            sentence = f"{quote(part, 40)} cannot be a file's name: it is longer than {LONGEST_NAME} bytes."
            raise UserError(setting, sentence)
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
    """`path.resolve()`, which before Python 3.13 raises RuntimeError for a link to itself."""
    return Path(os.path.realpath(path))


def is_folder_name(value: object) -> TypeGuard[str]:
    """True if a value names a folder directly inside another, and nothing outside of it."""
    if not isinstance(value, str) or value in ("", ".", "..") or "/" in value or "\0" in value:
        return False
    return is_text(value) and len(value.encode()) <= LONGEST_NAME


def is_text(text: str) -> bool:
    """True if `text` can be written as UTF-8: it contains no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def reason(error: OSError) -> str:
    """The system's cause in a few words, such as Permission denied, without the path."""
    return quote(error.strerror or error)


def kind_of(mode: int) -> str:
    """What a path leads to that is not a regular file, in words, from its st_mode."""
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def read_bytes(path: Path, setting: str, limit: int = TEXT_LIMIT) -> bytes:
    """Content of a regular file. Raises UserError for one that is missing, not readable, or over `limit` bytes."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # opening a pipe may wait for ever
            raise UserError(setting, f"{quote(path)} cannot be read: it is {kind_of(mode)}, not a file.")
        if path.stat().st_size <= limit:
            with path.open("rb") as file:
                content = file.read()
            if len(content) <= limit:
                return content
    except FileNotFoundError:
        raise UserError(setting, f"There is no file {quote(path)}.") from None
    except OSError as error:
        raise UserError(setting, f"{quote(path)} cannot be read: {reason(error)}.") from None
    except ValueError:  # a NUL or a lone surrogate in the path
        raise UserError(setting, f"{quote(path)} cannot be a path.") from None
    size = f"{limit / 2**20:.3g} MB" if limit >= 2**20 else f"{limit / 2**10:.3g} KB"
    raise UserError(setting, f"{quote(path)} cannot be read: it is larger than {size}.")


def read_text(path: Path, setting: str, limit: int = TEXT_LIMIT) -> str:
    """Text of a regular UTF-8 file, with or without a byte order mark, with newlines as line ends. Raises UserError."""
    content = read_bytes(path, setting, limit)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        is_utf_16 = content[:2] in (b"\xff\xfe", b"\xfe\xff")
        advice = "it is UTF-16; save it as UTF-8" if is_utf_16 else "it is not UTF-8 text"
        raise UserError(setting, f"{quote(path)} cannot be read: {advice}.") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


exists, is_file, is_folder = os.path.exists, os.path.isfile, os.path.isdir
"""As the methods of Path, but False also for a path that no file system could have."""


def names_folder(text: str) -> bool:
    """True if a text that a user wrote, possibly not a path, names a folder."""
    path = possible_path(text)
    return path is not None and is_folder(path)


def open_regular(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading, without waiting. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    _require_regular(handle, path)
    return os.fdopen(handle, "rb", buffering)


def last_lines(path: Path, max_bytes: int = 4096) -> bytes:
    """The whole lines at the end of a file; none where it cannot be read."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - max_bytes))
            text = file.read(max_bytes)
    except OSError:
        return b""
    return text if size <= max_bytes else text.partition(b"\n")[2]  # the first line is cut, perhaps inside a character


def last_line(path: Path) -> str:
    """The last line with text, stripped; "" where there is none."""
    lines = last_lines(path).decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def append_regular(path: Path) -> FileIO:
    """Open or make a regular file for appending, without following links or waiting. Raises OSError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags, 0o666)
    _require_regular(handle, path)
    return FileIO(handle, "ab")


def _require_regular(handle: int, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "It is not a file", str(path))


def read_regular(path: Path) -> bytes:
    """Content of a regular file. Raises OSError."""
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
    """Delete a folder of any depth; what cannot be deleted stays. Never raises, and no path grows."""
    top = os.fspath(folder)
    if os.path.islink(top):
        return
    for number in itertools.count():
        removed = False
        for name, path in enumerate(_emptied(top)):
            for each, deep in enumerate(_emptied(path)):
                with suppress(OSError):
                    os.rename(deep, os.path.join(top, f".removed-{number}-{name}-{each}"))
            with suppress(OSError):
                os.rmdir(path)
                removed = True
        if not removed:
            break
    with suppress(OSError):
        os.rmdir(top)


def _emptied(folder: str) -> list[str]:
    folders: list[str] = []
    with suppress(OSError):
        os.chmod(folder, OWNER_ONLY)
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
                continue
            with suppress(OSError):
                os.unlink(entry.path)
    return folders


def require_plain_files(folder: Path) -> None:
    """Raise UserError if a run's folder holds a link, which writing would reach through, or a pipe, which waits."""
    for entry in walk(folder):
        with suppress(OSError):  # deleted meanwhile, or deeper than a path may be
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                rest = "is a link, and a run's own files are never links; put what it leads to in its place."
                raise UserError("run", f"{quote(entry.path)} {rest}")
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                rest = f"is {kind_of(mode)}, and a run's folder holds only files and folders; move it away."
                raise UserError("run", f"{quote(entry.path)} {rest}")


def make_private_folder(path: Path, *, exist_ok: bool = True) -> None:
    """Make a folder, and every missing one above it, for this user alone. Raises OSError as `Path.mkdir` does."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=OWNER_ONLY, exist_ok=exist_ok or folder != path)
        restrict_to_user(folder)
    if path not in missing:
        path.mkdir(exist_ok=exist_ok)


def restrict_to_user(path: Path) -> None:
    """Take the rights to a file or folder of ours from everybody else, where the disk has rights."""
    with suppress(OSError):
        status = os.lstat(path)
        wanted = stat.S_IMODE(status.st_mode) & OWNER_ONLY
        is_ours = status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode)
        if is_ours and stat.S_IMODE(status.st_mode) != wanted:
            path.chmod(wanted)


def write_all(file: RawIOBase, data: bytes) -> None:
    """Write every byte to a file without a buffer; the kernel may take a part at a time. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]


def json_safe(value: Any) -> Any:
    """`value` in JSON's types: NaN and infinities become None, tuples lists, paths text."""
    if value is None or isinstance(value, (str, int)):  # first: a step's rows hold tens of thousands
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def levels(value: Any, most: int) -> int:
    """Levels of lists and mappings in a value, counted without recursion up to `most` + 1."""
    level, depth = [value], 0
    while depth <= most and (nested := [part for part in level if isinstance(part, list | tuple | dict)]):
        depth += 1
        level = [item for part in nested for item in (part.values() if isinstance(part, dict) else part)]
    return depth
