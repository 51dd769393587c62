"""What a run records beside its metrics: completions and their tokens, phases, time, memory and machine use."""

import math
import platform
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np
import psutil

from backend.runs.completion_rows import CompletionRow, GroupRow, TokenData
from backend.runs.events import Event, EventLog
from backend.sampling.outputs import TextStream
from backend.trainer.health.watch import Watch
from backend.training.batch import token_mask
from backend.training.learner import TokenRecord
from backend.types import Completion, Group
from backend.utils.machine import printed_by

GB = 1e9
CHILDREN_EVERY_S = 30.0  # least seconds between two searches for child processes, which take milliseconds
GPU_EVERY_S = 2.0  # seconds between two readings of the GPU, each of a command that takes some 10 ms
GPU_STATISTICS = ("/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator")  # the driver's counters

TIMED_PHASES = ("rollout", "reward", "train")  # phases of a step; the rest of its time is `time/other`


def group_row(step: int, group: Group) -> GroupRow:
    """One line of completions.jsonl."""
    problem, rows = group.problem, [*map(completion_row, group.completions)]
    row = GroupRow(step=step, prompt=problem.prompt, answer=problem.answer, type=problem.type, completions=rows)
    if problem.images:
        row["images"] = problem.images
    return row


def completion_row(completion: Completion) -> CompletionRow:
    row = CompletionRow(
        text=completion.text,
        tokens=completion.trained_tokens,
        stop=completion.stop,
        rewards=completion.scores,
        reward=completion.reward,
        advantage=completion.advantage,
    )
    for name in ("logged", "teacher_context"):
        if value := getattr(completion, name):
            row[name] = value
    if completion.turns:
        row["turns"] = [turn.row() for turn in completion.turns]
    return row


def add_token_data(
    rows: Sequence[GroupRow],
    groups: Sequence[Group],
    records: Mapping[int, TokenRecord],
    tokenizer: Any,
    *,
    mask_truncated: bool,
) -> None:
    """Add `token_data` to the rows of these groups. `records` are by completion, in the groups' order."""
    completions = (completion for group in groups for completion in group.completions)
    for number, row in enumerate(row for of_group in rows for row in of_group["completions"]):
        completion, record = next(completions), records.get(number)
        # The text that each token adds. Of a character spread over several tokens, the last one has it.
        stream = TextStream(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False))
        texts = [stream.push(token) for token in completion.tokens]
        if texts:
            texts[-1] += stream.rest()
        row["token_data"] = data = TokenData(text=texts, logp=_nine_digits(completion.logps))
        mask = [int(x) for x in token_mask(completion, mask_truncated)]
        if not all(mask):
            data["mask"] = mask
        if record is None:
            continue
        data["learned_logp"], data["ratio"] = _nine_digits(record.learned_logp), _nine_digits(record.ratio)
        data["clipped"] = [int(is_clipped) for is_clipped in record.clipped]
        own = np.float32(completion.advantage)  # the batch holds it in that type
        if any(x != own for x, is_trained in zip(record.advantage, mask, strict=True) if is_trained):
            data["advantage"] = _nine_digits(record.advantage)


def _nine_digits(values: Sequence[float]) -> list[float | None]:
    return [float(f"{x:.9g}") if math.isfinite(x) else None for x in values]


def report_health(event_log: EventLog, settings: Mapping[str, Any], events: Iterable[Event]) -> None:
    """From now on, log what the health rules find. `events`: the event log of a resumed run so far."""
    watch = Watch.resumed(settings, events)

    def follow(event: Event) -> None:
        for fields in watch.take(event):
            event_log.write("health", **fields)

    event_log.followers.append(follow)


@cache
def versions() -> dict[str, str]:
    ours = {name: version(name) for name in ("grpo-studio", "mlx", "mlx-lm", "transformers")}
    return {"python": platform.python_version(), "platform": platform.platform()} | ours


class ResourceUse:
    """What a run uses of its machine in each step. A thread reads a Mac's GPU, until `close`."""

    def __init__(self) -> None:
        self._processes: list[psutil.Process] = []
        self._before: dict[psutil.Process, tuple[float, int]] = {}
        self._look_again = 0.0
        self._gpu_shares: list[float] = []
        self._closed = threading.Event()
        self._reader: threading.Thread | None = None

    def begin(self) -> None:
        now = time.monotonic()
        if now >= self._look_again or not all(process.is_running() for process in self._processes):
            self._look_again = now + CHILDREN_EVERY_S
            own = psutil.Process()
            self._processes = [own]
            with suppress(psutil.Error):
                self._processes += own.children(recursive=True)
        self._before = self._readings()
        self._gpu_shares = []
        if sys.platform == "darwin" and self._reader is None:
            self._reader = threading.Thread(target=self._read_gpu, name="GPU use", daemon=True)
            self._reader.start()

    def metrics(self, elapsed_s: float) -> dict[str, float]:
        """The metrics of the step that began `elapsed_s` ago, without what the system does not report: resident memory
        of the run's processes (10⁹ bytes, shared pages counted for each), cores that they kept busy, share of the time
        that the Mac's GPU was busy with any program, memory of the machine that is swapped out."""
        now, nothing = self._readings(), (0.0, 0)
        # A process that is new since `begin` has spent all of its time in this step.
        spent = sum(max(cpu_s - self._before.get(process, nothing)[0], 0.0) for process, (cpu_s, _) in now.items())
        resident = sum(size for _, size in now.values())
        found = {"process/memory_gb": resident / GB, "process/cpu_cores": spent / max(elapsed_s, 1e-9)}
        if shares := self._gpu_shares:  # none in a step of less than GPU_EVERY_S
            found["process/gpu_use"] = statistics.fmean(shares)
        with suppress(psutil.Error, OSError, RuntimeError):  # a container may hide it
            found["machine/swap_gb"] = psutil.swap_memory().used / GB
        return found

    def close(self) -> None:
        self._closed.set()

    def _readings(self) -> dict[psutil.Process, tuple[float, int]]:
        """(seconds of processor time so far, bytes of resident memory) of each process."""
        found: dict[psutil.Process, tuple[float, int]] = {}
        for process in self._processes:
            with suppress(psutil.Error):
                times = process.cpu_times()
                found[process] = times.user + times.system, process.memory_info().rss
        return found

    def _read_gpu(self) -> None:
        while not self._closed.wait(GPU_EVERY_S):
            share = gpu_share(printed_by(GPU_STATISTICS))
            if share is None:  # a system that does not report it will not later
                return
            self._gpu_shares.append(share)


def gpu_share(printed: str) -> float | None:
    """The share of time, 0 to 1, that the busiest GPU was busy, from the output of GPU_STATISTICS."""
    percent = [int(number) for number in re.findall(r'"Device Utilization %"\s*=\s*(\d+)', printed)]
    return min(max(percent), 100) / 100 if percent else None


class StepTimer:
    """Times one step, from its construction. `clock`: seconds, which may stop while the run is paused."""

    def __init__(self, clock: Callable[[], float], use: ResourceUse | None = None) -> None:
        self._clock = clock
        self.use = use or ResourceUse()
        self.use.begin()
        self._began = clock()
        self.seconds: dict[str, float] = dict.fromkeys(TIMED_PHASES, 0.0)
        self._peaks: dict[str, int] = {}
        mx.reset_peak_memory()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = self._clock()
        self._record_peak("other")
        try:
            yield
        finally:
            self._record_peak(name)
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - began

    def count_as(self, name: str, seconds: float) -> None:
        """Count seconds of the rollout to another phase, which ran within it."""
        self.seconds[name] += seconds
        self.seconds["rollout"] -= seconds

    def _record_peak(self, name: str) -> None:
        # MLX has one counter of the peak, so each change of phase reads and resets it.
        self._peaks[name] = max(self._peaks.get(name, 0), mx.get_peak_memory())
        mx.reset_peak_memory()

    def elapsed(self) -> float:
        return self._clock() - self._began

    def rate(self, count: float, name: str) -> float:
        return count / max(self.seconds[name], 1e-9)

    def metrics(self) -> dict[str, float]:
        """The metrics of `ResourceUse`; `time/<phase>` in seconds, which add up to `time/step`; peaks of memory."""
        self._record_peak("other")
        elapsed = self.elapsed()
        times = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        times["time/other"] = elapsed - sum(self.seconds[name] for name in TIMED_PHASES)
        times["time/step"] = elapsed
        peaks = {f"peak_memory_gb/{name}": self._peaks.get(name, 0) / GB for name in ("rollout", "train")}
        peaks["peak_memory_gb"] = max(self._peaks.values()) / GB
        return self.use.metrics(elapsed) | times | peaks
