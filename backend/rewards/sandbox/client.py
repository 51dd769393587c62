"""Scoring in a process of its own, kept warm: what a person's code does to that process is told in a sentence.

One process serves as long as the files stay as they are; when one has changed, a fresh interpreter reads it, so nothing
of the old code is left. Whoever waits may give up at any moment, and the process is ended.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.rewards.runner.user_traceback import Blame, Frame
from backend.rewards.sandbox.server import VERB
from backend.spec.command import backend_command, backend_environment
from backend.spec.events import json_safe
from backend.spec.faults import Fault, Mistake
from backend.spec.rewards.user_code import code_files

GRACE_S = 3.0
"""How long past its time limit the process may take to say so; code that holds the interpreter's lock never does."""
LOOK_S = 0.05


class Ended(Exception):
    """The process ended, or had to be ended, before it answered; the message says which, as the end of a sentence."""


@dataclass(slots=True)
class SandboxResult:
    """What one function gave. `scores`: one a completion, None where it had no opinion; empty with an `error`."""

    name: str
    seconds: float = 0.0
    scores: list[float | None] = field(default_factory=list)
    logged: dict[str, list[Any]] = field(default_factory=dict)
    error: Blame | None = None
    printed: str = ""


@dataclass(frozen=True, slots=True)
class SandboxTask:
    """What is to be scored, and by what: `lines` as `backend.rewards.completion_lines.group_of` reads them."""

    names: Sequence[str]
    lines: Sequence[Mapping[str, Any]]
    file: Path | None = None
    timeout_s: float = 60.0
    max_completion_length: int | None = None

    def begin(self) -> dict[str, Any]:
        about = {"names": list(self.names), "file": str(self.file or ""), "timeout": self.timeout_s}
        return {**about, "max_completion_length": self.max_completion_length, "groups": list(self.lines)}


class SandboxClient:
    """The other process. One task at a time; `close` ends it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._stamp: tuple[Any, ...] = ()
        self._lock = threading.Lock()

    def score(
        self,
        task: SandboxTask,
        poll: Callable[[], None] = lambda: None,
        tell: Callable[[str], None] = lambda name: None,
    ) -> list[SandboxResult]:
        """Every function over every completion, each by itself. `poll` is called often and may raise to give up; `tell`
        hears each function's name before it is called.

        Raises Mistake where the functions cannot be had, with a `blame` attribute where a file is at fault.
        """
        with self._lock:
            self._keep_fresh(task)
            try:
                return self._scored(task, poll, tell)
            except BaseException:
                self.close()
                raise

    def _scored(self, task: SandboxTask, poll: Callable[[], None], tell: Callable[[str], None]) -> list[SandboxResult]:
        names = self._begun(task, poll)
        outcomes: list[SandboxResult] = []
        for place, (name, line) in enumerate(names):
            tell(name)
            outcomes.append(self._one(task, place, name, line, poll))
        return outcomes

    def _begun(self, task: SandboxTask, poll: Callable[[], None]) -> list[tuple[str, int]]:
        try:
            said = self._ask({"begin": task.begin()}, task.timeout_s, poll)
        except Ended as ended:
            where = task.file.name if task.file else "The process that scores"
            raise Mistake("reward_functions_file", f"{where} {ended} while it was being loaded.") from None
        if "faults" in said:
            mistake = Mistake([Fault(**fault) for fault in said["faults"]])
            mistake.blame = _blame(said["blame"])  # type: ignore[attr-defined]
            raise mistake
        return said["ready"]

    def _one(self, task: SandboxTask, place: int, name: str, line: int, poll: Callable[[], None]) -> SandboxResult:
        """One function; where it took the process with it, the others get a new one."""
        try:
            if self._process is None:
                self._begun(task, poll)
            said = self._ask({"score": place}, task.timeout_s, poll)
        except Ended as ended:
            of_file = f" of {task.file.name}" if task.file else ""
            told = f"The reward function {name}{of_file} {ended}."
            return SandboxResult(name, error=Blame(told, str(task.file or ""), line))
        scored = said["scored"]
        error = _blame(scored.pop("error")) if scored["error"] else scored.pop("error")
        return SandboxResult(**scored, error=error, printed=said["printed"])

    # The process

    def _ask(self, question: dict[str, Any], timeout_s: float, poll: Callable[[], None]) -> dict[str, Any]:
        """Raises Ended, whatever `poll` raises, and Mistake for a line that cannot be understood."""
        process = self._process or self._start()
        assert process.stdin is not None
        line = json.dumps(json_safe(question), ensure_ascii=False, default=str).encode(errors="replace") + b"\n"
        with suppress(BrokenPipeError):  # told below, where nothing is answered
            process.stdin.write(line)
            process.stdin.flush()
        said = self._heard(process, timeout_s, poll)
        if not said:
            code = self._end()
            raise Ended(f"ended the process it ran in ({_how(code)})")
        return json.loads(said)

    def _heard(self, process: subprocess.Popen[bytes], timeout_s: float, poll: Callable[[], None]) -> bytes:
        """One line, or nothing once the process has ended."""
        assert process.stdout is not None
        until, pieces = time.monotonic() + timeout_s + GRACE_S, list[bytes]()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                poll()
                if selector.select(LOOK_S):
                    piece = process.stdout.read1(1 << 16)  # type: ignore[attr-defined]
                    pieces.append(piece)
                    if not piece or piece.endswith(b"\n"):
                        return b"".join(pieces) if piece else b""
                if time.monotonic() > until:
                    self._end()
                    raise Ended(f"was still running after {timeout_s:g} s (reward_timeout)")

    def _keep_fresh(self, task: SandboxTask) -> None:
        """A new process where a file is another one than the present process has read."""
        files = code_files({"reward_functions": list(task.names), "reward_functions_file": str(task.file or "")})
        stamp = tuple((str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in files)
        if stamp != self._stamp:
            self._end()
        self._stamp = stamp

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            _command(), env=backend_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        return self._process

    def _end(self) -> int:
        """End the process at once; the code it ended with, 0 where there was none."""
        process, self._process = self._process, None
        if process is None:
            return 0
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_S)
        process.kill()
        for stream in (process.stdin, process.stdout):
            with suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        return process.wait()

    def close(self) -> None:
        self._end()


def _blame(told: dict[str, Any]) -> Blame:
    return Blame(told["sentence"], told["file"], told["line"], tuple(Frame(**frame) for frame in told["frames"]))


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _command() -> list[str]:
    if getattr(sys, "frozen", False):
        return backend_command(VERB)
    return [sys.executable, "-P", "-m", "backend.rewards.sandbox.server"]
