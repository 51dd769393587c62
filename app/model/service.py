"""The window's desk: questions go to one warm backend process, and answers come back on the GUI thread.

Nothing here waits. The process starts with the first question, never with the window; it ends with the window.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from PySide6.QtCore import QCoreApplication, QObject, QProcess, QProcessEnvironment, QTimer

from backend.spec.command import backend_command, backend_environment
from backend.spec.faults import Fault

OnAnswer = Callable[[Any], None]
OnRefused = Callable[[list[Fault]], None]
OnProgress = Callable[[dict[str, Any]], None]

GRACE_MS = 1500
"""How long the process may take to end once nothing more is asked, before it is killed."""
PATIENCE = 2
"""How many processes in a row may die without having answered anything."""
TAIL = 2000
"""Characters of what the process printed that are kept, for when it dies."""


@dataclass(slots=True)
class _Question:
    on_answer: OnAnswer
    on_refused: OnRefused | None
    on_progress: OnProgress | None
    owner: int | None
    """Its key among the owners."""


class Service(QObject):
    """Asks `python -m backend serve`; what may be asked stands in `backend.serve.questions`."""

    def __init__(self, parent: QObject | None = None, command: list[str] | None = None) -> None:
        super().__init__(parent)
        self._command = command or backend_command("serve")
        self._process: QProcess | None = None
        self._questions: dict[int, _Question] = {}
        self._by_owner: dict[int, set[int]] = {}
        self._last, self._deaths, self._closed = 0, 0, False
        self._waiting, self.last_words = b"", ""
        if (app := QCoreApplication.instance()) is not None:
            app.aboutToQuit.connect(self.close)

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
        """Ask; one of `on_answer(what was answered)` and `on_refused(faults)` is called later, `on_progress(progress)` before it any
        number of times. A question is dropped when its `owner` is destroyed. Returns the number that `cancel` takes.
        """
        self._last = number = self._last + 1
        self._questions[number] = _Question(
            on_answer, on_refused, on_progress, None if owner is None else self._own(number, owner)
        )
        if self._closed or not self._start():
            QTimer.singleShot(0, self, lambda: self._refuse([number], self._failure_sentence()))
        else:
            self._send({"id": number, "ask": question, "with": arguments})
        return number

    def cancel(self, number: int) -> None:
        """Take a question back: nothing is called for it any more. Nothing happens where it is answered already."""
        if self._take(number) is not None:
            self._send({"cancel": number})

    def close(self) -> None:
        """Take every question back and let the process end. Later questions are refused."""
        self._closed = True
        for number in list(self._questions):
            self.cancel(number)
        process, self._process = self._process, None
        if process is None:
            return
        process.closeWriteChannel()
        if not process.waitForFinished(GRACE_MS):
            process.kill()
            process.waitForFinished(GRACE_MS)

    # Owners

    def _own(self, number: int, owner: QObject) -> int:
        key = id(owner)
        if key not in self._by_owner:
            self._by_owner[key] = set()
            owner.destroyed.connect(lambda: self._disown(key))
        self._by_owner[key].add(number)
        return key

    def _take(self, number: int) -> _Question | None:
        """The question, which is open no longer; None where it was not."""
        question = self._questions.pop(number, None)
        if question is not None and question.owner in self._by_owner:
            self._by_owner[question.owner].discard(number)
        return question

    def _disown(self, key: int) -> None:
        for number in self._by_owner.pop(key):
            self.cancel(number)

    # The process

    def _start(self) -> bool:
        """Have a process to ask; False where it died too often."""
        if self._process is None and self._deaths < PATIENCE:
            self._waiting = b""
            self._process = self._make_process()
            self._process.start()  # may end at once where nothing can be started
        return self._process is not None

    def _make_process(self) -> QProcess:
        process = QProcess(self)
        process.setProgram(self._command[0])
        process.setArguments(self._command[1:])
        environment = QProcessEnvironment()
        for name, value in backend_environment().items():
            environment.insert(name, value)
        process.setProcessEnvironment(environment)
        # To methods of ours: a lambda that held the process would be let go in the middle of the process's own end.
        process.readyReadStandardOutput.connect(self._read)
        process.readyReadStandardError.connect(self._read_stderr)
        process.finished.connect(self._on_finished)
        process.errorOccurred.connect(self._on_error)
        return process

    def _send(self, message: dict[str, Any]) -> None:
        if self._process is not None:  # what is written before it has started waits in Qt's buffer
            self._process.write(json.dumps(message, default=str).encode() + b"\n")

    def _read(self) -> None:
        if self._process is None:
            return
        # Cut at the last newline before decoding: a chunk may end in the middle of a character.
        read = bytes(self._process.readAllStandardOutput().data())
        whole, newline, self._waiting = (self._waiting + read).rpartition(b"\n")
        for line in whole.split(b"\n") if newline else ():
            self._dispatch(json.loads(line))

    def _read_stderr(self) -> None:
        if self._process is not None:
            heard = bytes(self._process.readAllStandardError().data()).decode(errors="replace")
            self.last_words = (self.last_words + heard)[-TAIL:]

    def _dispatch(self, message: dict[str, Any]) -> None:
        if "progress" in message:
            question = self._questions.get(message["id"])
            if question is not None and question.on_progress is not None:
                question.on_progress(message["progress"])
            return
        self._deaths = 0
        self.last_words = message.get("traceback", "")
        question = self._take(message["id"])
        if question is None:
            return
        if "answer" in message:
            question.on_answer(message["answer"])
        elif "faults" in message and question.on_refused is not None:
            question.on_refused([Fault(**fault) for fault in message["faults"]])

    def _on_error(self, error: QProcess.ProcessError) -> None:
        if error == QProcess.ProcessError.FailedToStart and self._process is not None:  # others: `finished` follows
            self.last_words = self._process.errorString()
            self._on_finished()

    def _on_finished(self) -> None:
        self._read()
        self._read_stderr()
        if self._process is None:  # closed by ourselves
            return
        self._process.deleteLater()
        self._process = None
        self._deaths += 1
        self._refuse(list(self._questions), self._failure_sentence())

    def _refuse(self, numbers: list[int], sentence: str) -> None:
        for number in numbers:
            question = self._take(number)
            if question is not None and question.on_refused is not None:
                question.on_refused([Fault("", sentence)])

    def _failure_sentence(self) -> str:
        if self._closed:
            return "The window is closing."
        lines = [line.strip() for line in self.last_words.splitlines() if line.strip()]
        message = f": {lines[-1].rstrip('.')}" if lines else ""
        again = "Ask again" if self._deaths < PATIENCE else "Open GRPO Studio again"
        return f"The helper process ended before it answered{message}. {again}."
