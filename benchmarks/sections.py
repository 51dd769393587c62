"""Measures the sections of docs/performance.md, with models in a temporary folder and progress on stderr."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from backend.engine import cpu_setup
from backend.engine.device import on_gpu
from benchmarks import ablation, peers, side_by_side, workloads
from benchmarks.workloads import Case

Results = list[dict[str, Any]]
Note = Callable[[str], None]
Planned = list[tuple[Case, Sequence[str]]]
"""(case, the contenders that run it side by side)."""


def measure(section: str, rounds: int, warm_up: int, only: str = "") -> Results:
    """Measure a section; `only` keeps the cases with these words in their name. Raises LookupError without the
    peers."""
    if section == "start":
        return _with_model_folder(lambda models, note: _starts(rounds, warm_up, models, note))
    return compare([(case, contenders) for case, contenders in planned(section) if only in case.name], rounds, warm_up)


def planned(section: str) -> Planned:
    """The cases and contenders of a section. Raises LookupError without the peers."""
    if section == "against":
        if not peers.versions():
            raise LookupError("The peers are not installed; run python -m benchmarks peers --install first.")
        return [(match.case, match.contenders) for match in workloads.MATCHES]
    if section == "ablation":
        techniques = [*ablation.SWITCHES, *(ablation.GPU_SWITCHES if on_gpu() else ())]
        contenders = ("ours", *(f"ours, without {technique}" for technique in techniques))
        return [(case, contenders) for case in workloads.ABLATED]
    chosen = {
        "ours": workloads.SMALL,
        "samples": workloads.ROWS,
        "sweep": [case for axis in workloads.SWEEPS.values() for case in axis],
    }
    return [(case, ("ours",)) for case in chosen[section]]


def compare(plan: Planned, rounds: int, warm_up: int) -> Results:
    def work(models: Path, note: Note) -> Results:
        measured = [side_by_side.measure(case, names, rounds, warm_up, models, note) for case, names in plan]
        return [result.as_dict() for results in measured for result in results]

    return _with_model_folder(work)


def _starts(rounds: int, warm_up: int, models: Path, note: Note) -> Results:
    from benchmarks import startup

    return startup.measure(rounds, warm_up, models, note)


def _with_model_folder(work: Callable[[Path, Note], Results]) -> Results:
    from rich.console import Console

    cpu_setup.load_openblas()  # models are made in this process
    with tempfile.TemporaryDirectory() as models, Console(stderr=True).status("") as status:
        return work(Path(models), lambda sentence: status.update(sentence))
