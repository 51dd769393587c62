"""A filter of system calls: what Landlock does not control, refused by the call's number and its first arguments.

Source: Linux's Documentation/userspace-api/seccomp_filter.rst, include/uapi/linux/{seccomp,filter,bpf_common}.h. The filter is a
program of classic BPF over `struct seccomp_data`: the call's number, the processor, six arguments of 64 bits. It sees no
memory, so no paths and no addresses. All processes that come from this one have it too.
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

from backend.rewards.confinement.linux.libc import PR_SET_SECCOMP, pointer, prctl
from backend.rewards.confinement.linux.syscalls import (
    CHANGES_OF_ATTRIBUTES,
    FORBIDDEN,
    FORKS,
    MACHINES,
    NEWEST,
    NOT_THERE,
    SIGNALS,
    number,
)

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
"""Controls of a terminal that type or paste into it."""
_AF_INET, _AF_INET6, _AF_NETLINK = int(socket.AF_INET), int(socket.AF_INET6), 16
"""Families of the network; netlink is how the C library asks which addresses the machine has, before it looks a name up."""

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false (both counted from the next instruction), constant."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refuse a call with `error`: always, or only where the low 32 bits of an argument, after `& mask`, are `values` (with
    `unless`, where they are anything else)."""

    call: str
    error: int = errno.EPERM
    argument: int | None = None
    values: Sequence[int] = ()
    unless: bool = False
    mask: int = 0xFFFFFFFF


def refusals_for(network: bool, attributes: bool) -> Iterator[Refusal]:
    """What is refused. With `attributes` no file's permissions, owner or times may change; with `network` the internet is reachable."""
    yield from (Refusal(call) for call in FORBIDDEN)
    yield from (Refusal(call, errno.ENOSYS) for call in NOT_THERE)
    if attributes:
        yield from (Refusal(call) for call in CHANGES_OF_ATTRIBUTES)
    # Unix sockets are refused with or without a network: behind them are the user's session, Docker, ssh's agent, the
    # keychain. `socketpair`, which asyncio needs, is another call.
    families = (_AF_INET, _AF_INET6, _AF_NETLINK) if network else ()
    yield Refusal("socket", errno.EACCES, 0, families, unless=True)
    # Process 0 is the caller.
    yield from (Refusal(call, argument=0, values=(0,), unless=True) for call in ("prlimit64", "sched_setaffinity"))
    yield Refusal("clone", argument=0, values=(0,), unless=True, mask=_NEW_NAMESPACE_FLAGS)
    yield Refusal("ioctl", argument=1, values=(_TIOCSTI, _TIOCLINUX))


def refusals_of_processes() -> Iterator[Refusal]:
    """What keeps a process by itself: it starts no other, though threads, and signals none. In a filter of its own, since one filter has one
    rule for each call; of several filters every one must allow it."""
    yield from (Refusal(call) for call in (*FORKS, *SIGNALS))
    yield Refusal("clone", argument=0, values=(0,), mask=_CLONE_THREAD)


def program(refusals: Sequence[Refusal], machine: str) -> list[Instruction]:
    """The filter. Calls that are newer than our tables do not exist; those of another processor's numbers are refused."""
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
    """What follows once the call's number has matched. It always returns, so the accumulator need not be restored."""
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


def let_copies_go_on_without_modes() -> None:
    """Where no permission or time may be changed, `shutil.copy`, `copytree` and `move` would fail after they have copied a file: make
    them leave its permissions and times as those of a new file."""
    for name in ("copymode", "copystat"):
        setattr(shutil, name, _forgiving(getattr(shutil, name)))


def _forgiving(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def forgiving(*arguments: Any, **options: Any) -> None:
        with suppress(PermissionError):
            function(*arguments, **options)

    return forgiving


def restrict(network: bool, attributes: bool) -> None:
    """Install the filter; PR_SET_NO_NEW_PRIVS must be set. Raises OSError where the kernel has none, or for an unknown processor."""
    install(refusals_for(network, attributes))


def install(refusals: Iterator[Refusal]) -> None:
    """Install one filter more. Raises OSError as `restrict`."""
    machine = platform.machine()
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    code = program(list(refusals), machine)
    instructions = (_Instruction * len(code))(*code)
    filter_program = _Program(len(code), instructions)
    prctl(PR_SET_SECCOMP, _MODE_FILTER, pointer(filter_program))
