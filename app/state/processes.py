"""Backend processes: trainings, which outlive the window, and short verbs, whose output the window reads.

A training is detached: it has its own session (setsid), writes into its run's log.txt, and is followed through the run folder only
(`app.state.runs.run`), never through a pipe or a pid. A `VerbProcess` is a child of the window and ends with it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from PySide6.QtCore import QObject, QProcess, QProcessEnvironment, QTimer, Signal

from backend.runs.queue import QueueFile
from backend.runs.run_folder import RunFolder
from backend.utils.command import backend_command, backend_environment
from backend.utils.errors import UserError
from backend.utils.text import as_in_a_terminal
from backend.utils.whole_file import replace_file

GRACE_MS = 3000
"""How long a cancelled verb may take to end before it is killed."""


def start_training(config_text: str, run: RunFolder) -> None:
    """Write the run's config.yaml and start `train --run` on it, detached. Raises UserError when either cannot be done."""
    replace_file(run.config, config_text)
    start_detached(backend_command("train", "--run", str(run.path)), run)


def resume_training(run: RunFolder, *options: str) -> None:
    """Resume a run from its newest checkpoint, detached. `options`: of the verb. Raises UserError when the process cannot be started."""
    start_detached(backend_command("resume", str(run.path), *options), run)


def start_queue_runner(queue: QueueFile) -> None:
    """Start the process that trains what waits, detached. Raises UserError when it cannot be started."""
    start_detached_in(backend_command("queue", "run", "--runs-dir", str(queue.folder)), queue.folder, queue.log)


def start_detached(command: list[str], run: RunFolder) -> None:
    """Start a process of a run: `start_detached_in` its folder, with its log.txt. Raises UserError."""
    start_detached_in(command, run.path, run.log)


def start_detached_in(command: list[str], folder: Path, log: Path) -> None:
    """Start a process that survives this one; its stdout and stderr are appended to `log`.

    Qt calls setsid for a detached child, so it has a process group of its own: neither closing the window nor Ctrl-C in
    the terminal that opened it reaches the training. Raises UserError when the process cannot be started.
    """
    process = QProcess()
    process.setProgram(command[0])
    process.setArguments(command[1:])
    process.setProcessEnvironment(process_environment())
    process.setWorkingDirectory(str(folder))
    # Files and no pipes: the far end of a pipe would close with the window, and the training's next line would end it.
    process.setStandardInputFile(QProcess.nullDevice())
    process.setStandardOutputFile(str(log), QProcess.OpenModeFlag.Append)
    process.setStandardErrorFile(str(log), QProcess.OpenModeFlag.Append)
    started = process.startDetached()  # PySide returns (ok, pid); the pid is not used
    if not (started[0] if isinstance(started, tuple) else started):
        raise UserError("run", f"{command[0]} cannot be started: {process.errorString()}.")


@dataclass(frozen=True, slots=True)
class ProcessOutcome:
    """How a verb ended. `sentence` is for the user: the last line that it printed, or why there is none."""

    ok: bool
    exit_code: int
    """The process's exit status; −1 when it never started or was killed."""
    sentence: str
    output: str
    """Every line printed, in the order read; the order between the two streams is not certain."""


@dataclass
class _Stream:
    """Decodes bytes into lines; an incomplete character or line is kept for the next read."""

    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )
    partial_line: str = ""
    lines: list[str] = field(default_factory=list)

    def feed(self, chunk: bytes, *, final: bool = False) -> list[str]:
        """The lines that this chunk completes; with `final`, also a last line without a line break."""
        self.partial_line += self.decoder.decode(chunk, final)
        *complete, self.partial_line = self.partial_line.split("\n")
        if final and self.partial_line:
            complete, self.partial_line = [*complete, self.partial_line], ""
        # A progress bar rewrites its line after a carriage return: only its last state counts.
        new_lines = [as_in_a_terminal(line) for line in complete]
        self.lines += new_lines
        return new_lines


class VerbProcess(QObject):
    """One short backend verb (export, check) as a child process.

    Attributes:
        command – the command line.
        outcome – how it ended, a ProcessOutcome; None until then.

    Signals:
        line(str) – a line was printed, on either stream.
        done(ProcessOutcome) – it ended; emitted once.
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
        self._process = QProcess(self)  # a child object: deleting this one kills a process that still runs
        self._process.setProgram(command[0])
        self._process.setArguments(command[1:])
        self._process.setProcessEnvironment(process_environment())
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
        """Terminate it, and kill it after GRACE_MS. `done` follows."""
        if self.is_running:
            self._cancelled = True
            self._process.terminate()
            # Harmless if it has ended by then; and dropped with the process object if that is deleted first.
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
        for stream, rest in (  # the last bytes may have come without a readyRead signal
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
            last_line = next((line.strip() for line in reversed(stream.lines) if line.strip()), "")
            if last_line:
                return last_line
        return "Done." if ok else "It ended without saying why."

    def _finish(self, ok: bool, code: int, sentence: str) -> None:
        if self.outcome is None:  # an error and `finished` may both lead here
            self.outcome = ProcessOutcome(ok and not self._cancelled, code, sentence, "\n".join(self._printed))
            self.done.emit(self.outcome)


def process_environment() -> QProcessEnvironment:
    """The environment of every backend process."""
    environment = QProcessEnvironment()
    for name, value in backend_environment().items():
        environment.insert(name, value)
    return environment
