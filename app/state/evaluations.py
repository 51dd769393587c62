"""The evaluations of a run: those in its folder, and the process that makes a new one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from PySide6.QtCore import QObject, QTimer, Signal

from app.state.consent import Consent
from app.state.processes import ProcessOutcome, VerbProcess
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import saved_weights
from backend.trainer.evaluation.evaluation_rows import (
    DecodingName,
    EvaluatedRow,
    Evaluation,
    evaluations_of,
    mean_reward,
    parse_row,
    read_evaluation,
    rows_file,
)
from backend.utils.command import backend_command
from backend.utils.errors import UserError
from backend.utils.files import open_regular

SLICE_S = 0.008
"""How long the rows' file is read in one turn of the event loop."""
DECODINGS: tuple[DecodingName, ...] = ("greedy", "sampled")


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """What the page asks for. None leaves the choice to the verb."""

    split: str = "test"
    checkpoint: str = "end"
    completions: int | None = None
    limit: int | None = None

    def arguments(self) -> list[str]:
        numbers = {"--n": self.completions, "--limit": self.limit}
        given = [part for flag, number in numbers.items() if number is not None for part in (flag, str(number))]
        return ["--split", self.split, "--checkpoint", self.checkpoint, *given]


@dataclass(frozen=True, slots=True)
class RowSummary:
    """A row. `means`: decoding → mean reward (before, after) training, or (None, mean) of one side."""

    offset: int
    index: int
    prompt: str
    answer: str
    means: dict[DecodingName, tuple[float | None, float | None]]


@dataclass(frozen=True, slots=True)
class Listed:
    """An evaluation in the run's folder."""

    path: Path
    evaluation: Evaluation


@dataclass(slots=True)
class RunningEvaluation:
    """An evaluation that is being made. `left_s` None: not known yet."""

    run: RunFolder
    phase: str = "Starting"
    done: float | None = None
    left_s: float | None = None
    began: float = field(default_factory=time.monotonic)


class Evaluations(QObject):
    """Signals:
    listed_changed – there are other evaluations now, or another run's.
    rows_changed – rows were read, or forgotten.
    running_changed – an evaluation has begun, has got on, or has ended.

    Attributes:
        listed – the run's evaluations, newest first.
        shown – the one that is shown, or None.
        rows – what has been read so far of its rows.
        running – the evaluation that is being made, or None.
        problem – why the last one gave no result, in a sentence; "" where it did.
    """

    listed_changed = Signal()
    rows_changed = Signal()
    running_changed = Signal()

    def __init__(
        self,
        consent: Consent,
        parent: QObject | None = None,
        make_process: Callable[[list[str], QObject], Any] = VerbProcess,
    ) -> None:
        super().__init__(parent)
        self._consent, self._make_process = consent, make_process
        self._run: RunFolder | None = None
        self.listed: list[Listed] = []
        self.shown: Listed | None = None
        self.rows: list[RowSummary] = []
        self.running: RunningEvaluation | None = None
        self.problem = ""
        self._process: Any = None
        self._file: BinaryIO | None = None
        self._reading = QTimer(self, interval=0)
        self._reading.timeout.connect(self._read_slice)

    def set_run(self, run: RunFolder | None) -> None:
        """List this run's evaluations, and show the newest."""
        if run != self._run:
            self._run, self.problem = run, ""
            self.shown = None
        self.refresh()

    def refresh(self, show: Path | None = None) -> None:
        """List the folder again; show the evaluation at `show`, else the one that was shown, else the newest."""
        self.listed = []
        for path in evaluations_of(self._run) if self._run is not None else ():
            with suppress(UserError):  # no evaluation
                self.listed.append(Listed(path, read_evaluation(path)))
        wanted = show or (self.shown.path if self.shown is not None else None)
        chosen = next((entry for entry in self.listed if entry.path == wanted), next(iter(self.listed), None))
        changed = chosen != self.shown
        self.shown = chosen
        self.listed_changed.emit()
        if changed:
            self._read_rows()

    def show(self, path: Path) -> None:
        self.refresh(path)

    def row(self, summary: RowSummary) -> EvaluatedRow | None:
        """A row with its completions; None where the file is gone."""
        if self.shown is None:
            return None
        try:
            with open_regular(rows_file(self.shown.path)) as file:
                file.seek(summary.offset)
                return parse_row(file.readline())
        except OSError:
            return None

    def _read_rows(self) -> None:
        self._stop_reading()
        self.rows = []
        self.rows_changed.emit()
        if self.shown is not None:
            try:
                self._file = open_regular(rows_file(self.shown.path))
            except OSError:
                return  # the figures are shown without their rows
            self._reading.start()

    def _read_slice(self) -> None:
        until = time.monotonic() + SLICE_S
        while self._file is not None:
            offset = self._file.tell()
            line = self._file.readline()
            if not line:
                self._stop_reading()
            elif (row := parse_row(line)) is not None:
                self.rows.append(_summary(offset, row))
            if time.monotonic() > until:
                break
        if self._file is None:  # all at once: a table that grows while it is read loses its selection
            self.rows_changed.emit()

    def _stop_reading(self) -> None:
        self._reading.stop()
        if self._file is not None:
            self._file.close()
            self._file = None

    def start(self, request: EvaluationRequest) -> None:
        """Evaluate the run in a process, unless one is running; `problem` says why it cannot be."""
        if self.running is not None or self._run is None:
            return
        try:
            if not self._consent.obtain_for_run(self._run):
                self._fail("The reward file was not allowed to run, so nothing was evaluated.")
                return
        except UserError as mistake:
            self._fail(mistake.faults[0].sentence)
            return
        command = backend_command("evaluate", str(self._run.path), "--stream", *request.arguments())
        self.problem, self.running = "", RunningEvaluation(self._run)
        self._process = self._make_process(command, self)
        self._process.line.connect(self._on_line)
        self._process.done.connect(self._on_done)
        self._process.start()
        self.running_changed.emit()

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.cancel()

    def _fail(self, sentence: str) -> None:
        self.problem = sentence
        self.running_changed.emit()

    def _on_line(self, line: str) -> None:
        message = _json_object(line)
        if self.running is not None and "phase" in message:
            self.running.phase = str(message["phase"])
            self.running.done, self.running.left_s = message.get("done"), message.get("left_s")
            self.running_changed.emit()

    def _on_done(self, outcome: ProcessOutcome) -> None:
        of_run = self.running.run if self.running is not None else None
        self.running, self._process = None, None
        result = _json_object(outcome.sentence) if outcome.ok else {}
        if result.get("path"):
            if of_run == self._run:
                self.refresh(Path(result["path"]))
        elif outcome.sentence != "Cancelled.":
            self.problem = outcome.sentence.partition(": ")[2] or outcome.sentence
        self.running_changed.emit()


def checkpoint_steps(run: RunFolder) -> list[int]:
    """Steps of the checkpoints on disk, newest first."""
    return [saved.step for saved in reversed(saved_weights(run))]


def _summary(offset: int, row: EvaluatedRow) -> RowSummary:
    means: dict[DecodingName, tuple[float | None, float | None]] = {}
    for decoding in DECODINGS:
        if (sides := row[decoding]) is not None:
            base, tuned = sides.get("base"), sides.get("tuned")
            before = mean_reward(base) if base is not None and tuned is not None else None
            means[decoding] = (before, mean_reward(tuned or base or sides.get("model") or []))
    return RowSummary(offset, row["index"], str(row.get("prompt", "")), str(row.get("answer", "")), means)


def _json_object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
