"""Client of `python -m backend serve`: questions go to one warm process, answers come back as callbacks on the GUI thread.

No call blocks but `close`. The process starts with the first question, not with the window, and ends with the window.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from PySide6.QtCore import QCoreApplication, QObject, QProcess, QTimer, Signal

from app.state.processes import process_environment
from backend.utils.command import backend_command
from backend.utils.errors import ConfigProblem

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
