"""Linux system call filter for what Landlock does not control.

Sources: Documentation/userspace-api/seccomp_filter.rst, include/uapi/linux/{seccomp,filter,bpf_common}.h,
syscall_64.tbl, scripts/syscall.tbl. Classic BPF over `struct seccomp_data`; it sees no memory. Children inherit it.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import platform
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from backend.rewards.confinement.landlock import PR_SET_SECCOMP, pointer, prctl

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # `platform.machine()` → AUDIT_ARCH_…
NEWEST = 469  # newest call in the tables; newer numbers are the same on all processors

# Name, number on x86_64, number on aarch64; "-" where the processor has no such call.
_FORBIDDEN = """
file metadata, which is refused everywhere because filters see no paths:
chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54,
utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88, file_setattr 469 469, setxattr 188 5, lsetxattr 189 6,
fsetxattr 190 7, setxattrat 463 463, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, removexattrat 466 466
access to other processes:
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440, process_mrelease 448 448,
pidfd_getfd 438 438, kcmp 312 272, perf_event_open 298 241, migrate_pages 256 238, move_pages 279 239,
ioprio_set 251 30, sched_setscheduler 144 119, sched_setparam 142 118, sched_setattr 314 274, setpriority 141 140
keys and System V or POSIX IPC, which the processes of a user share:
keyctl 250 219, add_key 248 217, request_key 249 218, shmget 29 194, shmat 30 196, shmctl 31 195, semget 64 190,
semctl 66 191, semop 65 193, semtimedop 220 192, msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187,
mq_open 240 180, mq_unlink 241 181
namespaces, mounts, file handles, kernel programs:
mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, open_tree 428 428, open_tree_attr 467 467,
move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, mount_setattr 442 442,
unshare 272 97, setns 308 268, name_to_handle_at 303 264, open_by_handle_at 304 265, fanotify_init 300 262, bpf 321 280,
userfaultfd 323 282, quotactl 179 60, quotactl_fd 443 443
administration:
acct 163 89, swapon 167 224, swapoff 168 225, reboot 169 142, sethostname 170 161, setdomainname 171 162,
syslog 103 116, init_module 175 105, delete_module 176 106, finit_module 313 273, kexec_load 246 104,
kexec_file_load 320 294, iopl 172 -, ioperm 173 -, settimeofday 164 170, clock_settime 227 112, adjtimex 159 171,
clock_adjtime 305 266
"""
_CONDITIONAL = """
io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, clone3 435 435, clone 56 220, fork 57 -,
vfork 58 -, kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240,
pidfd_send_signal 424 424, prlimit64 302 261, sched_setaffinity 203 122, socket 41 198, socketpair 53 199, ioctl 16 29
"""
_ROW = re.compile(r"(\w+) (\d+|-) (\d+|-)")
FORBIDDEN = [name for name, *_ in _ROW.findall(_FORBIDDEN)]
NUMBERS = {
    name: tuple(None if number == "-" else int(number) for number in numbers)
    for name, *numbers in _ROW.findall(_FORBIDDEN + _CONDITIONAL)
}
SIGNALS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal")
FORKS = ("fork", "vfork")  # calls that only fork; `clone` also makes threads
NOT_THERE = ("io_uring_setup", "io_uring_enter", "io_uring_register", "clone3")
"""Calls reported as missing, because filters cannot inspect io_uring and clone3."""

_MODE_FILTER = 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_JUMP_EQUAL, _JUMP_ABOVE = 0x15, 0x25
_CALL, _PROCESSOR, _FIRST_ARGUMENT = 0, 4, 16  # offsets in `struct seccomp_data`
_NEW_NAMESPACE_FLAGS = 0x7E020080  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and NEWTIME
_CLONE_THREAD = 0x10000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # terminal controls that inject input
_AF_INET, _AF_INET6, _AF_NETLINK = int(socket.AF_INET), int(socket.AF_INET6), 16
"""Network families; the C library needs netlink for name lookup."""

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refuse a call with `error`.

    With `argument` only where its low 32 bits `& mask` are in `values` (`unless`: are not).
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
    allow: Instruction = (_RETURN, 0, 0, _ALLOW)
    for each in refusals:
        number = NUMBERS[each.call][list(MACHINES).index(machine)]
        if number is None:
            continue
        refuse: Instruction = (_RETURN, 0, 0, _ERRNO | each.error)
        body = [refuse]  # always returns
        if each.argument is not None:
            body = [(_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * each.argument)]
            body += [(_AND, 0, 0, each.mask)] if each.mask != 0xFFFFFFFF else []
            # To the second return.
            body += [(_JUMP_EQUAL, len(each.values) - index, 0, value) for index, value in enumerate(each.values)]
            body += [refuse, allow] if each.unless else [allow, refuse]
        code += [(_JUMP_EQUAL, 0, len(body), number), *body]
    return [*code, allow]


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction))]


def restrict(network: bool, processes: bool = True) -> None:
    """Install the filter; without `processes` no process may be started or signalled.

    Lets `shutil` copies skip permissions and times, which it refuses. Needs PR_SET_NO_NEW_PRIVS. Raises OSError if
    unsupported.
    """
    machine = platform.machine()
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    filters = [list(refusals(network))]
    if not processes:
        threads_only = Refusal("clone", argument=0, values=(0,), mask=_CLONE_THREAD)
        filters.append([*(Refusal(call) for call in (*FORKS, *SIGNALS)), threads_only])
    for refused in filters:
        code = program(refused, machine)
        filter_program = _Program(len(code), (_Instruction * len(code))(*code))
        prctl(PR_SET_SECCOMP, _MODE_FILTER, pointer(filter_program))

    def forgiving(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> None:
            with suppress(PermissionError):
                function(*arguments, **options)

        return call

    for name in ("copymode", "copystat"):
        setattr(shutil, name, forgiving(getattr(shutil, name)))
