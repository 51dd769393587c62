"""The OpenAI-compatible server of a run or model: a child process that ends with the window."""

from __future__ import annotations

import os
from typing import Literal

from PySide6.QtCore import QCoreApplication, QObject, Signal

from app.state.chat import ChatChoice
from app.state.processes import ProcessOutcome, VerbProcess, json_object
from backend.utils.command import backend_command


class Endpoint(QObject):
    """One server at a time.

    Attributes:
        state – off, starting, serving, or stopping.
        title – the run or model and its checkpoint, as the page names them.
        url, models, needs_key – what the server prints once it listens.
        problem – why the last one has ended by itself, or "".
    """

    changed = Signal()

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.state: Literal["off", "starting", "serving", "stopping"] = "off"
        self.title, self.url, self.problem = "", "", ""
        self.models: list[str] = []
        self.needs_key = False
        self._task: VerbProcess | None = None
        if (app := QCoreApplication.instance()) is not None:
            app.aboutToQuit.connect(self.close)

    def start(self, choice: ChatChoice, checkpoint: str, port: int) -> None:
        weights = next((weights.label for weights in choice.checkpoints if weights.key == checkpoint), "")
        self.title, self.problem = f"{choice.label}, {weights}" if weights else choice.label, ""
        of_run = ["--checkpoint", checkpoint] if checkpoint else []
        command = backend_command(
            "endpoint", choice.name, *of_run, "--port", str(port), "--parent", str(os.getpid()), "--json"
        )
        self._task = task = VerbProcess(command, self)
        task.printed.connect(self._read)
        task.done.connect(self._on_end)
        self._show("starting")
        task.start()

    def stop(self) -> None:
        if self._task is not None:
            self._show("stopping")
            self._task.cancel()

    def close(self) -> None:
        """End the process, and return once it has ended."""
        if self._task is not None:
            self._task.cancel(wait=True)

    def _read(self, line: str) -> None:
        if (told := json_object(line)) and self.state == "starting":
            self.url, self.models, self.needs_key = told["url"], told["models"], told["needs_key"]
            self._show("serving")

    def _on_end(self, outcome: ProcessOutcome) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.deleteLater()
        if self.state != "stopping":
            self.problem = "The server was ended by another program." if outcome.ok else outcome.problem
        self._show("off")

    def _show(self, state: Literal["off", "starting", "serving", "stopping"]) -> None:
        self.state = state
        self.changed.emit()
