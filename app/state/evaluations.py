"""The evaluations of a run, and the process that makes one."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

from PySide6.QtCore import QObject, QTimer, Signal

from app.state.consent import Consent
from app.state.messages import problems_to
from app.state.processes import ProcessOutcome, VerbProcess, json_object
from backend.config import config
from backend.runs.completion_rows import prompt_key
from backend.runs.run_folder import RunFolder, modified_at
from backend.runs.saved_weights import all_checkpoints
from backend.trainer.evaluation.evaluation_rows import (
    DecodingName,
    EvaluatedRow,
    Evaluation,
    change_of,
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


@dataclass(frozen=True, slots=True)
class RowMeans:
    """Mean reward of a row's completions before training, None without that side, and after."""

    before: float | None
    after: float | None
    change: float | None

    @property
    def kind(self) -> Literal["better", "worse", "unchanged"] | None:
        change = self.change
        return None if change is None else "better" if change > 0 else "worse" if change < 0 else "unchanged"


@dataclass(frozen=True, slots=True)
class RowSummary:
    """A row of an evaluation: where it begins in the file, its number in the split from 0, and its means."""

    offset: int
    index: int
    key: tuple[str, ...]
    means: dict[DecodingName, RowMeans]


@dataclass(frozen=True, slots=True)
class Listed:
    path: Path
    evaluation: Evaluation


def read_evaluations(run: RunFolder) -> Iterator[Listed]:
    """The evaluations of a run, newest first, read again only where a file has changed; without damaged files."""
    for path in evaluations_of(run):
        if (evaluation := _read(path, modified_at(path))) is not None:
            yield Listed(path, evaluation)


@lru_cache(maxsize=64)
def _read(path: Path, _written: float) -> Evaluation | None:
    with suppress(UserError):  # no evaluation
        return read_evaluation(path)
    return None


@dataclass(slots=True)
class RunningEvaluation:
    run: RunFolder
    process: VerbProcess
    phase: str = "Starting"
    done: float | None = None
    left_s: float | None = None


class Evaluations(QObject):
    """The evaluations of a run, newest first, and the rows of the one that is `shown`."""

    listed_changed = Signal()
    rows_changed = Signal()
    running_changed = Signal()

    def __init__(self, consent: Consent, parent: QObject) -> None:
        super().__init__(parent)
        self._consent = consent
        self._run: RunFolder | None = None
        self.listed: list[Listed] = []
        self.shown: Listed | None = None
        self.rows: list[RowSummary] = []
        self.running: RunningEvaluation | None = None  # being made
        self.problem = ""  # why the last one gave no result
        self._reader: Iterator[RowSummary] = iter(())
        self._reading = QTimer(self, interval=0)
        self._reading.timeout.connect(self._read_slice)

    def set_run(self, run: RunFolder | None) -> None:
        if run != self._run:
            self._run, self.problem = run, ""
            self.shown = None
        self.refresh()

    def refresh(self, show: Path | None = None) -> None:
        """Show the evaluation at `show`, else the same, else the newest."""
        self.listed = list(read_evaluations(self._run)) if self._run is not None else []
        wanted = show or (self.shown.path if self.shown is not None else None)
        chosen = next((entry for entry in self.listed if entry.path == wanted), next(iter(self.listed), None))
        changed, self.shown = chosen != self.shown, chosen
        self.listed_changed.emit()
        if changed:
            self._reading.stop()
            self.rows = []
            self.rows_changed.emit()
            if self.shown is not None:
                self._reader = _rows_in(rows_file(self.shown.path))
                self._reading.start()

    def with_prompt(self, prompt: tuple[str, ...]) -> Path | None:
        """The newest evaluation that has this prompt, as its `prompt_key`."""
        spelled = f'"prompt": {json.dumps(prompt[0], ensure_ascii=False)}'.encode(errors="replace")
        for entry in self.listed:
            with suppress(OSError), open_regular(rows_file(entry.path)) as file:
                if any(prompt_key(parse_row(line) or {}) == prompt for line in file if spelled in line):
                    return entry.path
        return None

    def row(self, summary: RowSummary) -> EvaluatedRow | None:
        """A row with its completions; None if the file is gone."""
        if self.shown is not None:
            with suppress(OSError), open_regular(rows_file(self.shown.path)) as file:
                file.seek(summary.offset)
                return parse_row(file.readline())
        return None

    def _read_slice(self) -> None:
        until = time.monotonic() + SLICE_S
        for row in self._reader:
            self.rows.append(row)
            if time.monotonic() > until:
                return
        self._reading.stop()
        self.rows_changed.emit()  # all at once: a table that grows while it is read loses its selection

    def start(self, options: Sequence[str]) -> None:
        if self.running is not None or self._run is None:
            return
        with problems_to(self._fail):
            if not self._consent.obtain(config.read(self._run.config), base=self._run.path):
                self._fail("The code was not allowed to run, so nothing was evaluated.")
                return
            command = backend_command("evaluate", str(self._run.path), "--stream", *options)
            process = VerbProcess(command, self)
            self.problem, self.running = "", RunningEvaluation(self._run, process)
            process.line.connect(self._on_line)
            process.done.connect(self._on_done)
            process.start()
            self.running_changed.emit()

    def stop(self) -> None:
        if self.running is not None:
            self.running.process.cancel()

    def _fail(self, sentence: str) -> None:
        self.problem = sentence
        self.running_changed.emit()

    def _on_line(self, line: str) -> None:
        message = json_object(line)
        if self.running is not None and "phase" in message:
            self.running.phase = str(message["phase"])
            self.running.done, self.running.left_s = message.get("done"), message.get("left_s")
            self.running_changed.emit()

    def _on_done(self, outcome: ProcessOutcome) -> None:
        of_run = self.running.run if self.running is not None else None
        self.running = None
        result = json_object(outcome.sentence) if outcome.ok else {}
        if result.get("path"):
            if of_run == self._run:
                self.refresh(Path(result["path"]))
        elif outcome.sentence != "Cancelled.":
            self.problem = outcome.problem
        self.running_changed.emit()


def checkpoint_steps(run: RunFolder) -> list[int]:
    return [saved.step for saved in reversed(all_checkpoints(run))]


def _rows_in(path: Path) -> Iterator[RowSummary]:
    with suppress(OSError), open_regular(path) as file:  # without its rows, the figures are shown
        offset = 0
        while line := file.readline():
            row, offset, start = parse_row(line), offset + len(line), offset
            if row is None:
                continue
            means: dict[DecodingName, RowMeans] = {}
            for decoding in get_args(DecodingName):
                if (sides := row[decoding]) is not None:
                    base, tuned = sides.get("base"), sides.get("tuned")
                    before = mean_reward(base) if base is not None and tuned is not None else None
                    after = mean_reward(tuned or base or sides.get("model") or [])
                    means[decoding] = RowMeans(before, after, change_of(row, decoding))
            yield RowSummary(start, row["index"], prompt_key(row), means)
