"""Linux system call filter for what Landlock does not control.

Sources: Documentation/userspace-api/seccomp_filter.rst, include/uapi/linux/{seccomp,filter,bpf_common}.h,
syscall_64.tbl, scripts/syscall.tbl. Classic BPF over `struct seccomp_data`; it sees no memory. Children inherit it.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import platform
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from backend.rewards.confinement.landlock import PR_SET_SECCOMP, pointer, prctl

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""`platform.machine()` → AUDIT_ARCH_…."""
NEWEST = 469
"""Newest call in the table; newer numbers are the same on all processors."""

_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    # name: x86_64, aarch64; None where the processor has no such call
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "perf_event_open": (298, 241),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "ioprio_set": (251, 30),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "unshare": (272, 97),
    "setns": (308, 268),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "syslog": (103, 116),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "iopl": (172, None),
    "ioperm": (173, None),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semctl": (66, 191),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "setpriority": (141, 140),
    "prlimit64": (302, 261),
    "fork": (57, None),
    "vfork": (58, None),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "capset": (126, 91),
    "clone": (56, 220),
    "clone3": (435, 435),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "ioctl": (16, 29),
}

_ATTRIBUTES = (
    "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat file_setattr "
    "setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat"
)
"""File metadata calls, refused everywhere because filters see no paths."""
_OTHER_PROCESSES = (
    "ptrace process_vm_readv process_vm_writev process_madvise process_mrelease pidfd_getfd kcmp perf_event_open "
    "migrate_pages move_pages ioprio_set sched_setscheduler sched_setparam sched_setattr setpriority"
)
"""Access to other processes."""
_SHARED = (
    "keyctl add_key request_key shmget shmat shmctl semget semctl semop semtimedop msgget msgsnd msgrcv msgctl mq_open "
    "mq_unlink"
)
"""Keys and System V or POSIX IPC shared by a user's processes."""
_WAYS_AROUND = (
    "mount umount2 pivot_root chroot open_tree open_tree_attr move_mount fsopen fsconfig fsmount fspick mount_setattr "
    "unshare setns name_to_handle_at open_by_handle_at fanotify_init bpf userfaultfd quotactl quotactl_fd"
)
"""Namespaces, mounts, file handles, kernel programs."""
_MACHINE = (
    "acct swapon swapoff reboot sethostname setdomainname syslog init_module delete_module finit_module kexec_load "
    "kexec_file_load iopl ioperm settimeofday clock_settime adjtimex clock_adjtime"
)
"""Administrative calls."""
FORBIDDEN = " ".join((_ATTRIBUTES, _OTHER_PROCESSES, _SHARED, _WAYS_AROUND, _MACHINE)).split()
SIGNALS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal")
FORKS = ("fork", "vfork")
"""Calls that only fork; `clone` also makes threads."""
NOT_THERE = ("io_uring_setup", "io_uring_enter", "io_uring_register", "clone3")
"""Calls reported as missing, because filters cannot inspect io_uring and clone3."""


def number(name: str, machine: str) -> int | None:
    """Number of a call on this processor, or None."""
    return _NUMBERS[name][list(MACHINES).index(machine)]


_MODE_FILTER = 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_JUMP_EQUAL, _JUMP_ABOVE = 0x15, 0x25
_CALL, _PROCESSOR, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in `struct seccomp_data`."""

_NEW_NAMESPACE_FLAGS = 0x7E020080
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and NEWTIME."""
_CLONE_THREAD = 0x10000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
"""Terminal controls that inject input."""
_AF_INET, _AF_INET6, _AF_NETLINK = int(socket.AF_INET), int(socket.AF_INET6), 16
"""Network families; the C library needs netlink for name lookup."""

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refuse a call with `error`, if given only where an argument's low 32 bits `& mask` are in `values` (`unless`: are
    not).
    """

    call: str
    error: int = errno.EPERM
    argument: int | None = None
    values: Sequence[int] = ()
    unless: bool = False
    mask: int = 0xFFFFFFFF


def refusals(network: bool) -> Iterator[Refusal]:
    """Refusals for all confined code; `network` allows the internet."""
    yield from (Refusal(call) for call in FORBIDDEN)
    yield from (Refusal(call, errno.ENOSYS) for call in NOT_THERE)
    # Unix sockets are refused with or without a network: behind them are the user's session, Docker, ssh's agent, the
    # keychain. `socketpair`, which asyncio needs, is another call; a pair of datagram sockets reaches others by path.
    families = (_AF_INET, _AF_INET6, _AF_NETLINK) if network else ()
    yield Refusal("socket", errno.EACCES, 0, families, unless=True)
    yield Refusal("socketpair", errno.EACCES, 1, (int(socket.SOCK_DGRAM),), mask=0xF)
    # Process 0 is the caller.
    yield from (Refusal(call, argument=0, values=(0,), unless=True) for call in ("prlimit64", "sched_setaffinity"))
    yield Refusal("clone", argument=0, values=(0,), unless=True, mask=_NEW_NAMESPACE_FLAGS)
    yield Refusal("ioctl", argument=1, values=(_TIOCSTI, _TIOCLINUX))


def refusals_of_processes() -> Iterator[Refusal]:
    """Refusals of starting and signalling processes, for a second filter."""
    yield from (Refusal(call) for call in (*FORKS, *SIGNALS))
    yield Refusal("clone", argument=0, values=(0,), mask=_CLONE_THREAD)


def program(refusals: Sequence[Refusal], machine: str) -> list[Instruction]:
    """The filter. Refuses unknown calls and foreign architectures."""
    code: list[Instruction] = [
        (_LOAD, 0, 0, _PROCESSOR),
        (_JUMP_EQUAL, 1, 0, MACHINES[machine]),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_LOAD, 0, 0, _CALL),
        (_JUMP_ABOVE, 0, 1, NEWEST),  # x86_64's 32-bit numbers begin at 2³⁰
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    for refusal in refusals:
        if (call := number(refusal.call, machine)) is not None:
            body = list(_body(refusal))
            code += [(_JUMP_EQUAL, 0, len(body), call), *body]
    return [*code, (_RETURN, 0, 0, _ALLOW)]


def _body(refusal: Refusal) -> Iterator[Instruction]:
    """Instructions after a call's number matched; always returns."""
    refuse: Instruction = (_RETURN, 0, 0, _ERRNO | refusal.error)
    if refusal.argument is None:
        yield refuse
        return
    yield (_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * refusal.argument)
    if refusal.mask != 0xFFFFFFFF:
        yield (_AND, 0, 0, refusal.mask)
    count = len(refusal.values)
    for index, value in enumerate(refusal.values):
        yield (_JUMP_EQUAL, count - index, 0, value)  # to the second return
    allow: Instruction = (_RETURN, 0, 0, _ALLOW)
    yield from (refuse, allow) if refusal.unless else (allow, refuse)


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction))]


def forgive_modes_of_copies() -> None:
    """Let `shutil` copies skip permissions and times, which the filter refuses."""

    def forgiving(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> None:
            with suppress(PermissionError):
                function(*arguments, **options)

        return call

    for name in ("copymode", "copystat"):
        setattr(shutil, name, forgiving(getattr(shutil, name)))


def restrict(network: bool, processes: bool = True) -> None:
    """Install the filter; without `processes` no process may be started or signalled.

    Needs PR_SET_NO_NEW_PRIVS. Raises OSError if unsupported.
    """
    machine = platform.machine()
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    for refused in (refusals(network), () if processes else refusals_of_processes()):
        code = program(list(refused), machine)
        instructions = (_Instruction * len(code))(*code)
        filter_program = _Program(len(code), instructions)
        prctl(PR_SET_SECCOMP, _MODE_FILTER, pointer(filter_program))
