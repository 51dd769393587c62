"""Backend processes: trainings, which outlive the window, and short verbs, whose output the window reads.

A training is detached: it has its own session (setsid), writes into its run's log.txt, and is followed through the run folder only
(`app.state.run`), never through a pipe or a pid. A `VerbProcess` is a child of the window and ends with it.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PySide6.QtCore import QCoreApplication, QObject, QProcess, QProcessEnvironment, QTimer, Signal

from backend.runs.queue import QueueFile
from backend.runs.run_folder import RunFolder
from backend.utils.command import backend_command, backend_environment
from backend.utils.errors import ConfigProblem, UserError
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


OnAnswer = Callable[[Any], None]
OnRefused = Callable[[list[ConfigProblem]], None]
OnProgress = Callable[[dict[str, Any]], None]

SERVICE_GRACE_MS = 1500
"""How long the process may take to end after its stdin was closed, before it is killed."""
PATIENCE = 2
"""How many processes in a row may die without an answer before no more are started."""
STDERR_TAIL = 2000
"""Last characters of stderr that are kept, for the sentence about a process that died."""


@dataclass(slots=True)
class _Question:
    on_answer: OnAnswer
    on_refused: OnRefused | None
    on_progress: OnProgress | None
    owner: int | None
    """The owner's key in `_by_owner`."""


class Service(QObject):
    """Sends questions to one `serve` process; `backend.serve.questions` lists them.

    Attributes:
        last_words – the end of the process's stderr, or the traceback of its last answer.

    Signals:
        failed(str, str) – a fault of the program: a sentence, and the traceback of a question or the last words of a process that died.
    """

    failed = Signal(str, str)

    def __init__(self, parent: QObject | None = None, command: list[str] | None = None) -> None:
        super().__init__(parent)
        self._command = command or backend_command("serve")
        self._process: QProcess | None = None
        self._questions: dict[int, _Question] = {}
        self._by_owner: dict[int, set[int]] = {}
        self._last_number, self._deaths, self._closed = 0, 0, False
        self._partial_line, self.last_words = b"", ""
        if (app := QCoreApplication.instance()) is not None:
            app.aboutToQuit.connect(self.close)

    @property
    def is_running(self) -> bool:
        """Whether the process has been started and has not ended."""
        return self._process is not None

    def ask(
        self,
        question: str,
        on_answer: OnAnswer,
        *,
        on_refused: OnRefused | None = None,
        on_progress: OnProgress | None = None,
        owner: QObject | None = None,
        **arguments: Any,
    ) -> int:
        """Send a question; `arguments` go with it as JSON. Returns the number that `cancel` takes.

        Later it calls either `on_answer(answer)` or `on_refused(faults)`, and before that `on_progress(…)` any number of
        times; never before this method has returned. The question is cancelled when its `owner` is destroyed.
        """
        self._last_number = number = self._last_number + 1
        self._questions[number] = _Question(
            on_answer, on_refused, on_progress, None if owner is None else self._own(number, owner)
        )
        if self._closed or not self._start():
            # In the next turn of the event loop: the caller does not have the number yet, by which it knows its question.
            QTimer.singleShot(0, self, lambda: self._refuse([number], self._failure_sentence()))
        else:
            self._send({"id": number, "ask": question, "with": arguments})
        return number

    def cancel(self, number: int) -> None:
        """Cancel a question: none of its callbacks is called any more. Does nothing if it was answered already."""
        if self._pop(number) is not None:
            self._send({"cancel": number})

    def close(self) -> None:
        """Cancel every question and end the process. Later questions are refused."""
        self._closed = True
        for number in list(self._questions):
            self.cancel(number)
        process, self._process = self._process, None  # None first: the handler of `finished` then does nothing
        if process is None:
            return
        process.closeWriteChannel()  # `serve` ends at the end of its stdin
        if not process.waitForFinished(SERVICE_GRACE_MS):
            process.kill()
            process.waitForFinished(SERVICE_GRACE_MS)

    def retire(self) -> None:
        """As `close`, without waiting: the process is killed after its grace, and this object deletes itself. For a process that
        holds a model, whose memory is free once it has ended."""
        self._closed = True
        for number in list(self._questions):
            self.cancel(number)
        process, self._process = self._process, None
        if process is None:
            self.deleteLater()
            return
        process.finished.connect(self.deleteLater)
        process.closeWriteChannel()
        QTimer.singleShot(SERVICE_GRACE_MS, process, process.kill)

    # Owners

    def _own(self, number: int, owner: QObject) -> int:
        key = id(owner)  # not the object itself: when `destroyed` is emitted, its Python wrapper can no longer be used
        if key not in self._by_owner:
            self._by_owner[key] = set()
            owner.destroyed.connect(lambda: self._disown(key))
        self._by_owner[key].add(number)
        return key

    def _pop(self, number: int) -> _Question | None:
        """Remove and return a pending question; None if it is not pending."""
        question = self._questions.pop(number, None)
        if question is not None and question.owner in self._by_owner:
            self._by_owner[question.owner].discard(number)
        return question

    def _disown(self, key: int) -> None:
        for number in self._by_owner.pop(key):
            self.cancel(number)

    # The process

    def _start(self) -> bool:
        """Start the process unless it runs; False if it has died too often."""
        if self._process is None and self._deaths < PATIENCE:
            self._partial_line = b""
            self._process = self._make_process()
            self._process.start()  # clears self._process again where it cannot be started
        return self._process is not None

    def _make_process(self) -> QProcess:
        process = QProcess(self)
        process.setProgram(self._command[0])
        process.setArguments(self._command[1:])
        process.setProcessEnvironment(process_environment())
        # Bound methods: a lambda that held the process would be destroyed while the process emits `finished`.
        process.readyReadStandardOutput.connect(self._read)
        process.readyReadStandardError.connect(self._read_stderr)
        process.finished.connect(self._on_finished)
        process.errorOccurred.connect(self._on_error)
        return process

    def _send(self, message: dict[str, Any]) -> None:
        if self._process is not None:  # Qt buffers what is written before it has started
            self._process.write(json.dumps(message, default=str).encode() + b"\n")

    def _read(self) -> None:
        if self._process is None:
            return
        # Cut at the last newline before decoding: a chunk may end in the middle of a character.
        read = bytes(self._process.readAllStandardOutput().data())
        lines, newline, self._partial_line = (self._partial_line + read).rpartition(b"\n")
        for line in lines.split(b"\n") if newline else ():
            self._dispatch(json.loads(line))

    def _read_stderr(self) -> None:
        if self._process is not None:
            text = bytes(self._process.readAllStandardError().data()).decode(errors="replace")
            self.last_words = (self.last_words + text)[-STDERR_TAIL:]

    def _dispatch(self, message: dict[str, Any]) -> None:
        if "progress" in message:
            question = self._questions.get(message["id"])
            if question is not None and question.on_progress is not None:
                question.on_progress(message["progress"])
            return
        self._deaths = 0
        self.last_words = message.get("traceback", "")
        if self.last_words:
            self.failed.emit(message["faults"][0]["sentence"], self.last_words)
        question = self._pop(message["id"])
        if question is None:  # cancelled after the process had sent its answer
            return
        if "answer" in message:
            question.on_answer(message["answer"])
        elif "faults" in message and question.on_refused is not None:
            question.on_refused([ConfigProblem(**fault) for fault in message["faults"]])

    def _on_error(self, error: QProcess.ProcessError) -> None:
        if error == QProcess.ProcessError.FailedToStart and self._process is not None:  # others: `finished` follows
            self.last_words = self._process.errorString()
            self._on_finished()

    def _on_finished(self) -> None:
        self._read()
        self._read_stderr()
        if self._process is None:  # closed by `close`
            return
        self._process.deleteLater()
        self._process = None
        self._deaths += 1
        self.failed.emit(self._failure_sentence(), self.last_words)
        self._refuse(list(self._questions), self._failure_sentence())

    def _refuse(self, numbers: list[int], sentence: str) -> None:
        for number in numbers:
            question = self._pop(number)
            if question is not None and question.on_refused is not None:
                question.on_refused([ConfigProblem("", sentence)])

    def _failure_sentence(self) -> str:
        if self._closed:
            return "The window is closing."
        lines = [line.strip() for line in self.last_words.splitlines() if line.strip()]
        message = f": {lines[-1].rstrip('.')}" if lines else ""
        again = "Ask again" if self._deaths < PATIENCE else "Open GRPO Studio again"
        return f"The helper process ended before it answered{message}. {again}."
