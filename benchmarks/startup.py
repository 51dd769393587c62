"""Time from process start to the first token and the first step, in fresh processes of `python -m backend train`."""

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from backend.utils.command import backend_command, backend_environment
from benchmarks.random_model import model_folder
from benchmarks.workloads import Case

CASE = Case("cold start", prompts=1, completion=64)
MARKS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "the event log's first line": lambda event: True,
    "the model and the data stand": lambda event: event["kind"] == "started",
    "the first token": lambda event: event["kind"] == "phase" and event["phase"] == "sampling",
    "the first step": lambda event: event["kind"] == "step",
}


def measure(rounds: int, warm_up: int, models: Path, note: Callable[[str], None]) -> list[dict[str, Any]]:
    """Seconds from the start until each mark: medians over `rounds` fresh processes, after some that warm the disk's
    cache."""
    runs: list[dict[str, tuple[float, float]]] = []
    for number in range(warm_up + rounds):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(_once(model_folder(CASE, models), Path(folder)))
        note(f"cold start: round {number + 1} of {warm_up + rounds}")
    rows: list[dict[str, Any]] = []
    for mark in MARKS:
        wall, cpu = zip(*(run[mark] for run in runs[warm_up:]), strict=True)
        rows.append({"until": mark, "wall": statistics.median(wall), "cpu": statistics.median(cpu)})
    return rows


def _once(model: Path, folder: Path) -> dict[str, tuple[float, float]]:
    """(wall, CPU) seconds until each mark of one run. Raises RuntimeError when the run fails before the last."""
    began = time.perf_counter()
    command = backend_command("train", str(_config(model, folder)), "--runs-dir", str(folder), "--stream")
    reached: dict[str, tuple[float, float]] = {}
    with (folder / "stderr").open("w+") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=backend_environment())
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            event = json.loads(line)
            for mark, is_reached in MARKS.items():
                if mark not in reached and is_reached(event):
                    cpu = sum(psutil.Process(process.pid).cpu_times()[:4])  # its own and its children's
                    reached[mark] = (time.perf_counter() - began, cpu)
        if process.wait() or len(reached) < len(MARKS):
            stderr.seek(0)
            raise RuntimeError(f"The run ended with {process.returncode}:\n{stderr.read()[-2000:]}")
    return reached


def _config(model: Path, folder: Path) -> Path:
    """The config of one step on generated rows, without evaluation or fusing."""
    rows = [{"prompt": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = {
        "model": str(model),
        "data": str(folder / "rows.jsonl"),
        "iters": 1,
        "group_size": CASE.group_size,
        "max_completion_length": CASE.completion,
        "max_seq_length": 512,
        "steps_per_eval": 0,
        "fuse": False,
        "reward_functions": ["r1_int"],
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path
