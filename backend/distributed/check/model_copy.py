"""A model copied to another machine over ssh: its files, one after the other, into the stdin of `python -m backend machine-receive`.

The first line is a header, {"model", "revision", "files": [[name, bytes], …]}; the files' bytes follow without anything between them, and
the SHA-256 of all of them. config.json comes last: as long as it is missing, nothing takes the folder for a model. An id of the Hub goes
into that machine's cache, under the same revision; a folder keeps its path. A file that is there with the same size is sent all the same:
a copy is asked for where something differs.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from backend.distributed.check.machine_verbs import MARKER, RECEIVE
from backend.distributed.check.model_files import ModelFile, model_files
from backend.distributed.hosts_file import Host, rank_environment, rank_program, ssh_command
from backend.distributed.machine_report import COPY_LIMIT, RESERVE
from backend.utils.child_process import claim_stdout, json_line
from backend.utils.disk_faults import cause, require_room
from backend.utils.errors import UserError
from backend.utils.files import is_folder, is_folder_name, user_path
from backend.utils.hub_cache import local_folder, repo_cache
from backend.utils.own_files import own_file
from backend.utils.text import quote
from backend.utils.whole_file import replace_file

BLOCK = 1 << 20
STALLED_S = 30.0
"""How long a copy may make no progress."""
POLL_S = 0.2
HEADER_LIMIT = 1 << 20

# ── here ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def copy_model(model: str, host: Host, label: str, report: Callable[[float], None], poll: Callable[[], None]) -> None:
    """Copy a model of this machine to another. `report` gets the share that is sent, `poll` may raise to give up.

    Raises UserError, naming the machine, where it fails; what has arrived stays, without config.json.
    """
    folder, files = local_folder(model), model_files(model)
    total = sum(file.size for file in files)
    if folder is None or not files:
        raise UserError("model", f"The model {quote(model)} is not on this machine, so it cannot be copied to {label}.")
    if total > COPY_LIMIT:
        raise UserError("model", f"The model {quote(model)} is larger than the {COPY_LIMIT:,} bytes that are copied.")
    for file in files:
        own_file(folder / file.name, folder, "model")
    files.sort(key=lambda file: file.name == "config.json")
    process = subprocess.Popen(
        ssh_command(host, rank_program(host, RECEIVE), rank_environment(host)),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, start_new_session=True,
    )  # fmt: skip
    try:
        _send(process, _stream(model, folder, files), total, report, poll)
        answer = _answer_of(process)
    finally:
        process.kill()
        process.communicate()
    if problem := answer.get("error", ""):
        raise UserError("model", f"{label} could not take the model: {quote(problem, 110)}")


def _stream(model: str, folder: Path, files: list[ModelFile]) -> Iterator[bytes]:
    header = {"model": model, "revision": _revision(model, folder), "files": [[file.name, file.size] for file in files]}
    yield json_line(header).encode()
    digest = sha256()
    for file in files:
        left = file.size
        with (folder / file.name).open("rb") as content:
            while left and (block := content.read(min(BLOCK, left))):
                digest.update(block)
                left -= len(block)
                yield block
        if left:
            raise UserError("model", f"{quote(folder / file.name)} has become shorter while it was copied.")
    yield digest.digest()


def _revision(model: str, folder: Path) -> str:
    """The name of a cached snapshot; "" for a folder of the user's."""
    return "" if is_folder(user_path(model, "model")) else folder.name


def _send(
    process: subprocess.Popen[bytes], blocks: Iterator[bytes], total: int, report: Callable[[float], None], poll: Callable[[], None]
) -> None:  # fmt: skip
    """Write as the pipe takes it, so that a stalled connection is noticed. Returns early where the other end has ended."""
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    sent, moved = 0, time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        for block in blocks:
            rest = memoryview(block)
            while rest:
                poll()
                if time.monotonic() - moved > STALLED_S:
                    raise UserError(
                        "model", f"The copy of the model has stalled: nothing was taken for {STALLED_S:.0f} s."
                    )
                if not selector.select(POLL_S):
                    continue
                try:
                    written = os.write(process.stdin.fileno(), rest)
                except BrokenPipeError:
                    return
                rest, sent, moved = rest[written:], sent + written, time.monotonic()
            report(min(sent / total, 1.0))
    process.stdin.close()


def _answer_of(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The receiver's last word; stdin is closed, or it has ended."""
    assert process.stdout is not None
    process.stdin = None
    try:
        out, err = process.communicate(timeout=STALLED_S)
    except subprocess.TimeoutExpired:
        return {"error": "It has not answered."}
    for line in out.decode(errors="replace").splitlines():
        if line.startswith(MARKER):
            return json.loads(line.removeprefix(MARKER))
    last = err.decode(errors="replace").strip().splitlines()[-1:]
    return {"error": last[0] if last else f"ssh ended with exit code {process.returncode}."}


# ── there ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def main() -> int:
    """The receiver; its stdin ends early where the sender or the connection has."""
    out = claim_stdout()
    try:
        receive(sys.stdin.buffer)
        answer: dict[str, Any] = {"done": True}
    except UserError as mistake:
        answer = {"error": mistake.faults[0].sentence}
    except OSError as error:
        answer = {"error": f"{error.filename or 'a file'} cannot be written: {cause(error)}."}
    out.write(MARKER + json_line(answer))
    out.flush()
    return 0


def receive(stream: IO[bytes]) -> None:
    """Write the files of a stream where the model belongs on this machine. Raises UserError."""
    header = json.loads(stream.readline(HEADER_LIMIT))
    model, revision, files = (
        str(header["model"]),
        str(header["revision"]),
        [(str(name), int(size)) for name, size in header["files"]],
    )
    folder = _place(model, revision, {name for name, _ in files})
    require_room(folder, sum(size for _, size in files) + RESERVE, "The model")
    digest = sha256()
    for name, size in files:
        path = folder.joinpath(*_parts(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == "config.json":
            _check(stream, digest, path, size)
        else:
            replace_file(path, _blocks(stream, size, digest))
    if revision:
        refs = repo_cache(model) / "refs" / "main"
        refs.parent.mkdir(parents=True, exist_ok=True)
        replace_file(refs, revision)


def _check(stream: IO[bytes], digest: Any, path: Path, size: int) -> None:
    """Write config.json, the last file, once the sum of everything is right."""
    content = b"".join(_blocks(stream, size, digest))
    if stream.read(digest.digest_size) != digest.digest():
        raise UserError("model", "The files have arrived damaged.")
    replace_file(path, [content])


def _blocks(stream: IO[bytes], size: int, digest: Any) -> Generator[bytes]:
    while size:
        block = stream.read(min(BLOCK, size))
        if not block:
            raise UserError("model", "The copy has ended before its end.")
        digest.update(block)
        size -= len(block)
        yield block


def _place(model: str, revision: str, names: set[str]) -> Path:
    """The folder to write to. Raises UserError for one that holds anything else: nothing of the user's is overwritten."""
    if revision:
        if not is_folder_name(revision):
            raise UserError("model", "The revision is no folder's name.")
        return repo_cache(model) / "snapshots" / revision
    folder = user_path(model, "model")
    present = (
        {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        if is_folder(folder)
        else set[str]()
    )
    if "config.json" in present or not present <= names:
        raise UserError("model", f"There is another folder {quote(folder)}; move it away first.")
    return folder


def _parts(name: str) -> list[str]:
    parts = name.split("/")
    if not all(map(is_folder_name, parts)):
        raise UserError("model", f"{quote(name)} cannot be a file of a model.")
    return parts


if __name__ == "__main__":
    sys.exit(main())
