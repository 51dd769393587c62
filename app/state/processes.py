"""Backend processes: trainings, which outlive the window, and children, whose output it reads."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PySide6.QtCore import QCoreApplication, QObject, QProcess, QProcessEnvironment, QTimer, Signal

from backend.runs.run_folder import RunFolder
from backend.utils.command import backend_command, backend_environment
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.text import as_in_a_terminal

OnAnswer = Callable[[Any], None]
OnRefused = Callable[[list[ConfigProblem]], None]
OnProgress = Callable[[dict[str, Any]], None]

CANCEL_MS, CLOSE_MS = 3000, 1500  # grace of a cancelled verb and of a closed service before they are killed
MAX_DEATHS = 2  # in a row, after which a service starts no more processes
STDERR_TAIL = 2000  # characters of stderr for the error message


def start_detached(command: list[str], run: RunFolder, log: Path | None = None) -> None:
    """Start a process in a run's folder that survives this one, with output to `log` or log.txt. Raises UserError."""
    process = _process(command)
    process.setWorkingDirectory(str(run.path))
    # Files and no pipes: the far end of a pipe would close with the window, and the training's next line would end it.
    for redirect in (process.setStandardOutputFile, process.setStandardErrorFile):
        redirect(str(log or run.log), QProcess.OpenModeFlag.Append)
    process.setStandardInputFile(QProcess.nullDevice())
    started = process.startDetached()  # PySide returns (ok, pid)
    if not (started[0] if isinstance(started, tuple) else started):
        raise UserError("run", f"{command[0]} cannot be started: {process.errorString()}.")


def _process(command: list[str], parent: QObject | None = None) -> QProcess:
    process = QProcess(parent)
    process.setProgram(command[0])
    process.setArguments(command[1:])
    environment = QProcessEnvironment()
    for name, value in backend_environment().items():
        environment.insert(name, value)
    process.setProcessEnvironment(environment)
    return process


def json_object(line: str) -> dict[str, Any]:
    """What a verb has printed as JSON; {} for any other line."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class ChildProcess(QObject):
    """A backend process that ends with the window, read line by line."""

    printed = Signal(str)  # on stdout
    warned = Signal(str)  # on stderr
    ended = Signal(int)  # exit status; −1 if it was killed, or could not start, as `start_error` then says

    def __init__(self, command: list[str], parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.command = command
        self.start_error = ""
        self._partial = {QProcess.ProcessChannel.StandardOutput: b"", QProcess.ProcessChannel.StandardError: b""}
        self._process = _process(command, self)  # deleting this object kills a process that still runs
        # Bound methods: a lambda holding the process would be destroyed while the process emits `finished`.
        self._process.readyReadStandardOutput.connect(self._read)
        self._process.readyReadStandardError.connect(self._read)
        self._process.finished.connect(self._on_finished)
        self._process.errorOccurred.connect(self._on_error)

    def start(self) -> None:
        self._process.start()

    def write(self, line: bytes) -> None:
        self._process.write(line + b"\n")

    @property
    def is_running(self) -> bool:
        return self._process.state() != QProcess.ProcessState.NotRunning

    def end(self, grace_ms: int, *, wait: bool = False) -> None:
        """Close its stdin, and kill it after the grace; with `wait`, return once it has ended."""
        self._process.closeWriteChannel()
        if wait:
            if not self._process.waitForFinished(grace_ms):
                self._process.kill()
                self._process.waitForFinished(grace_ms)
        else:  # dropped with the process if that is deleted first
            QTimer.singleShot(grace_ms, self._process, self._process.kill)

    def _read(self, *, is_final: bool = False) -> None:
        for channel, signal in zip(self._partial, (self.printed, self.warned), strict=True):
            self._process.setReadChannel(channel)
            # Cut at newlines before decoding: a chunk may end in the middle of a character.
            *lines, rest = (self._partial[channel] + bytes(self._process.readAll().data())).split(b"\n")
            self._partial[channel] = b"" if is_final else rest
            for line in [*lines, rest] if is_final and rest else lines:
                signal.emit(line.decode(errors="replace"))

    def _on_error(self, error: QProcess.ProcessError) -> None:
        if error == QProcess.ProcessError.FailedToStart:  # `finished` follows the others
            self.start_error = self._process.errorString()
            self.ended.emit(-1)

    def _on_finished(self, code: int, status: QProcess.ExitStatus) -> None:
        self._read(is_final=True)
        self.ended.emit(-1 if status == QProcess.ExitStatus.CrashExit else code)


@dataclass(frozen=True, slots=True)
class ProcessOutcome:
    ok: bool
    sentence: str  # its last line, or why there is none
    output: str

    @property
    def problem(self) -> str:
        """The sentence without the name of its setting, which is for programs."""
        return re.sub(r"^[a-z_]+: ", "", self.sentence)


class VerbProcess(ChildProcess):
    """A short backend verb. `done`: its outcome, once."""

    line = Signal(str)
    done = Signal(object)

    def __init__(self, command: list[str], parent: QObject | None = None) -> None:
        super().__init__(command, parent)
        self._lines: list[str] = []
        self._last = {"out": "", "error": ""}
        self._is_cancelled = False
        self._process.setStandardInputFile(QProcess.nullDevice())
        self.printed.connect(lambda line: self._take("out", line))
        self.warned.connect(lambda line: self._take("error", line))
        self.ended.connect(self._finish)

    def cancel(self, *, wait: bool = False) -> None:
        """Terminate it; `done` follows, with `wait` before this returns."""
        if self.is_running:
            self._is_cancelled = True
            self._process.terminate()
            self.end(CANCEL_MS, wait=wait)

    def _take(self, stream: str, raw: str) -> None:
        line = as_in_a_terminal(raw)  # of a progress bar, which rewrites its line, the last state
        self._last[stream] = line.strip() or self._last[stream]
        self._lines.append(line)
        self.line.emit(line)

    def _finish(self, code: int) -> None:
        if self.start_error:
            sentence = f"{self.command[0]} cannot be started: {self.start_error}."
        elif self._is_cancelled:
            sentence = "Cancelled."
        elif code == -1:
            sentence = "The process was killed before it was done."
        elif code == 0:
            sentence = self._last["out"] or self._last["error"] or "Done."
        else:
            sentence = self._last["error"] or self._last["out"] or "It ended without saying why."
        is_done = code == 0 and not self._is_cancelled
        self.done.emit(ProcessOutcome(is_done, sentence, "\n".join(self._lines)))


@dataclass(slots=True)
class _Question:
    on_answer: OnAnswer
    on_refused: OnRefused | None
    on_progress: OnProgress | None
    owner: int | None  # id(): when `destroyed` is emitted, the Python wrapper is gone


class Service(QObject):
    """Sends questions to one warm `serve` process; `backend.serve.questions` lists them."""

    failed = Signal(str, str)  # sentence and traceback: the program failed or died

    def __init__(self, parent: QObject | None = None, command: list[str] | None = None) -> None:
        super().__init__(parent)
        self._command = command or backend_command("serve")
        self._process: ChildProcess | None = None
        self._questions: dict[int, _Question] = {}
        self._owners: set[int] = set()
        self._last_number, self._deaths, self._is_closed = 0, 0, False
        self._last_words = ""
        if (app := QCoreApplication.instance()) is not None:
            app.aboutToQuit.connect(self.close)

    @property
    def is_running(self) -> bool:
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
        """Send a question with JSON arguments. Returns the number that `cancel` takes."""
        self._last_number = number = self._last_number + 1
        key = None if owner is None else id(owner)
        if owner is not None and key is not None and key not in self._owners:
            self._owners.add(key)
            owner.destroyed.connect(lambda: self._cancel_of(key))
        self._questions[number] = _Question(on_answer, on_refused, on_progress, key)
        if self._process is None and not self._is_closed and self._deaths < MAX_DEATHS:
            self._start()
        if self._process is None:  # in the next turn: the caller does not have the number yet
            QTimer.singleShot(0, self, lambda: self._refuse([number]))
        else:
            self._send({"id": number, "ask": question, "with": arguments})
        return number

    def cancel(self, number: int | None) -> None:
        """None of the question's callbacks is called any more; None where there is no question."""
        if number is not None and self._questions.pop(number, None) is not None:
            self._send({"cancel": number})

    def close(self, *, wait: bool = True) -> None:
        """Without `wait`, this object is deleted once the process has ended."""
        self._is_closed = True
        for number in list(self._questions):
            self.cancel(number)
        process, self._process = self._process, None  # the handler of `ended` then does nothing
        if process is not None:
            if not wait:
                process.ended.connect(self.deleteLater)
            process.end(CLOSE_MS, wait=wait)
        elif not wait:
            self.deleteLater()

    def _cancel_of(self, owner: int) -> None:
        self._owners.discard(owner)
        for number in [number for number, question in self._questions.items() if question.owner == owner]:
            self.cancel(number)

    def _start(self) -> None:
        self._process = process = ChildProcess(self._command, self)
        process.printed.connect(self._on_line)
        process.warned.connect(self._on_warning)
        process.ended.connect(self._on_ended)
        process.start()  # clears self._process again where it cannot be started

    def _send(self, message: dict[str, Any]) -> None:
        if self._process is not None:
            self._process.write(json.dumps(message, default=str).encode())

    def _on_warning(self, line: str) -> None:
        self._last_words = f"{self._last_words}{line}\n"[-STDERR_TAIL:]

    def _on_line(self, line: str) -> None:
        message = json.loads(line)
        if "progress" in message:
            question = self._questions.get(message["id"])
            if question is not None and question.on_progress is not None:
                question.on_progress(message["progress"])
            return
        self._deaths = 0
        self._last_words = message.get("traceback", "")
        if self._last_words:
            self.failed.emit(message["faults"][0]["sentence"], self._last_words)
        question = self._questions.pop(message["id"], None)
        if question is None:  # cancelled after the process had sent its answer
            return
        if "answer" in message:
            question.on_answer(message["answer"])
        elif "faults" in message and question.on_refused is not None:
            question.on_refused([ConfigProblem(**fault) for fault in message["faults"]])

    def _on_ended(self, _code: int) -> None:
        process, self._process = self._process, None
        if process is None:  # closed
            return
        self._last_words = process.start_error or self._last_words
        process.deleteLater()
        self._deaths += 1
        self.failed.emit(self._failure(), self._last_words)
        self._refuse(list(self._questions))

    def _refuse(self, numbers: list[int]) -> None:
        for number in numbers:
            question = self._questions.pop(number, None)
            if question is not None and question.on_refused is not None:
                question.on_refused([ConfigProblem("", self._failure())])

    def _failure(self) -> str:
        if self._is_closed:
            return "The window is closing."
        lines = [line.strip() for line in self._last_words.splitlines() if line.strip()]
        last = f": {lines[-1].rstrip('.')}" if lines else ""
        again = "Ask again" if self._deaths < MAX_DEATHS else "Open GRPO Studio again"
        return f"The helper process ended before it answered{last}. {again}."
