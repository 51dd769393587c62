"""`python -m backend machine-probe`: what the check of several machines runs on each of them. It answers JSON lines over ssh.

    {"ask": "facts", "model": …, "reward_file": …}               → MachineFacts as a mapping
    {"ask": "link", "backend": …, "variables": …, "files": …}    → {"rank", "speed"}: LinkSpeed as this rank measured it
    any of them                                                  → {"error": a sentence}

A line of an answer begins with MARKER, since a shell's startup files may write to the same stream. The process ends when its stdin does,
also in the midst of a sum that waits for a rank that will never come, and after LIFETIME_S at the latest: none is left on a machine that
the check can no longer reach.
"""

from __future__ import annotations

import json
import os
import platform
import queue
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from backend.distributed.check.machine_verbs import MARKER, end_after
from backend.distributed.check.model_files import digest_of, model_files
from backend.distributed.machine_report import MachineFacts
from backend.distributed.open_mpi import mpirun
from backend.utils.child_process import claim_stdout, json_line
from backend.utils.command import is_bundled
from backend.utils.disk_faults import room_on
from backend.utils.files import is_file, user_path
from backend.utils.hub_cache import hub_cache
from backend.utils.machine import has_gpu, machine_bytes, processor
from backend.utils.places import project_root

LIFETIME_S = 300.0
"""Longer than any check takes (`backend.distributed.check.machine_check`)."""
CUDA_PACKAGES = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")
DEVICES_S = 5.0
"""How long the list of RDMA devices may take."""


def main() -> int:
    out = claim_stdout()
    end_after(LIFETIME_S)
    for request in _requests_until_the_pipe_ends():
        out.write(MARKER + json_line(_answer(request)))
        out.flush()
    return 0


def _requests_until_the_pipe_ends() -> Any:
    """Requests, read by a thread that ends the process at the end of stdin: the main thread may be in a call that never returns."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, name="requests", daemon=True).start()
    while True:
        yield json.loads(lines.get())


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        if request["ask"] == "facts":
            return asdict(facts(request.get("model", ""), request.get("reward_file", "")))
        from backend.distributed.check.link import measure

        return measure(request["backend"], request["variables"], request["files"])
    except Exception as error:  # whatever mlx, the network or a disk raises is the check's finding
        return {"error": f"{type(error).__name__}: {error}"}


def facts(model: str = "", reward_file: str = "") -> MachineFacts:
    """About this machine. Loads no mlx, and takes a fraction of a second."""
    memory, room = psutil.virtual_memory(), room_on(hub_cache())
    files = model_files(model) if model else []
    return MachineFacts(
        machine=platform.node(),
        system=f"macOS {macos}" if (macos := platform.mac_ver()[0]) else f"{platform.system()} {platform.release()}",
        chip=processor(),
        device="gpu" if has_gpu() or has_cuda() else "cpu",
        memory=memory.total,
        memory_free=memory.available,
        memory_usable=machine_bytes(),
        disk_free=None if room is None else room.bytes,
        python=platform.python_version(),
        grpo_studio=_version("grpo-studio"),
        code=_code_digest(),
        mlx=_version("mlx"),
        mlx_lm=_version("mlx-lm"),
        has_mpi=mpirun() is not None,
        rdma_devices=_rdma_devices(),
        model=digest_of(model) if files else "",
        model_bytes=sum(file.size for file in files),
        has_reward_file=is_file(user_path(reward_file, "reward_functions_file")) if reward_file else None,
    )


def has_cuda() -> bool:
    """Whether the mlx that is installed computes on CUDA; told without loading it."""
    return any(_version(package) for package in CUDA_PACKAGES)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@cache
def _code_digest() -> str:
    """Of the trainer's source files: a checkout may have changed under the same version."""
    if is_bundled():
        return ""
    digest = sha256()
    package = Path(project_root(), "backend")
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _rdma_devices() -> tuple[str, ...]:
    """What `ibv_devices` lists; nothing where there is no such command or no device."""
    if shutil.which("ibv_devices") is None:
        return ()
    with suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(["ibv_devices"], capture_output=True, text=True, timeout=DEVICES_S).stdout
        return tuple(word for word in listed.split() if word.startswith("rdma_"))
    return ()


if __name__ == "__main__":
    sys.exit(main())
