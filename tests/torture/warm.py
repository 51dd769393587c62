"""A process that has imported the engine, and forks one child for each command line: a trainer that starts in milliseconds.

Importing takes a second and a half, and a torture starts a thousand trainers. mlx has started no thread before its first array is computed, so
a fork of a process that has only imported it is as sound as a new one; what the child does from there is `python -m backend`.

    server: python -m tests.torture.warm        a request on each line of stdin, an answer on each line of stdout
    client: WarmProcess

The server adopts what its children leave behind (PR_SET_CHILD_SUBREAPER), so processes that outlive a killed trainer are seen.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.torture.preload import WORKS_HERE, Blow, arm, library

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
"""A process that has not ended after this hangs, and is killed."""
KERNELS = "mlx"
"""Where mlx keeps what it has compiled, in the folder of temporary files."""
ORPHANS_MAY_TAKE_S = 5.0
"""How long a child of a killed trainer may take to notice and to end."""

IMPORTED = (
    *("backend.__main__", "backend.trainer.preflight", "backend.trainer.run_process", "backend.runs.clone", "backend.trainer.evaluation.comparison"),
    *("backend.trainer.evaluation.comparison", "backend.export.export_run", "backend.runs.sweeps.run_sweep", "backend.runs.sweeps.inputs"),
    *("backend.cli.sweep", "backend.cli.evaluate", "backend.cli.evaluate", "backend.cli.export"),
    *("backend.cli.runs", "backend.cli.train", "backend.cli.train", "backend.cli.progress", "backend.cli.training"),
    *("mlx_lm.utils", "mlx_lm.models.qwen3", "mlx_lm.models.llama", "mlx.optimizers", "transformers"),
    *("backend.cli.queue", "backend.cli.help_page", "transformers.models.qwen3.configuration_qwen3"),
    *("tokenizers", "jinja2.sandbox", "rich.console", "rich.progress", "backend.export.gguf.gguf_file"),
)  # fmt: skip
"""What the verbs of the tortures import sooner or later."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended. `code`: its exit code, or minus the signal."""

    code: int
    seconds: float
    output: str
    left: list[str] = field(default_factory=list)
    """Command lines of the processes that it left behind, which have been killed."""
    hung: bool = False

    @property
    def last_words(self) -> str:
        """The end of what it printed."""
        return "\n".join(self.output.splitlines()[-12:])


class WarmProcess:
    """Runs command lines of the backend in forks of one warm process, one after the other. `folder` takes their output. Without `compiles`
    mlx fuses no kernels, which on a CPU each cost a run of the compiler when they are first needed; everything is computed alike."""

    def __init__(self, folder: Path, *, compiles: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.last: Ended | None = None
        """How the last process ended."""
        self._output = folder / "output.txt"
        self._temporary = folder / "temporary"
        self._temporary.mkdir()
        kernels = Path(tempfile.gettempdir()) / KERNELS  # compiled once for every process of this machine
        kernels.mkdir(exist_ok=True)
        (self._temporary / KERNELS).symlink_to(kernels, target_is_directory=True)
        environment = os.environ | {"LD_PRELOAD": str(library()), "PYTHONUNBUFFERED": "1"}
        environment["TMPDIR"] = str(self._temporary)
        if not compiles:
            environment["MLX_DISABLE_COMPILE"] = "1"
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.torture.warm"], cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(
        self,
        *arguments: str | Path,
        home: Path,
        kill_after_s: float | None = None,
        watch: Path | None = None,
        trace: Path | None = None,
        blow: Blow | None = None,
    ) -> Ended:
        """Run `python -m backend ARGUMENTS` with its home in `home`, to its end. `kill_after_s`: SIGKILL it then. `watch`: the folder
        whose calls go to the file `trace`, and where `blow` strikes; `home` by default."""
        request = {
            "arguments": [str(argument) for argument in arguments], "home": str(home), "output": str(self._output),
            "kill_after_s": kill_after_s, "watch": str(watch or home), "trace": None if trace is None else str(trace),
            "blow": None if blow is None else blow.to_dict(),
        }  # fmt: skip
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        answer = self._server.stdout.readline()
        assert answer, "the warm process has ended"
        self.last = Ended(**json.loads(answer))
        return self.last

    def take_temporary_files(self) -> list[str]:
        """What the processes have left in their folder of temporary files, which is emptied."""
        left = [path for path in self._temporary.iterdir() if path.name != KERNELS]
        for path in left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return sorted(path.name for path in left)

    def close(self) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ── the server ───────────────────────────────────────────────────────────────────────────────────────────────────────


def serve() -> int | None:
    """Answer requests until stdin ends. In a forked child this becomes the backend's `main`."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    from backend.engine.cpu import blas
    from backend.models import transformers_scan

    blas.prepare()
    transformers_scan.prepare()
    for name in IMPORTED:
        importlib.import_module(name)
    os.environ.pop("LD_PRELOAD", None)  # not for the children of children, where it would see nothing and cost time
    gc.collect()
    gc.freeze()
    # Not sys.stdin: a child would share its buffer, and sys.exit of a child would close it.
    with os.fdopen(os.dup(0), "r") as requests:
        while line := requests.readline():
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                return _become(request)
            ended = _wait(pid, request["kill_after_s"], Path(request["output"]))
            os.write(1, (json.dumps(asdict(ended)) + "\n").encode())
    return 0


def _become(request: dict[str, Any]) -> int | None:
    """The forked child: a process of the backend with these arguments."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for number, source in enumerate((null, output, output)):
        os.dup2(source, number)
    home = Path(request["home"])
    os.environ |= {"HOME": str(home), "GRPO_STUDIO_RUNS": str(home / "runs"), "GRPO_STUDIO_PREFS": str(home / "prefs")}
    os.chdir(home)
    sys.argv = ["backend", *request["arguments"]]
    blow = None if request["blow"] is None else Blow.from_dict(request["blow"])
    arm(Path(request["watch"]), None if request["trace"] is None else Path(request["trace"]), blow)
    from backend.__main__ import main

    return main()


def _wait(pid: int, kill_after_s: float | None, output: Path) -> Ended:
    began, killed, hung = time.monotonic(), False, False
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        passed = time.monotonic() - began
        hung = passed > PATIENCE_S
        if hung or (kill_after_s is not None and passed >= kill_after_s and not killed):
            os.kill(pid, signal.SIGKILL)
            killed = True
        time.sleep(0.0005)
    seconds, left = time.monotonic() - began, _left_behind()
    text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    return Ended(os.waitstatus_to_exitcode(status), seconds, text, left, hung)


def _left_behind() -> list[str]:
    """What the child has left behind, which is now ours: reaped as it ends, killed where it does not."""
    until = time.monotonic() + ORPHANS_MAY_TAKE_S
    while children := _children():
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if children and time.monotonic() > until:
            lines = [_command_line(pid) for pid in children]
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
            return lines
        time.sleep(0.002)
    return []


def _children() -> Sequence[int]:
    """Children of this process; those of threads do not exist, for it has one."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return str(pid)


if __name__ == "__main__":
    assert WORKS_HERE, "forking a process with threads, /proc and LD_PRELOAD are Linux's"
    sys.exit(serve())
