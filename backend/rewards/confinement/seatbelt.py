"""macOS sandbox (Seatbelt) through `sandbox_init`. Sources: sandbox_init(3), /System/Library/Sandbox/Profiles,
Chromium's sandbox/policy/mac/common.sb. The last matching rule wins."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from pathlib import Path

_LIBRARY = "/usr/lib/libsandbox.1.dylib"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/dtracehelper")
_SERVICES = (
    # the keychain
    *("com.apple.SecurityServer", "com.apple.securityd", "com.apple.securityd.xpc", "com.apple.secd"),
    # starting programs outside the sandbox
    *("com.apple.coreservices.launchservicesd", "com.apple.lsd.open", "com.apple.coreservices.appleevents"),
    *("com.apple.xpc.smd", "com.apple.pasteboard.1"),
)  # services that could bypass the sandbox


def profile(writable: Sequence[Path], unreadable: Iterable[Path], network: bool) -> str:
    """Text of the profile, with resolved paths."""
    own = " ".join(f"(subpath {_quoted(path.resolve())})" for path in writable)
    sockets = ("(deny network* (local unix-socket))", "(deny network* (remote unix-socket))")
    lines = [
        "(version 1)",
        "(allow default)",
        "(deny file-write*)",
        f"(allow file-write* {own})",
        f"(allow file-write-data {' '.join(f'(literal {_quoted(device)})' for device in _DEVICES)})",
        *(f"(deny file-read-data (subpath {_quoted(path.resolve())}))" for path in unreadable),
        "(deny signal)",
        "(allow signal (target same-sandbox))",
        "(deny process-info*)",
        "(allow process-info* (target same-sandbox))",
        "(deny mach-priv-task-port)",
        "(deny appleevent-send)",
        "(deny lsopen)",
        "(deny job-creation)",
        "(deny ipc-sysv*)",
        f"(deny mach-lookup {' '.join(f'(global-name {_quoted(name)})' for name in _SERVICES)})",
        # Unix sockets of others lead to their services, with or without the internet.
        *(sockets if network else ("(deny network*)",)),
        f"(allow network* (local unix-socket {own}))",
        f"(allow network* (remote unix-socket {own}))",
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: Path | str) -> str:
    return '"' + str(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def restrict(text: str) -> None:
    """Apply a profile to this process and its children. Raises OSError, also inside another sandbox."""
    library = ctypes.CDLL(_LIBRARY)
    library.sandbox_init.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.POINTER(ctypes.c_char_p)]
    error = ctypes.c_char_p()
    if library.sandbox_init(text.encode(), 0, ctypes.byref(error)) != 0:
        sentence = (error.value or b"no reason given").decode(errors="replace").strip()
        raise OSError(f"seatbelt refused the profile: {sentence}")
