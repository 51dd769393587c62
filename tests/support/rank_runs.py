"""Real runs over several ranks on this machine, or on network namespaces, started as a person starts them; and what is
left of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil

from backend.rewards.allowed_code import allow_named
from backend.runs.checkpoints import checkpoint
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from tests.support import small_run

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {
    "iters": 12, "batch_size": 4, "group_size": 3, "optimizer": "sgd", "learning_rate": 0.02, "weight_decay": 0.0, "top_k": 0, "top_p": 1.0,
    "validation_split": 0.25, "steps_per_eval": 4, "val_batches": 1, "save_every": 3, "max_completion_length": 12,
}  # fmt: skip
"""SGD, whose step is the gradient: AdamW would magnify the rounding of sums whose order differs with the ranks' speeds.
The rate is low for the same reason: where the policy changes much, one draw in thousands falls to the other side of a
rounding error."""
COUNTED = ("reward", "rewards/", "completions/", "num_tokens", "epoch", "frac_", "learning_rate", "hit_max")
"""Metrics that are exact however the rows are divided."""
TOLERANCE = 2e-6


@dataclass(slots=True)
class LiveRun:
    """A launcher that is at work, with its run folder."""

    process: subprocess.Popen[bytes]
    run: RunFolder
    output: Path

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run.events) if not kinds or event["kind"] in kinds]

    def ranks(self) -> dict[int, psutil.Process]:
        """The ranks' processes, from the moment that each of them is there."""
        found: dict[int, psutil.Process] = {}
        for process in processes_of(self.run):
            with suppress(psutil.Error):
                words, environment = process.cmdline(), process.environ()
                if "rank" in words and words[words.index("rank") + 1] == "--run" and "sh" not in Path(words[0]).name:
                    rank = environment.get("MLX_RANK") or environment.get("OMPI_COMM_WORLD_RANK")
                    if rank is not None:
                        found[int(rank)] = process
        return found

    def wait_for_step(self, step: int, timeout_s: float = 120) -> None:
        until = time.monotonic() + timeout_s
        while not any(event["step"] >= step for event in self.events("step")):
            assert time.monotonic() < until and self.process.poll() is None, self.output.read_text()
            time.sleep(0.02)

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)

    def last_step(self) -> int:
        return max((event["step"] for event in self.events("step")), default=0)

    def saved_step(self) -> int:
        return max((saved.state.step for saved in checkpoint.all_checkpoints(self.run)), default=0)


class RankRuns:
    """Runs in a folder of its own, all with the same small model and rows."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None, prefix: Sequence[str] = ()) -> None:
        """`prefix`: words before every command, such as those that run it in a network namespace."""
        self.folder, self.prefix = folder, prefix
        self.inputs = folder / "inputs"
        self.inputs.mkdir(parents=True, exist_ok=True)
        self.environment = dict(os.environ) | dict(environment or {})
        self.environment |= {
            "GRPO_STUDIO_RUNS": str(folder / "runs"), "GRPO_STUDIO_PREFS": str(folder / "prefs"), "PYTHONPATH": str(ROOT),
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }  # fmt: skip

    def hosts(self, size: int) -> Path:
        """So many ranks on this machine."""
        return self.hosts_file([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * size)

    def hosts_file(self, hosts: Sequence[Mapping[str, Any]]) -> Path:
        path = self.folder / f"hosts-{len(hosts)}.json"
        path.write_text(json.dumps(hosts))
        return path

    def train(self, name: str, hosts: Path | None, *words: str, **changes: Any) -> LiveRun:
        raw = small_run.settings_for(self.inputs, **small_run.low_half(self.inputs) | SETTINGS | changes)
        config = small_run.write_config(self.folder / f"{name}.yaml", raw)
        allow_named(raw)
        to = [] if hosts is None else ["--hosts", str(hosts)]
        return self._start(name, "train", str(config), "--name", name, *to, *words)

    def resume(self, name: str, *words: str) -> LiveRun:
        return self._start(name, "resume", name, *words)

    def _start(self, name: str, *words: str) -> LiveRun:
        output = self.folder / f"{name}-{words[0]}.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*self.prefix, sys.executable, "-P", "-m", "backend", *words], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
        return LiveRun(process, RunFolder(self.folder / "runs" / name), output)


def processes_of(run: RunFolder) -> list[psutil.Process]:
    """Every process that has the run's folder in its command line."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_other = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if is_other and any(str(run.path) in word for word in process.cmdline()):
                found.append(process)
    return found


def differences(run: RunFolder, whole: RunFolder) -> list[str]:
    """What differs between a run that was broken and one that was not: steps, completions, counted metrics, and weights
    beyond TOLERANCE."""
    lines: list[str] = []
    mine, theirs = (
        [(e["step"], _counted(e)) for e in read_events(each.events) if e["kind"] == "step"] for each in (run, whole)
    )
    lines += [f"step {a[0]}: {a[1]}\n  not {b[1]}" for a, b in zip(mine, theirs, strict=False) if a != b][:2]
    if len(mine) != len(theirs):
        lines.append(f"{len(mine)} steps, not {len(theirs)}")
    if (rows := _tokens(run)) != (wanted := _tokens(whole)):
        lines.append(f"completions differ ({len(rows)} and {len(wanted)} groups)")
    last, wanted_last = checkpoint.all_checkpoints(run)[-1], checkpoint.all_checkpoints(whole)[-1]
    if last.state.step != wanted_last.state.step:
        lines.append(f"ends with the checkpoint of step {last.state.step}, not {wanted_last.state.step}")
    weights, wanted_weights = last.weights(), wanted_last.weights()
    apart = {name: float(mx.abs(weights[name] - x).max()) for name, x in wanted_weights.items()}
    lines += [f"{name} differs by {by:.2g}" for name, by in apart.items() if not by <= TOLERANCE][:2]
    return lines


def _counted(event: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event["metrics"].items() if name.startswith(COUNTED)}


def _tokens(run: RunFolder) -> list[Any]:
    rows = [json.loads(line) for line in run.completions.read_text(encoding="utf-8").splitlines()]
    return [(row["step"], row["prompt"], [each["text"] for each in row["completions"]]) for row in rows]
