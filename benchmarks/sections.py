"""Measures the sections of docs/performance.md, with models in a temporary folder and progress on stderr."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from backend.engine import cpu_setup
from backend.engine.device import on_gpu
from benchmarks import ablation, peers, side_by_side, startup, workloads
from benchmarks.workloads import Case


def measure(section: str, rounds: int, warm_up: int, only: str = "") -> list[dict[str, Any]]:
    """Measure a section; `only` keeps the cases with these words in their name. Raises LookupError without the
    peers."""
    plan = [] if section == "start" else [(case, names) for case, names in planned(section) if only in case.name]
    cpu_setup.load_openblas()  # models are made in this process
    with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status("") as status:
        how = rounds, warm_up, Path(folder), status.update
        if section == "start":
            return startup.measure(*how)
        return [result.as_dict() for case, names in plan for result in side_by_side.measure(case, names, *how)]


def planned(section: str) -> list[tuple[Case, Sequence[str]]]:
    """The cases of a section, and for each the contenders that run it side by side. Raises LookupError without the
    peers."""
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
