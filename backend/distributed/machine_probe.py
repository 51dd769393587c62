"""The process that a check of several machines starts on each of them, over ssh: `python -m backend machine-probe`.

It reads one line of JSON and answers with one:

    {"ask": "facts", "model": …, "reward_file": …}               → MachineFacts as a mapping
    {"ask": "place", "model": …, "revision": …, "names": …}      → {"folder": where a copied model goes}
    {"ask": "link", "backend": …, "variables": …, "files": …}    → LinkSpeed as a mapping, as this rank measured it
    any of them                                                  → {"error": a sentence}

The answer begins with MARKER, since a shell's startup files may write to the same stream. The process ends when its
stdin does, also in a sum that waits for a rank that will never come.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from backend.distributed.commands import mlx_files, mpirun
from backend.distributed.machine_report import GRADIENT_BYTES, RESERVE, LinkSpeed, MachineFacts
from backend.utils.child_process import claim_stdout, json_line
from backend.utils.command import is_bundled
from backend.utils.disk import require_room, room_on
from backend.utils.errors import UserError
from backend.utils.files import is_file, is_folder, is_folder_name, user_path
from backend.utils.hub_cache import hub_cache, local_folder, repo_cache
from backend.utils.machine import has_gpu, machine_bytes, processor
from backend.utils.places import project_root
from backend.utils.text import quote

MARKER = "grpo-studio "
CUDA_PACKAGES = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")
DEVICES_S = 5.0
LATENCY_SUMS = 21
SMALL_BYTES = 1_000_000
"""Of the first large sum."""
SLOW_S = 1.0


def main() -> int:
    out = claim_stdout()
    request = json.loads(sys.stdin.buffer.readline())

    def end_with_stdin() -> None:
        sys.stdin.buffer.read()
        os._exit(0)  # the main thread may be in a call that never returns

    threading.Thread(target=end_with_stdin, daemon=True).start()
    try:
        if request["ask"] == "facts":
            answer = asdict(facts(request["model"], request["reward_file"]))
        elif request["ask"] == "place":
            answer = {"folder": str(place(request["model"], request["revision"], request["names"], request["bytes"]))}
        else:
            answer = asdict(measure(request["backend"], request["variables"], request["files"]))
    except UserError as error:
        answer = {"error": error.faults[0].sentence}
    except Exception as error:  # whatever mlx, the network or a disk raises is the check's finding
        answer = {"error": f"{type(error).__name__}: {error}"}
    out.write(MARKER + json_line(answer))
    out.flush()
    return 0


def facts(model: str = "", reward_file: str = "") -> MachineFacts:
    """About this machine. Loads no mlx, and takes a fraction of a second."""
    memory, room, macos = psutil.virtual_memory(), room_on(hub_cache()), platform.mac_ver()[0]
    files = model_files(model) if model else {}
    return MachineFacts(
        machine=platform.node(),
        system=f"macOS {macos}" if macos else f"{platform.system()} {platform.release()}",
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
        model_bytes=sum(files.values()),
        has_reward_file=is_file(user_path(reward_file, "reward_functions_file")) if reward_file else None,
    )


def has_cuda() -> bool:
    """True if the installed mlx computes on CUDA, which shows without loading it."""
    return any(_version(package) for package in CUDA_PACKAGES)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _code_digest() -> str:
    if is_bundled():
        return ""
    digest = sha256()
    package = Path(project_root(), "backend")
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _rdma_devices() -> tuple[str, ...]:
    if shutil.which("ibv_devices") is None:
        return ()
    listed = subprocess.run(["ibv_devices"], capture_output=True, text=True, timeout=DEVICES_S).stdout
    return tuple(word for word in listed.split() if word.startswith("rdma_"))


def measure(backend: str, variables: dict[str, str], files: dict[str, str]) -> LinkSpeed:
    """Measure sums on the CPU's stream, as a run sums gradients; every rank calls it at the same time. Raises
    RuntimeError."""
    os.environ |= variables
    with mlx_files(files):
        import mlx.core as mx

        group = mx.distributed.init(backend=backend.removesuffix("-ring"), strict=True)

    def sum_s(values: int) -> float:
        array = mx.ones(values)
        mx.eval(array)
        began = time.perf_counter()
        mx.eval(mx.distributed.all_sum(array, group=group, stream=mx.cpu))
        return time.perf_counter() - began

    sum_s(1)  # the first one connects
    latency = statistics.median(sum_s(1) for _ in range(LATENCY_SUMS))
    size = SMALL_BYTES
    # All ranks must take the same branch, so the slowest of them decides.
    first: Any = mx.distributed.all_max(mx.array([sum_s(size // 4)]), group=group, stream=mx.cpu).item()
    seconds: float = first
    if seconds < SLOW_S:
        size = GRADIENT_BYTES
        seconds = min(sum_s(size // 4) for _ in range(3))
    return LinkSpeed(latency, size / seconds, group.size())


def model_files(model: str) -> dict[str, int]:
    """Relative name → bytes of a model's files, hidden ones left out; empty if it is not on this machine."""
    if (folder := local_folder(model)) is None:
        return {}
    paths = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    found = {
        name.as_posix(): path.stat().st_size
        for name, path in paths.items()
        if not any(part.startswith(".") for part in name.parts)
    }
    is_model = "config.json" in found and any(name.endswith(".safetensors") for name in found)
    return found if is_model else {}


def digest_of(model: str) -> str:
    """Digest of names, sizes and config.json, to compare machines without reading weights; "" without the model."""
    files, folder = model_files(model), local_folder(model)
    if not files or folder is None:
        return ""
    compared = [
        (name, size)
        for name, size in files.items()
        if name.endswith(".safetensors") or name in ("config.json", "tokenizer.json")
    ]
    return sha256(repr(compared).encode() + (folder / "config.json").read_bytes()).hexdigest()[:16]


def place(model: str, revision: str, names: list[str], size: int) -> Path:
    """The folder for a copied model of `size` bytes. Raises UserError without room, or where it would overwrite
    anything."""
    folder = repo_cache(model) if revision else user_path(model, "model")
    require_room(folder, size + RESERVE, "The model")
    if revision:
        if not is_folder_name(revision):
            raise UserError("model", "The revision is no folder's name.")
        return folder
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if is_folder(folder) and ("config.json" in present or not present <= {*names}):
        raise UserError("model", f"There is another folder {quote(folder)}; move it away first.")
    return folder
