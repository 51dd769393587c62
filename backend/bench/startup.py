"""How long a person waits for the first token and for the first step: fresh processes of `python -m backend train`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from backend.bench.random_model import folder_of
from backend.bench.workloads import Case
from backend.spec.places import project_root

CASE = Case("cold start", prompts=1, completion=64)
MARKS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "the diary's first line": lambda event: True,
    "the model and the data stand": lambda event: event["kind"] == "started",
    "the first token": lambda event: event["kind"] == "phase" and event["phase"] == "sampling",
    "the first step": lambda event: event["kind"] == "step",
}


def measure(rounds: int, warm_up: int, models: Path, note: Callable[[str], None]) -> list[dict[str, Any]]:
    """Medians over `rounds` fresh processes, after some to warm the disk's cache: seconds from the start until each mark."""
    found: list[dict[str, tuple[float, float]]] = []
    for number in range(warm_up + rounds):
        with tempfile.TemporaryDirectory() as folder:
            found.append(_once(folder_of(CASE, models), Path(folder)))
        note(f"cold start: round {number + 1} of {warm_up + rounds}")
    pick = [{mark: one[mark][clock] for mark in MARKS} for clock in (0, 1) for one in found[warm_up:]]
    wall, cpu = pick[:rounds], pick[rounds:]
    return [
        {"until": mark, "wall": _median(one[mark] for one in wall), "cpu": _median(one[mark] for one in cpu)}
        for mark in MARKS
    ]


def _median(values: Any) -> float:
    return statistics.median(values)


def _once(model: Path, folder: Path) -> dict[str, tuple[float, float]]:
    """(wall, CPU) seconds until each mark of one run. Raises RuntimeError where the run does not get there."""
    began = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "backend",
        "train",
        str(_config(model, folder)),
        "--runs-dir",
        str(folder),
        "--stream",
    ]
    found: dict[str, tuple[float, float]] = {}
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, cwd=project_root())
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            event = json.loads(line)
            for mark, reached in MARKS.items():
                if mark not in found and reached(event):
                    found[mark] = (time.perf_counter() - began, _cpu(process.pid))
        if process.wait() or len(found) < len(MARKS):
            said.seek(0)
            raise RuntimeError(f"The run ended with {process.returncode}:\n{said.read()[-2000:]}")
    return found


def _cpu(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system + times.children_user + times.children_system


def _config(model: Path, folder: Path) -> Path:
    """One step of a run whose rows are made up; nothing is evaluated or fused, so that the step comes first."""
    rows = [{"prompt": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = {
        "model": str(model), "data": str(folder / "rows.jsonl"), "iters": 1, "group_size": CASE.group_size,
        "max_completion_length": CASE.completion, "max_seq_length": 512, "steps_per_eval": 0, "fuse": False,
        "reward_functions": ["r1_int"],
    }  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path
