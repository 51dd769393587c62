"""Landlock: the Linux kernel restricts the files that this process and its children can access.

Sources: Documentation/userspace-api/landlock.rst, include/uapi/linux/landlock.h. A ruleset lists controlled rights;
each rule grants some of them below one folder. By ABI version:

    1 (Linux 5.13)  writing, creating, removing; reading; debugging other processes (always, not a right)
    2 (5.19)        moving and linking between folders; before, refused everywhere
    3 (6.2)         shortening a file; before, `truncate` works on every file that the user may write
    4 (6.7)         TCP, which the filter of system calls covers with all other networks
    5 (6.10)        control calls on devices
    6 (6.12)        signals, and abstract unix sockets

This module also wraps missing system calls and drops privileges.
"""

from __future__ import annotations

import ctypes
import os
import platform
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_PDEATHSIG = 1  # numbers of prctl(2), from linux/prctl.h

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def syscall(number: int, *arguments: int | ctypes.c_void_p | None) -> int:
    """Result of the call, with integers as 64 bits. Raises OSError."""
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *values))


def prctl(option: int, *values: int | ctypes.c_void_p) -> int:
    """prctl with unused arguments 0. Raises OSError."""
    arguments = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in values]
    return _checked(_libc.prctl(ctypes.c_int(option), *arguments, *[ctypes.c_ulong(0)] * (4 - len(arguments))))


def pointer(structure: ctypes.Structure) -> ctypes.c_void_p:
    """Address of `structure`, which the caller keeps alive."""
    return ctypes.c_void_p(ctypes.addressof(structure))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


_KEPT_CAPABILITIES = 1 << 1 | 1 << 2  # in a container root needs these to read files of the user
_CAPABILITY_VERSION = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Sets(ctypes.Structure):
    """Low and high 32 capabilities: effective, permitted, inheritable."""

    _fields_ = [("masks", ctypes.c_uint32 * 6)]


def give_up_privileges() -> None:
    """Drop root's privileges and disable setuid. Raises OSError."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    call = {"x86_64": 126, "aarch64": 91}.get(platform.machine())  # capset
    if call is not None and os.geteuid() == 0:
        header, sets = _Header(_CAPABILITY_VERSION, 0), _Sets()
        with open("/proc/self/status") as status:  # only what this process has: a container gives root a part
            permitted = next((int(line.split()[1], 16) for line in status if line.startswith("CapPrm:")), 0)
        sets.masks[0] = sets.masks[1] = _KEPT_CAPABILITIES & permitted & 0xFFFFFFFF
        syscall(call, pointer(header), pointer(sets))


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every processor
_VERSION = _PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = (1 << bit for bit in range(6))
_MAKE = sum(1 << bit for bit in range(6, 13))  # making devices, folders, files, sockets, pipes and links
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_ABSTRACT_SOCKETS, _SIGNALS = 1, 2
_ON_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV  # rights that apply to single files

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SHARED_MEMORY = "/dev/shm"  # Needed by `multiprocessing` locks and queues


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"  # Python 3.14 wants it beside _pack_
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def abi() -> int:
    """Landlock version of the kernel; 0 if unavailable."""
    try:
        return syscall(_CREATE_RULESET, None, 0, _VERSION)
    except OSError:  # ENOSYS: no such call, or a container refuses it; EOPNOTSUPP: switched off
        return 0


def restrict(writable: Sequence[Path], unreadable: Sequence[Path], version: int) -> bool:
    """Allow writing below `writable` and reading except in `unreadable`. `version`: from `abi()`.

    Needs PR_SET_NO_NEW_PRIVS. Returns True if outside signals are blocked too. Raises OSError.
    """
    readable = readable_places(unreadable) if unreadable else ()
    return _restrict([*map(str, writable), SHARED_MEMORY], readable, _READ_FILE if unreadable else 0, version)


def restrict_to(writable: Sequence[Path], readable: Iterable[str], version: int) -> bool:
    """Allow writing below `writable` and reading only there and in `readable`. Otherwise as `restrict`."""
    return _restrict([*map(str, writable)], readable, _READ_FILE | _READ_DIR, version)


def _restrict(writable: list[str], readable: Iterable[str], reading: int, version: int) -> bool:
    handled = _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE | (_REFER if version >= 2 else 0) | reading
    handled |= (_TRUNCATE if version >= 3 else 0) | (_IOCTL_DEV if version >= 5 else 0)
    ruleset, blocks_signals = -1, False
    if version >= 6:
        attributes = _Ruleset(handled, 0, _ABSTRACT_SOCKETS | _SIGNALS)
        with suppress(OSError):  # Red Hat's 5.14 says 6 and knows no scope of signals: EINVAL
            ruleset = syscall(_CREATE_RULESET, pointer(attributes), ctypes.sizeof(attributes), 0)
            blocks_signals = True
    if ruleset < 0:
        attributes = _Ruleset(handled)
        ruleset = syscall(_CREATE_RULESET, pointer(attributes), 8, 0)
    try:
        for path in (*writable, *DEVICES):
            _allow(ruleset, path, handled)
        for path in readable:
            _allow(ruleset, path, reading)
        syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return blocks_signals


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        applicable = rights if stat.S_ISDIR(os.fstat(handle).st_mode) else rights & _ON_A_FILE
        rule = _PathBeneath(applicable, handle)
        syscall(_ADD_RULE, ruleset, _PATH_BENEATH, pointer(rule), 0)
    finally:
        os.close(handle)


def readable_places(unreadable: Iterable[Path]) -> Iterator[str]:
    """Fewest files and folders that cover everything but `unreadable`.

    Rules only grant rights, so parents of unreadable places are replaced by their other entries; later ones are
    unreadable.
    """
    hidden: set[Path] = set()
    for place in unreadable:
        with suppress(OSError, RuntimeError):  # no folder, or a loop of symlinks
            path = place.resolve(strict=True) if place.exists() else place.parent.resolve(strict=True) / place.name
            if path.parent != path:
                hidden.add(path)
    if not hidden:
        yield "/"
    open_folders = {parent for path in hidden for parent in path.parents} - hidden
    for folder in sorted(open_folders):
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                path = Path(entry.path)
                # A symlink's target is listed where it lies.
                if path not in hidden and path not in open_folders and not entry.is_symlink():
                    yield entry.path
