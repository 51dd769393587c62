"""Linux: the kernel restricts this process and its children, without root.

Landlock controls files (Documentation/userspace-api/landlock.rst, include/uapi/linux/landlock.h): a ruleset lists
controlled rights; each rule grants some of them below one folder. By ABI version:

    1 (Linux 5.13)  writing, creating, removing; reading; debugging other processes (always, not a right)
    2 (5.19)        moving and linking between folders; before, refused everywhere
    3 (6.2)         shortening a file; before, `truncate` works on every file that the user may write
    4 (6.7)         TCP, which the filter of system calls covers with all other networks
    5 (6.10)        control calls on devices
    6 (6.12)        signals, and abstract unix sockets

A filter of system calls (seccomp) refuses what Landlock does not control (Documentation/userspace-api/
seccomp_filter.rst, include/uapi/linux/{seccomp,filter,bpf_common}.h, syscall_64.tbl, scripts/syscall.tbl). Classic BPF
over `struct seccomp_data`; it sees no memory.
"""

import ctypes
import errno
import os
import platform
import re
import shutil
import signal
import socket
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1  # numbers of prctl(2), from linux/prctl.h
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def syscall(number: int, *arguments: int | ctypes.Array[ctypes.c_char] | None) -> int:
    """Result of the call, with integers as 64 bits. Raises OSError."""
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *values))


def prctl(option: int, *values: int | ctypes.Array[ctypes.c_char]) -> int:
    """prctl with unused arguments 0. Raises OSError."""
    arguments = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in values]
    return _checked(_libc.prctl(ctypes.c_int(option), *arguments, *[ctypes.c_ulong(0)] * (4 - len(arguments))))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def end_with_parent(parent: int) -> None:
    """In a fork of `parent`: have it killed when its parent's only thread ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


_KEPT_CAPABILITIES = 1 << 1 | 1 << 2  # in a container root needs these to read files of the user
_CAPABILITY_VERSION = 0x20080522


def give_up_privileges() -> None:
    """Drop root's privileges and disable setuid. Raises OSError."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    call = {"x86_64": 126, "aarch64": 91}.get(platform.machine())  # capset
    if call is not None and os.geteuid() == 0:
        with open("/proc/self/status") as status:  # only what this process has: a container gives root a part
            permitted = next((int(line.split()[1], 16) for line in status if line.startswith("CapPrm:")), 0)
        kept = _KEPT_CAPABILITIES & permitted & 0xFFFFFFFF
        # Version and pid; the low 32 of the effective, permitted and inheritable capabilities, then the high ones.
        header, sets = struct.pack("Ii", _CAPABILITY_VERSION, 0), struct.pack("6I", kept, kept, 0, 0, 0, 0)
        syscall(call, ctypes.create_string_buffer(header), ctypes.create_string_buffer(sets))


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every processor
_VERSION = _PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = (1 << bit for bit in range(6))
_MAKE = sum(1 << bit for bit in range(6, 13))  # making devices, folders, files, sockets, pipes and links
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_ABSTRACT_SOCKETS, _SIGNALS = 1, 2
_ON_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV  # rights that apply to single files

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SHARED_MEMORY = "/dev/shm"  # Needed by `multiprocessing` locks and queues


def abi() -> int:
    """Landlock version of the kernel; 0 if unavailable."""
    try:
        return syscall(_CREATE_RULESET, None, 0, _VERSION)
    except OSError:  # ENOSYS: no such call, or a container refuses it; EOPNOTSUPP: switched off
        return 0


def restrict_files(writable: Iterable[str], readable: Iterable[str] | None, version: int, lists: bool = False) -> bool:
    """Allow writing only below `writable` and the usual devices, reading only there and in `readable` (None: all).
    `lists`: no other folder can be listed. Returns True if outside signals are blocked too. Raises OSError."""
    reading = 0 if readable is None else _READ_FILE | (_READ_DIR if lists else 0)
    handled = _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE | (_REFER if version >= 2 else 0) | reading
    handled |= (_TRUNCATE if version >= 3 else 0) | (_IOCTL_DEV if version >= 5 else 0)
    ruleset, blocks_signals = -1, False
    if version >= 6:
        attributes = struct.pack("3Q", handled, 0, _ABSTRACT_SOCKETS | _SIGNALS)
        with suppress(OSError):  # Red Hat's 5.14 says 6 and knows no scope of signals: EINVAL
            ruleset = syscall(_CREATE_RULESET, ctypes.create_string_buffer(attributes), len(attributes), 0)
            blocks_signals = True
    if ruleset < 0:
        ruleset = syscall(_CREATE_RULESET, ctypes.create_string_buffer(struct.pack("Q", handled)), 8, 0)
    granted = [(path, handled) for path in (*writable, *DEVICES)] + [(path, reading) for path in readable or ()]
    try:
        for path, rights in granted:
            try:
                handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                applicable = rights if stat.S_ISDIR(os.fstat(handle).st_mode) else rights & _ON_A_FILE
                rule = ctypes.create_string_buffer(struct.pack("=Qi", applicable, handle))
                syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
            finally:
                os.close(handle)
        syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return blocks_signals


def scope_signals() -> bool:
    """Let this process and its descendants signal only each other; False if that is not certain."""
    parent, attributes = os.getppid(), struct.pack("3Q", 0, 0, _SIGNALS)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    try:
        os.kill(parent, 0)  # may be signalled now, and must not be afterwards
        ruleset = syscall(_CREATE_RULESET, ctypes.create_string_buffer(attributes), len(attributes), 0)
        syscall(_RESTRICT_SELF, ruleset, 0)
        os.close(ruleset)
    except OSError:
        return False
    try:
        os.kill(parent, 0)
    except PermissionError:
        return True
    return False


def readable_places(unreadable: Iterable[Path]) -> Iterator[str]:
    """Fewest files and folders that cover everything but `unreadable`: rules only grant rights."""
    hidden: set[Path] = set()
    for place in unreadable:
        with suppress(OSError, RuntimeError):  # not readable, or a loop of symlinks
            hidden.add(place.resolve())
    hidden.discard(Path("/"))
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
pidfd_send_signal 424 424, prlimit64 302 261, sched_setaffinity 203 122, socket 41 198, socketpair 53 199, ioctl 16 29,
flock 73 32, fcntl 72 25
"""
_ROW = re.compile(r"(\w+) (\d+|-) (\d+|-)")
FORBIDDEN = [name for name, *_ in _ROW.findall(_FORBIDDEN)]
NUMBERS = {
    name: tuple(None if number == "-" else int(number) for number in numbers)
    for name, *numbers in _ROW.findall(_FORBIDDEN + _CONDITIONAL)
}
SIGNALS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal")
FORKS = ("fork", "vfork")  # calls that only fork; `clone` also makes threads
NOT_THERE = ("io_uring_setup", "io_uring_enter", "io_uring_register", "clone3", "flock")
"""Calls reported as missing: filters cannot inspect io_uring and clone3; flock locks files that can only be read."""

_MODE_FILTER = 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_JUMP_EQUAL, _JUMP_ABOVE = 0x15, 0x25
_CALL, _PROCESSOR, _FIRST_ARGUMENT = 0, 4, 16  # offsets in `struct seccomp_data`
_NEW_NAMESPACE_FLAGS = 0x7E020080  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and NEWTIME
_CLONE_THREAD = 0x10000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # terminal controls that inject input
_F_SETLEASE = 1024  # of fcntl: delays others who open the file for writing
_AF_INET, _AF_INET6, _AF_NETLINK = int(socket.AF_INET), int(socket.AF_INET6), 16  # the C library's lookups use netlink

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


@dataclass(frozen=True, slots=True)
class Refusal:
    """With `argument` only where its low 32 bits `& mask` are in `values` (`unless`: are not)."""

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
    # keychain. asyncio needs `socketpair`; pairs of datagram or raw sockets reach others by path.
    families = (_AF_INET, _AF_INET6, _AF_NETLINK) if network else ()
    yield Refusal("socket", errno.EACCES, 0, families, unless=True)
    yield Refusal("socketpair", errno.EACCES, 1, (int(socket.SOCK_STREAM),), unless=True, mask=0xF)
    # Process 0 is the caller.
    yield from (Refusal(call, argument=0, values=(0,), unless=True) for call in ("prlimit64", "sched_setaffinity"))
    yield Refusal("clone", argument=0, values=(0,), unless=True, mask=_NEW_NAMESPACE_FLAGS)
    yield Refusal("ioctl", argument=1, values=(_TIOCSTI, _TIOCLINUX))
    yield Refusal("fcntl", argument=1, values=(_F_SETLEASE,))


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


def filter_calls(network: bool, processes: bool = True) -> None:
    """Install the filter; without `processes` none may be started or signalled. Copies of `shutil` are without
    permissions and times. Raises OSError if unsupported."""
    machine = platform.machine()
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    filters = [list(refusals(network))]
    if not processes:
        threads_only = Refusal("clone", argument=0, values=(0,), mask=_CLONE_THREAD)
        filters.append([*(Refusal(call) for call in (*FORKS, *SIGNALS)), threads_only])
    for refused in filters:
        code = program(refused, machine)
        instructions = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
        # struct sock_fprog: their number, and a pointer to them
        header = struct.pack("HP", len(code), ctypes.addressof(instructions))
        prctl(PR_SET_SECCOMP, _MODE_FILTER, ctypes.create_string_buffer(header))

    shutil.copymode = shutil.copystat = lambda *_, **options: None  # which this filter refuses
