"""The processes that a check of several machines starts on each of them, over ssh.

`python -m backend machine-probe` answers JSON lines:

    {"ask": "facts", "model": …, "reward_file": …}               → MachineFacts as a mapping
    {"ask": "link", "backend": …, "variables": …, "files": …}    → LinkSpeed as a mapping, as this rank measured it
    any of them                                                  → {"error": a sentence}

A line of an answer begins with MARKER, since a shell's startup files may write to the same stream. The process ends
when its stdin does, also in the midst of a sum that waits for a rank that will never come, and after LIFETIME_S at the
latest.

`python -m backend machine-receive` takes a model from its stdin (`receive`).
"""

from __future__ import annotations

import json
import os
import platform
import queue
import shutil
import statistics
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import psutil

from backend.distributed import RECEIVE
from backend.distributed.commands import mpirun
from backend.distributed.machine_report import GRADIENT_BYTES, RESERVE, LinkSpeed, MachineFacts
from backend.utils.child_process import claim_stdout, json_line
from backend.utils.command import is_bundled
from backend.utils.disk_faults import cause, require_room, room_on
from backend.utils.errors import UserError
from backend.utils.files import is_file, is_folder, is_folder_name, user_path
from backend.utils.hub_cache import hub_cache, local_folder, repo_cache
from backend.utils.machine import has_gpu, machine_bytes, processor
from backend.utils.places import project_root
from backend.utils.text import quote
from backend.utils.whole_file import replace_file

MARKER = "grpo-studio "
LIFETIME_S = 300.0
"""Longer than any check takes (`backend.distributed.machine_check`)."""
CUDA_PACKAGES = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")
DEVICES_S = 5.0
"""Seconds for the list of RDMA devices."""
LATENCY_SUMS = 21
SMALL_BYTES = 1_000_000
"""Of the first large sum; where it alone takes longer than SLOW_S, no larger one follows."""
SLOW_S = 1.0
MOST_FILES = 10_000
"""Files of a model's folder."""
BLOCK = 1 << 20


def main(verb: str) -> int:
    out = claim_stdout()
    if verb == RECEIVE:
        _write(out, _received())
        return 0
    timer = threading.Timer(LIFETIME_S, os._exit, [1])
    timer.daemon = True
    timer.start()
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            lines.put(line)
        os._exit(0)  # the main thread may be in a call that never returns

    threading.Thread(target=read, name="requests", daemon=True).start()
    while True:
        request = json.loads(lines.get())
        try:
            if request["ask"] == "facts":
                answer = asdict(facts(request.get("model", ""), request.get("reward_file", "")))
            else:
                answer = asdict(measure(request["backend"], request["variables"], request["files"]))
        except Exception as error:  # whatever mlx, the network or a disk raises is the check's finding
            answer = {"error": f"{type(error).__name__}: {error}"}
        _write(out, answer)


def _write(out: IO[str], answer: dict[str, Any]) -> None:
    out.write(MARKER + json_line(answer))
    out.flush()


def facts(model: str = "", reward_file: str = "") -> MachineFacts:
    """About this machine. Loads no mlx, and takes a fraction of a second."""
    memory, room = psutil.virtual_memory(), room_on(hub_cache())
    files = model_files(model) if model else {}
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
    """Of the trainer's source files: a checkout may have changed under the same version."""
    if is_bundled():
        return ""
    digest = sha256()
    package = Path(project_root(), "backend")
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _rdma_devices() -> tuple[str, ...]:
    if shutil.which("ibv_devices") is not None:
        with suppress(OSError, subprocess.SubprocessError):
            listed = subprocess.run(["ibv_devices"], capture_output=True, text=True, timeout=DEVICES_S).stdout
            return tuple(word for word in listed.split() if word.startswith("rdma_"))
    return ()


def measure(backend: str, variables: dict[str, str], files: dict[str, str]) -> LinkSpeed:
    """How fast the ranks sum on the CPU's stream, as a run sums its gradients; every rank calls it at the same time.
    `variables` and `files` as `commands.mlx_environment` has them. Raises RuntimeError where the ranks do not find each
    other."""
    import tempfile

    os.environ |= variables
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            Path(folder, name).write_text(content, encoding="utf-8")
            os.environ[name] = str(Path(folder, name))
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
    """Name, with / between its parts → bytes of the files of a model, a folder or an id of the Hub; hidden ones are
    left out. Empty where the model is not on this machine."""
    folder = local_folder(model)
    found: dict[str, int] = {}
    for place, folders, names in os.walk(folder or ""):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(place, name)
            if folder is not None and not name.startswith(".") and path.is_file():
                found[path.relative_to(folder).as_posix()] = path.stat().st_size
        if len(found) > MOST_FILES:
            return {}
    is_model = "config.json" in found and any(name.endswith(".safetensors") for name in found)
    return found if is_model else {}


def digest_of(model: str) -> str:
    """Of the names and sizes of weights and tokenizer, and of the contents of config.json, so that two machines can be
    compared without reading weights; "" where the model is not here."""
    files, folder = model_files(model), local_folder(model)
    if not files or folder is None:
        return ""
    compared = [
        (name, size)
        for name, size in files.items()
        if name.endswith(".safetensors") or name in ("config.json", "tokenizer.json")
    ]
    return sha256(repr(compared).encode() + (folder / "config.json").read_bytes()).hexdigest()[:16]


def _received() -> dict[str, Any]:
    try:
        receive(sys.stdin.buffer)
    except UserError as error:
        return {"error": error.faults[0].sentence}
    except OSError as error:
        return {"error": f"{error.filename or 'a file'} cannot be written: {cause(error)}."}
    return {"done": True}


def receive(stream: IO[bytes]) -> None:
    """Write a model where it belongs on this machine. The stream has a line of JSON, {"model", "revision", "names",
    "bytes"}, and a tar archive. An id of the Hub goes into the cache, under the same revision; a folder keeps its path.
    config.json comes last: as long as it is missing, nothing takes the folder for a model. Raises UserError."""
    header = json.loads(stream.readline(BLOCK))
    model, revision = str(header["model"]), str(header["revision"])
    folder = _place(model, revision, set(header["names"]))
    require_room(folder, int(header["bytes"]) + RESERVE, "The model")
    is_whole = False
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                parts, content = member.name.split("/"), archive.extractfile(member)
                if not all(map(is_folder_name, parts)) or content is None:
                    raise UserError("model", f"{quote(member.name)} cannot be a file of a model.")
                path = folder.joinpath(*parts)
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, _blocks(content, member.size))
                is_whole = member.name == "config.json"
    except tarfile.TarError:  # it was cut off
        pass
    if not is_whole:
        raise UserError("model", "The copy has ended before its end.")
    if revision:
        refs = repo_cache(model) / "refs" / "main"
        refs.parent.mkdir(parents=True, exist_ok=True)
        replace_file(refs, revision)


def _blocks(content: IO[bytes], size: int) -> Iterator[bytes]:
    """Raises TarError where the stream ends before the file does."""
    while block := content.read(BLOCK):
        size -= len(block)
        yield block
    if size:
        raise tarfile.ReadError("unexpected end of data")


def _place(model: str, revision: str, names: set[str]) -> Path:
    """The folder to write to. Raises UserError for one that holds anything else: nothing of the user's is
    overwritten."""
    if revision:
        if not is_folder_name(revision):
            raise UserError("model", "The revision is no folder's name.")
        return repo_cache(model) / "snapshots" / revision
    folder = user_path(model, "model")
    present = set[str]()
    if is_folder(folder):
        present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if "config.json" in present or not present <= names:
        raise UserError("model", f"There is another folder {quote(folder)}; move it away first.")
    return folder
