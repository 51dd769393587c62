"""Long runs: memory, open files, threads and the time of a step must be flat, and what is written must grow by the step.

`count` is the length of a run in steps. There are two, with evaluations and checkpoints, the second with `record_tokens`. Each trains in a
process of its own, so that the second does not inherit the first one's memory.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from backend.spec.command import backend_environment
from backend.spec.run_folder import RunFolder
from tests.support import small_run
from tests.torture.report import Report

MEMORY_GROWTH = 1.03
"""The last tenth's memory may be this many times that of the second tenth: the first one still fills caches."""
TIME_GROWTH = 1.25
"""The same for the processor time of a step, which a busy machine changes too."""
BYTES_GROWTH = 1.1
"""The same for the bytes that a step adds to the diary and to completions.jsonl: step numbers become longer."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the process held when a step was finished."""

    step: int
    seconds: float
    """Of the processor, all threads together: the wall clock would measure what else the machine does."""
    memory: int
    """Resident bytes."""
    files: int
    threads: int
    diary: int
    completions: int
    """Bytes of the two files."""


def soak(folder: Path, steps: int, seed: int, record_tokens: bool, out: IO[str]) -> None:
    """Train in this process, and write a sample of every step to `out`: kept in a list they would be a leak of their own."""
    run, process = RunFolder(folder / "run"), psutil.Process()

    def look(event: dict[str, Any]) -> None:
        if event["kind"] != "step":
            return
        if event["step"] % 100 == 0:
            gc.collect()  # what is garbage is no leak
        sample = Sample(
            event["step"], time.process_time(), process.memory_info().rss, process.num_fds(), threading.active_count(),
            run.events.stat().st_size, run.completions.stat().st_size,
        )  # fmt: skip
        out.write(json.dumps(asdict(sample)) + "\n")

    raw = small_run.settings_for(
        folder, **small_run.low_half(folder), iters=steps, seed=seed, steps_per_eval=100, validation_split=0.25, val_batches=1,
        save_every=50, record_tokens=record_tokens, beta=0.01, learning_rate=1e-6,
    )  # fmt: skip
    ending = small_run.train_here(raw, run, look)
    assert ending.kind == "finished", ending.sentence


def complaints(samples: list[Sample]) -> list[str]:
    """A sentence for everything that grew; none for a sound run."""
    tenth = len(samples) // 10
    early, late = samples[tenth : 2 * tenth], samples[-tenth:]

    def median(part: list[Sample], name: str) -> float:
        return statistics.median(getattr(sample, name) for sample in part)

    def a_step(part: list[Sample], name: str) -> float:
        return (getattr(part[-1], name) - getattr(part[0], name)) / (len(part) - 1)

    ratios = {
        "memory": (median(late, "memory") / median(early, "memory"), MEMORY_GROWTH),
        "time a step": (a_step(late, "seconds") / a_step(early, "seconds"), TIME_GROWTH),
        "bytes of the diary a step": (a_step(late, "diary") / a_step(early, "diary"), BYTES_GROWTH),
        "bytes of completions.jsonl a step": (a_step(late, "completions") / a_step(early, "completions"), BYTES_GROWTH),
    }
    for name, (ratio, most) in ratios.items():
        print(f"{name}: {ratio:.3f} (at most {most})", flush=True)
    print(f"memory {median(early, 'memory') / 2**20:.1f} → {median(late, 'memory') / 2**20:.1f} MiB", flush=True)
    said = [f"{name} grew to {ratio:.3f}, at most {most}" for name, (ratio, most) in ratios.items() if ratio > most]
    for name in ("files", "threads"):
        before, after = median(early, name), median(late, name)
        print(f"{name}: {before:g} → {after:g}", flush=True)
        if after > before:
            said.append(f"{name} grew from {before:g} to {after:g}")
    return said


def main(count: int, seed: int) -> int:
    report = Report("soak")
    for record_tokens in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "samples.jsonl"
            arguments = [folder, str(count), str(seed), str(int(record_tokens)), str(out)]
            command = [sys.executable, "-m", "tests.torture.soak", *arguments]
            began = time.monotonic()
            done = subprocess.run(command, env=backend_environment(), capture_output=True, text=True)
            print(f"record_tokens {record_tokens}: {count} steps in {time.monotonic() - began:.0f} s", flush=True)
            if done.returncode:
                report.failed(seed, "The run did not finish.", done.stderr[-2000:])
                continue
            said = complaints([Sample(**json.loads(line)) for line in out.read_text().splitlines()])
            report.failed(seed, f"record_tokens {record_tokens}: {'; '.join(said)}.") if said else report.passed()
    return report.failures


def _child() -> None:
    folder, steps, seed, record_tokens, path = sys.argv[1:]
    with open(path, "w", encoding="utf-8") as out:
        soak(Path(folder), int(steps), int(seed), record_tokens == "1", out)


if __name__ == "__main__":
    _child()
