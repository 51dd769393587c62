"""Landlock: the Linux kernel restricts the files that this process and its children can access.

Sources: Documentation/userspace-api/landlock.rst, include/uapi/linux/landlock.h. A ruleset lists controlled rights;
each rule grants some of them below one folder. By ABI version:

    1 (Linux 5.13)  writing, creating, removing; reading; debugging other processes (always, not a right)
    2 (5.19)        moving and linking between folders; before, refused everywhere
    3 (6.2)         shortening a file; before, `truncate` works on every file that the user may write
    4 (6.7)         TCP, which the filter of system calls covers with all other networks
    5 (6.10)        control calls on devices
    6 (6.12)        signals, and abstract unix sockets

`backend.rewards.confinement.seccomp` covers permissions, owners and times. This module also wraps missing system calls
and drops privileges.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_PDEATHSIG = 1
"""Numbers of prctl(2), from linux/prctl.h."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def syscall(number: int, *arguments: int | ctypes.c_void_p | None) -> int:
    """Result of the call, with integers as 64 bits. Raises OSError."""
    return _checked(
        _libc.syscall(
            ctypes.c_long(number),
            *(ctypes.c_long(value) if isinstance(value, int) else value for value in arguments),
        )
    )


def prctl(option: int, *values: int | ctypes.c_void_p) -> int:
    """prctl with unused arguments 0. Raises OSError."""
    arguments = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in values]
    arguments += [ctypes.c_ulong(0)] * (4 - len(arguments))
    return _checked(_libc.prctl(ctypes.c_int(option), *arguments))


def pointer(structure: ctypes.Structure) -> ctypes.c_void_p:
    """Address of `structure`, which the caller keeps alive."""
    return ctypes.c_void_p(ctypes.addressof(structure))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


LARGEST_FILE = 2 << 30
"""Maximum bytes per file."""
_KEPT_CAPABILITIES = 1 << 1 | 1 << 2
"""In a container root needs these to read files of the user."""
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


def limit_resources() -> None:
    """Limit core files, file size and memory; prefer this process for the OOM killer."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    # RLIMIT_DATA, not RLIMIT_AS: libraries reserve address space that they never use.
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, LARGEST_FILE),
        (resource.RLIMIT_DATA, memory),
    ):
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    # The trainer is the larger process, and the kernel ends the largest first.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""The same on every processor."""
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
"""Rights that apply to single files."""

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SHARED_MEMORY = "/dev/shm"
"""Needed by `multiprocessing` locks and queues."""


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
    """Allow writing below `writable` and reading only there and in `readable`. Otherwise as `restrict`."""
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


def _changes(version: int) -> int:
    refer, truncate = _REFER if version >= 2 else 0, _TRUNCATE if version >= 3 else 0
    return _CHANGES | refer | truncate | (_IOCTL_DEV if version >= 5 else 0)


def _create(handled: int, version: int) -> tuple[int, bool]:
    """(ruleset descriptor, True if it blocks signals)."""
    if version >= 6:
        attempt = _Ruleset(handled, 0, _ABSTRACT_SOCKETS | _SIGNALS)
        # Red Hat's 5.14 says 6 and knows no scope of signals: EINVAL.
        with suppress(OSError):
            return syscall(_CREATE_RULESET, pointer(attempt), ctypes.sizeof(attempt), 0), True
    ruleset = _Ruleset(handled)
    return syscall(_CREATE_RULESET, pointer(ruleset), 8, 0), False


def _allow(ruleset: int, path: str, rights: int, follow_symlinks: bool = True) -> None:
    """Grant applicable `rights` below `path`, if it exists."""
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
