"""What a program gets back from training: the run's folder, how it ended, and its metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.utils.errors import UserError


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """`ending` and the last finished `step`, with the event log's last `sentence`. Every verb takes `folder`, as in `python -m backend export
    FOLDER --to lmstudio`; `adapters` or `model` in it is what was learned."""

    folder: Path
    ending: Literal["finished", "stopped", "failed"]
    step: int
    sentence: str

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of every step, each with its `step`, from the first; read from the event log at every call."""
        return list(self._metrics("step"))

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The metrics of every evaluation, each with its `step` and `split`."""
        return list(self._metrics("eval"))

    def _metrics(self, kind: str) -> Iterator[dict[str, Any]]:
        for event in read_events(RunFolder(self.folder).events):
            if event["kind"] == kind:
                split = {"split": event["split"]} if "split" in event else {}
                yield {"step": event["step"], **split, **event["metrics"]}


class RunFailed(UserError):
    """A run that began and failed, of something that its user can mend. What it had learned is saved in `run.folder`."""

    def __init__(self, run: TrainedRun) -> None:
        setting, _, sentence = run.sentence.partition(": ")
        super().__init__(*((setting, sentence) if setting.isidentifier() and sentence else ("run", run.sentence)))
        self.run = run
