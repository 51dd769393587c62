"""The library of failing_calls.c: built once with the system's C compiler, preloaded into the processes that are tortured."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("failing_calls.c")

WORKS_HERE = sys.platform == "linux"
"""Preloading and the names of the calls are glibc's."""

ACTIONS: dict[str, tuple[int, int]] = {
    "ENOSPC": (1, errno.ENOSPC), "EIO": (1, errno.EIO), "short write": (2, 0),
    "kill before": (3, 0), "kill after": (4, 0), "full disk": (5, errno.ENOSPC),
}  # fmt: skip
"""What can be done to a call → its number in `enum action`, and the error. After *full disk* no later call finds room either."""

WITH_DATA = ("write", "copy")
"""Calls that can be short."""


@dataclass(frozen=True, slots=True)
class Call:
    """One system call of a process: its name, the path below the folder that is watched, and the how manieth it is of that name and path."""

    name: str
    path: str
    occurrence: int = 1

    def __str__(self) -> str:
        return f"{self.name} {self.path} ({self.occurrence})"


@dataclass(frozen=True, slots=True)
class Blow:
    """What happens to one call."""

    call: Call
    action: str

    def __str__(self) -> str:
        return f"{self.action} at {self.call}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Blow:
        return cls(Call(**fields["call"]), fields["action"])


@cache
def library() -> Path:
    """Where the built library is. Its name follows from the source, so that one build serves every process."""
    built = Path(tempfile.gettempdir()) / f"failing_calls-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}.so"
    if not built.exists():
        draft = built.with_suffix(f".{os.getpid()}")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", draft, SOURCE, "-ldl"], check=True)
        draft.replace(built)
    return built


def arm(folder: Path, trace: Path | None, blow: Blow | None) -> None:
    """In the tortured process: write down every call below `folder`, and let one of them fail."""
    shim = ctypes.CDLL(None)  # preloaded, so its symbols are the process's own
    trace_to = -1 if trace is None else os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    call = blow.call if blow else Call("", "", 0)
    action, error = ACTIONS[blow.action] if blow else (0, 0)
    shim.arm(os.fsencode(folder), trace_to, call.name.encode(), os.fsencode(call.path), call.occurrence, action, error)


def traced(trace: Path) -> list[Call]:
    """The calls in a trace, in their order."""
    counts: dict[tuple[str, str], int] = {}
    calls: list[Call] = []
    for line in trace.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        name, path = line.split("\t", 1)
        counts[name, path] = counts.get((name, path), 0) + 1
        calls.append(Call(name, path, counts[name, path]))
    return calls
