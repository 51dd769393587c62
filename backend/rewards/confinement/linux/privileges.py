"""What a process gives up for itself and all that come from it: privileges, resources, a place among the survivors."""

from __future__ import annotations

import ctypes
import os
import resource
from contextlib import suppress

from backend.rewards.confinement.linux.libc import PR_SET_NO_NEW_PRIVS, pointer, prctl, syscall
from backend.rewards.confinement.linux.syscalls import number

LARGEST_FILE = 2 << 30
"""Bytes that one file may have. The limit is on each file: a full disk is not prevented, only made slower."""
_KEPT_CAPABILITIES = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: in a container root needs them to read files of the user outside."""
_CAPABILITY_VERSION = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Sets(ctypes.Structure):
    """The low 32 capabilities, then the high ones, each as effective, permitted and inheritable."""

    _fields_ = [("masks", ctypes.c_uint32 * 6)]


def give_up_privileges() -> None:
    """No setuid program gives any; what root has beyond a user is gone. Raises OSError."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    call = number("capset")
    if call is not None and os.geteuid() == 0:
        header, sets = _Header(_CAPABILITY_VERSION, 0), _Sets()
        # Only what this process has: a container gives root a part.
        sets.masks[0] = sets.masks[1] = _KEPT_CAPABILITIES & _permitted()
        syscall(call, pointer(header), pointer(sets))


def limit_resources() -> None:
    """No core files, no huge file, at most half of the machine's memory in one process, and the first to end when it runs out."""
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


def _permitted() -> int:
    with open("/proc/self/status") as status:
        return next((int(line.split()[1], 16) for line in status if line.startswith("CapPrm:")), 0) & 0xFFFFFFFF
