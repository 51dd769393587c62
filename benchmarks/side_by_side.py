"""Measures contenders side by side: a process for each, one step of each in turn, medians over the rounds.

Taking turns spreads whatever else the machine does over all of them alike; a process of its own gives each its own
environment, peak memory and compiled functions. The first rounds only warm up.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.utils.child_process import ChildEnded, ChildProcess
from backend.utils.places import project_root
from benchmarks import peers
from benchmarks.random_model import model_folder
from benchmarks.workloads import PEERS, Case

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Result:
    """One contender's measurements of one case: every measured step, and the medians over them."""

    case: Case
    contender: str
    runs: list[dict[str, float]]

    @property
    def medians(self) -> dict[str, float]:
        return {name: statistics.median(run[name] for run in self.runs) for name in self.runs[0]}

    def as_dict(self) -> dict[str, Any]:
        return {"case": asdict(self.case), "contender": self.contender, "medians": self.medians, "runs": self.runs}

    @classmethod
    def of(cls, raw: dict[str, Any]) -> Result:
        return cls(Case(**raw["case"]), raw["contender"], raw["runs"])


class Worker:
    """A contender in its process. Raises RuntimeError, with the end of its stderr, when it breaks."""

    def __init__(self, contender: str, case: Case, model: Path) -> None:
        self.contender = contender
        python = peers.python() if contender in PEERS else Path(sys.executable)
        self._child = ChildProcess(
            [str(python), "-m", "benchmarks.contender"],
            grace_s=10.0,
            environment=os.environ | {"PYTHONPATH": str(project_root()), "HF_HUB_OFFLINE": "1"},
        )
        self.ready = self._answer({"contender": contender, "case": asdict(case), "model": str(model)})["ready"]

    def step(self) -> dict[str, float]:
        return self._answer({"do": "step"})

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._child.request(request)
        except ChildEnded as ended:
            raise RuntimeError(f"{self.contender} broke off:\n{ended.stderr}") from None

    def stop(self) -> None:
        self._child.stop()


def measure(case: Case, contenders: Sequence[str], rounds: int, warm_up: int, models: Path, note: Note) -> list[Result]:
    """`rounds` steps of each contender, in turns, after `warm_up` steps that do not count. Models are made in
    `models`."""
    folder = model_folder(case, models)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    with ExitStack() as stack:
        workers: list[Worker] = []
        for name in contenders:
            workers.append(Worker(name, case, folder))
            stack.callback(workers[-1].stop)
        for number in range(warm_up + rounds):
            for worker in workers:
                took = worker.step()
                if number >= warm_up:
                    runs[worker.contender].append(took)
            note(f"{case.name}: round {number + 1} of {warm_up + rounds}")
    return [Result(case, name, runs[name]) for name in contenders]
