"""Backend processes: a training that outlives the window, and a short verb whose output the window wants.

A training is let go at once: it has its own session, writes into its run's log.txt, and is followed through the run's
folder only (`app.model.run`), never through a pipe or a pid. A `VerbProcess` belongs to the window and ends with it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass, field

from PySide6.QtCore import QObject, QProcess, QProcessEnvironment, QTimer, Signal

from backend.spec.command import backend_command, backend_environment
from backend.spec.faults import Mistake
from backend.spec.places import RunFolder

GRACE_MS = 3000
"""How long a task that was asked to end may take before it is killed."""


def start_training(config_text: str, run: RunFolder) -> None:
    """Write the run's config.yaml and start `train --run` on it, detached. Raises Mistake when either cannot be done."""
    try:
        run.config.write_text(config_text, encoding="utf-8")
    except OSError as error:
        raise Mistake("run_name", f"{run.config} cannot be written: {error.strerror}.") from None
    start_detached(backend_command("train", "--run", str(run.path)), run)


def resume_training(run: RunFolder) -> None:
    """Go on with a run from its newest checkpoint, detached. Raises Mistake when the process cannot be started."""
    start_detached(backend_command("resume", str(run.path)), run)


def start_detached(command: list[str], run: RunFolder) -> None:
    """Start a process that the end of this one does not touch; what it prints is appended to the run's log.txt.

    Qt gives a detached child a session, and so a process group, of its own: neither closing the window nor Ctrl-C in
    the terminal that opened it reaches the training. Raises Mistake when the process cannot be started.
    """
    process = QProcess()
    process.setProgram(command[0])
    process.setArguments(command[1:])
    process.setProcessEnvironment(_environment())
    process.setWorkingDirectory(str(run.path))
    process.setStandardInputFile(QProcess.nullDevice())
    process.setStandardOutputFile(str(run.log), QProcess.OpenModeFlag.Append)
    process.setStandardErrorFile(str(run.log), QProcess.OpenModeFlag.Append)
    started = process.startDetached()  # PySide gives (ok, pid); nobody here trusts a pid
    if not (started[0] if isinstance(started, tuple) else started):
        raise Mistake("run", f"{command[0]} cannot be started: {process.errorString()}.")


@dataclass(frozen=True, slots=True)
class ProcessOutcome:
    """How a task ended. `sentence` is for people: the last line of what it printed, or why it came to nothing."""

    ok: bool
    exit_code: int
    """The process's exit status; −1 when it never started or was killed."""
    sentence: str
    output: str
    """Every line that was printed, as read; between the two streams the order is not certain."""


@dataclass
class _Stream:
    """Bytes become lines: an unfinished character or line waits for the next read."""

    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )
    waiting: str = ""
    lines: list[str] = field(default_factory=list)

    def feed(self, chunk: bytes, *, final: bool = False) -> list[str]:
        self.waiting += self.decoder.decode(chunk, final)
        *whole, self.waiting = self.waiting.split("\n")
        if final and self.waiting:
            whole, self.waiting = [*whole, self.waiting], ""
        fresh = [line.rstrip("\r").rpartition("\r")[2] for line in whole]  # a progress line's last state
        self.lines += fresh
        return fresh


class VerbProcess(QObject):
    """One short backend verb (export, check): start it, hear its lines, learn how it ended.

    Signals:
        line(str) – a whole line was printed, on either stream.
        done(Outcome) – it ended; emitted once.
    """

    line = Signal(str)
    done = Signal(object)

    def __init__(self, command: list[str], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.command = command
        self.outcome: ProcessOutcome | None = None
        self._out, self._err = _Stream(), _Stream()
        self._printed: list[str] = []
        self._cancelled = False
        self._process = QProcess(self)
        self._process.setProgram(command[0])
        self._process.setArguments(command[1:])
        self._process.setProcessEnvironment(_environment())
        self._process.setStandardInputFile(QProcess.nullDevice())
        self._process.readyReadStandardOutput.connect(self._read_stdout)
        self._process.readyReadStandardError.connect(self._read_stderr)
        self._process.finished.connect(self._on_finished)
        self._process.errorOccurred.connect(self._on_error)

    def start(self) -> None:
        self._process.start()

    @property
    def is_running(self) -> bool:
        return self._process.state() != QProcess.ProcessState.NotRunning

    def cancel(self) -> None:
        """Ask it to end, and after a moment insist. `done` follows."""
        if self.is_running:
            self._cancelled = True
            self._process.terminate()
            QTimer.singleShot(GRACE_MS, self._process, self._process.kill)

    def _read_stdout(self) -> None:
        self._emit_lines(self._out.feed(bytes(self._process.readAllStandardOutput().data())))

    def _read_stderr(self) -> None:
        self._emit_lines(self._err.feed(bytes(self._process.readAllStandardError().data())))

    def _emit_lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._printed.append(line)
            self.line.emit(line)

    def _on_error(self, error: QProcess.ProcessError) -> None:
        if error == QProcess.ProcessError.FailedToStart:  # the others are followed by `finished`
            self._finish(False, -1, f"{self.command[0]} cannot be started: {self._process.errorString()}.")

    def _on_finished(self, code: int, status: QProcess.ExitStatus) -> None:
        for stream, rest in (
            (self._out, self._process.readAllStandardOutput()),
            (self._err, self._process.readAllStandardError()),
        ):
            self._emit_lines(stream.feed(bytes(rest.data()), final=True))
        crashed = status == QProcess.ExitStatus.CrashExit
        ok = code == 0 and not crashed
        self._finish(ok, -1 if crashed else code, self._sentence(ok, crashed))

    def _sentence(self, ok: bool, crashed: bool) -> str:
        if self._cancelled:
            return "Cancelled."
        if crashed:
            return "The process was killed before it was done."
        for stream in (self._out, self._err) if ok else (self._err, self._out):
            said = next((line.strip() for line in reversed(stream.lines) if line.strip()), "")
            if said:
                return said
        return "Done." if ok else "It ended without saying why."

    def _finish(self, ok: bool, code: int, sentence: str) -> None:
        if self.outcome is None:
            self.outcome = ProcessOutcome(ok and not self._cancelled, code, sentence, "\n".join(self._printed))
            self.done.emit(self.outcome)


def _environment() -> QProcessEnvironment:
    environment = QProcessEnvironment()
    for name, value in backend_environment().items():
        environment.insert(name, value)
    return environment
