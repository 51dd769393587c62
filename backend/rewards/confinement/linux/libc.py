"""System calls that Python has no function for."""

from __future__ import annotations

import ctypes
import os

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_PDEATHSIG = 1
"""Numbers of prctl(2), from linux/prctl.h."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def syscall(number: int, *arguments: int | ctypes.c_void_p | None) -> int:
    """The call's result. Whole numbers are passed as 64 bits. Raises OSError."""
    return _checked(
        _libc.syscall(
            ctypes.c_long(number),
            *(ctypes.c_long(value) if isinstance(value, int) else value for value in arguments),
        )
    )


def prctl(option: int, *values: int | ctypes.c_void_p) -> int:
    """`values` are the option's arguments; those left out are 0, as newer options demand. Raises OSError."""
    arguments = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in values]
    arguments += [ctypes.c_ulong(0)] * (4 - len(arguments))
    return _checked(_libc.prctl(ctypes.c_int(option), *arguments))


def pointer(structure: ctypes.Structure) -> ctypes.c_void_p:
    """The address of `structure`, which the caller keeps alive over the call."""
    return ctypes.c_void_p(ctypes.addressof(structure))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
