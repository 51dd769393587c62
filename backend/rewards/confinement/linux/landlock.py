"""Landlock: the kernel refuses this process, and all that come from it, files outside what is listed here.

Source: Linux's Documentation/userspace-api/landlock.rst and include/uapi/linux/landlock.h. A ruleset names the rights that it
controls; each rule gives some of them back for one folder and everything below it. What a kernel can control grows with its ABI:

    1 (Linux 5.13)  writing, creating, removing; reading; debugging other processes (always, not a right)
    2 (5.19)        moving and linking between folders; before, refused everywhere
    3 (6.2)         shortening a file; before, `truncate` works on every file that the user may write
    4 (6.7)         TCP, which the filter of system calls covers with all other networks
    5 (6.10)        control calls on devices
    6 (6.12)        signals, and abstract unix sockets

Landlock controls no change of permissions, owners or times; `backend.rewards.confinement.linux.seccomp` does.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from backend.rewards.confinement.linux.libc import pointer, syscall

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""The same numbers on every processor."""
_VERSION = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = (1 << bit for bit in range(6))
_MAKE_CHAR, _MAKE_DIR, _MAKE_REG, _MAKE_SOCK, _MAKE_FIFO, _MAKE_BLOCK, _MAKE_SYM = (1 << bit for bit in range(6, 13))
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_ABSTRACT_SOCKETS, _SIGNALS = 1, 2

_CHANGES = (_WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_CHAR | _MAKE_DIR | _MAKE_REG | _MAKE_SOCK | _MAKE_FIFO) | (
    _MAKE_BLOCK | _MAKE_SYM
)
_ON_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
"""The rights that a rule for a single file may give."""

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SHARED_MEMORY = "/dev/shm"
"""Where `multiprocessing` keeps its locks and shared memory: without it no `Pool` or `Queue` starts."""


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"  # Python 3.14 wants it beside _pack_
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def abi() -> int:
    """The version of Landlock that the kernel offers; 0 where it has none, or where it is switched off."""
    try:
        return syscall(_CREATE_RULESET, None, 0, _VERSION)
    except OSError:  # ENOSYS: no such call, or a container refuses it; EOPNOTSUPP: switched off
        return 0


def restrict(writable: Sequence[Path], unreadable: Sequence[Path], version: int) -> bool:
    """Allow changes below `writable` only, and reading everywhere but in `unreadable`. Returns whether signals to processes
    outside are refused too. `version` is what `abi()` returned, and PR_SET_NO_NEW_PRIVS must be set. Raises OSError.
    """
    handled = _changes(version) | (_READ_FILE if unreadable else 0)
    ruleset, scoped = _create(handled, version)
    try:
        for path in [*map(str, writable), SHARED_MEMORY, *DEVICES]:
            _allow(ruleset, path, handled)
        for path in readable_places(unreadable) if unreadable else ():
            _allow(ruleset, path, _READ_FILE, follow_symlinks=False)
        syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return scoped


def restrict_to(writable: Sequence[Path], readable: Iterable[str], version: int) -> bool:
    """Allow changes below `writable` only, and reading nowhere but there and in `readable`. Otherwise as `restrict`."""
    handled = _changes(version) | _READ_FILE | _READ_DIR
    ruleset, scoped = _create(handled, version)
    try:
        for path in [*map(str, writable), *DEVICES]:
            _allow(ruleset, path, handled)
        for path in readable:
            _allow(ruleset, path, _READ_FILE | _READ_DIR)
        syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return scoped


def readable_places(unreadable: Iterable[Path]) -> Iterator[str]:
    """The fewest files and folders that together hold everything but `unreadable`.

    A rule gives a right to a whole folder and nothing takes it back, so every folder on the way to an unreadable place is
    given up, and its other entries are listed one by one. What is made in such a folder later cannot be read.
    """
    hidden = {path for path in _resolved(unreadable) if path.parent != path}
    if not hidden:  # a new user's home has none of these places
        yield "/"
    open_folders = {parent for path in hidden for parent in path.parents} - hidden
    for folder in sorted(open_folders):
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                path = Path(entry.path)
                # A symlink's target is listed where it lies.
                if path not in hidden and path not in open_folders and not entry.is_symlink():
                    yield entry.path


def _resolved(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        with suppress(OSError, RuntimeError):  # missing, or a loop of symlinks
            yield path.resolve(strict=True)


def _changes(version: int) -> int:
    return _CHANGES | _since(version, 2, _REFER) | _since(version, 3, _TRUNCATE) | _since(version, 5, _IOCTL_DEV)


def _since(version: int, first: int, right: int) -> int:
    return right if version >= first else 0


def _create(handled: int, version: int) -> tuple[int, bool]:
    """A ruleset's descriptor, and whether it refuses signals."""
    if version >= 6:
        attempt = _Ruleset(handled, 0, _ABSTRACT_SOCKETS | _SIGNALS)
        # Red Hat's 5.14 says 6 and knows no scope of signals: EINVAL.
        with suppress(OSError):
            return syscall(_CREATE_RULESET, pointer(attempt), ctypes.sizeof(attempt), 0), True
    ruleset = _Ruleset(handled)
    return syscall(_CREATE_RULESET, pointer(ruleset), 8, 0), False


def _allow(ruleset: int, path: str, rights: int, follow_symlinks: bool = True) -> None:
    """Give `rights` below `path`, as far as they apply to it; nothing where it does not exist."""
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC | (0 if follow_symlinks else os.O_NOFOLLOW))
    except OSError:
        return
    try:
        applicable = rights if stat.S_ISDIR(os.fstat(handle).st_mode) else rights & _ON_A_FILE
        rule = _PathBeneath(applicable, handle)
        syscall(_ADD_RULE, ruleset, _PATH_BENEATH, pointer(rule), 0)
    finally:
        os.close(handle)
