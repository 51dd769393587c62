"""Runs over several ranks, one of which is killed or stopped at a random moment: ended in time, saved, and as if nothing had happened once
resumed.

A case draws how many ranks there are and how they talk (two over the ring, three over MPI where that is installed), the settings, which rank is
struck, when, and with what: SIGKILL, or SIGSTOP in two of seven cases. The launcher must have ended within ENDS_WITHIN_S of the blow. No process may be left, the last finished step must be saved (unless rank 0 itself was killed), and the resumed run must equal an unbroken one
on a single rank.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psutil

from backend.spec.run_folder import RunFolder
from tests.support.rank_runs import LiveRun, RankRuns, differences, processes_of
from tests.torture.report import Report

ENDS_WITHIN_S = 30.0
LONGEST_S = 300.0
"""What a run that nothing breaks may take."""
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_iterations": 3},
    {"train_type": "full", "learning_rate": 0.01},
    {"beta": 0.05, "num_iterations": 2, "save_every": 100},
)


@dataclass(slots=True)
class StruckRun:
    """What came of one case."""

    what: str
    ended_s: float = 0.0
    faults: list[str] = field(default_factory=list)


class Striker:
    """Does the cases of one torture, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.runs = RankRuns(folder)
        self._whole: dict[int, RunFolder] = {}

    def case(
        self, seed: int, *, size: int | None = None, number: int | None = None, rank: int | None = None
    ) -> StruckRun:
        random = Random(seed)
        has_mpi = shutil.which("mpirun") is not None
        drawn = random.choices((2, 3), (3, 1))[0] if has_mpi else 2
        size = drawn if size is None else size
        variant = random.randrange(len(VARIANTS))
        struck = random.randrange(size) if rank is None else rank
        drawn_number = signal.SIGSTOP if random.random() < 2 / 7 else signal.SIGKILL
        number = drawn_number if number is None else number
        moment = random.random()
        outcome = StruckRun(
            f"{size} ranks, variant {variant}, {signal.Signals(number).name} to rank {struck} at {moment:.2f}"
        )
        whole = self._unbroken(variant)
        name = f"case-{seed}"
        live = self.runs.train(name, self.runs.hosts(size), **VARIANTS[variant])
        try:
            self._strike(live, struck, number, moment, outcome)
            if not outcome.faults:
                self._go_on(name, whole, outcome)
        finally:
            for each in processes_of(live.run):
                each.kill()
            if not outcome.faults:
                shutil.rmtree(live.run.path, ignore_errors=True)
        return outcome

    def _unbroken(self, variant: int) -> RunFolder:
        """The same run on one rank, without a break."""
        if variant not in self._whole:
            live = self.runs.train(f"whole-{variant}", None, **VARIANTS[variant])
            assert live.wait(LONGEST_S) == 0, live.output.read_text()
            self._whole[variant] = live.run
        return self._whole[variant]

    def _strike(self, live: LiveRun, rank: int, number: int, moment: float, outcome: StruckRun) -> None:
        """One signal: early ones as soon as there are ranks, the others when the diary has come so far."""
        steps = 12
        until = time.monotonic() + LONGEST_S
        while rank not in live.ranks():
            if time.monotonic() > until or live.process.poll() is not None:
                outcome.faults.append(f"rank {rank} was never there: {live.output.read_text()[-500:]}")
                return
            time.sleep(0.02)
        if moment < 0.2:
            time.sleep(15 * moment)  # Python and MLX start, the ranks meet, the model is loaded
        else:
            while live.last_step() < int((moment - 0.2) / 0.8 * steps) and live.process.poll() is None:
                time.sleep(0.005)
            time.sleep(Random(moment).random() * 0.3)
        try:
            live.ranks()[rank].send_signal(number)
        except (KeyError, psutil.Error):
            return  # it has ended: as good a moment as any
        began = time.monotonic()
        self._await_end(live, began, outcome)
        told = live.events()[-1]["kind"] if live.events() else "nothing"
        outcome.what += f" (after step {live.last_step()}: {told} in {outcome.ended_s:.1f} s)"
        if told not in ("failed", "finished", "nothing"):
            outcome.faults.append(f"the diary ends with {told}")
        if (rank, number) != (0, signal.SIGKILL) and live.saved_step() != live.last_step():
            outcome.faults.append(f"step {live.last_step()} is not saved, step {live.saved_step()} is")

    def _await_end(self, live: LiveRun, began: float, outcome: StruckRun) -> None:
        try:
            code = live.wait(ENDS_WITHIN_S + 30)
        except subprocess.TimeoutExpired:
            outcome.faults.append(f"the launcher does not end:\n{_stacks(live)}")
            live.process.kill()
            return
        outcome.ended_s = time.monotonic() - began
        if code not in (0, 2):
            outcome.faults.append(f"exit code {code}: {live.output.read_text()[-800:]}")
        if outcome.ended_s > ENDS_WITHIN_S and code != 0:
            outcome.faults.append(f"it took {outcome.ended_s:.1f} s to end")
        if left := processes_of(live.run):
            outcome.faults.append(f"left running: {left}")

    def _go_on(self, name: str, whole: RunFolder, outcome: StruckRun) -> None:
        live = self.runs.resume(name)
        try:
            code = live.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            outcome.faults.append(f"resumed, it hangs:\n{_stacks(live)}")
            live.process.terminate()
            live.process.wait()
            return
        if code != 0:
            outcome.faults.append(f"resumed, it ended with {code}: {live.output.read_text()[-800:]}")
            return
        outcome.faults += differences(live.run, whole)
        if left := processes_of(live.run):
            outcome.faults.append(f"left running after the resume: {left}")


def _stacks(live: LiveRun) -> str:
    """What a run that hangs has told, and where its processes are, if py-spy is there to say it."""
    told = [f"{event['kind']} {event.get('phase') or event.get('step', '')}" for event in live.events()[-5:]]
    lines = [live.output.read_text()[-500:], f"the diary ends with {told}"]
    for process in [live.process.pid, *(each.pid for each in processes_of(live.run))]:
        if (spy := shutil.which("py-spy")) is not None:
            lines.append(subprocess.run([spy, "dump", "--pid", str(process)], capture_output=True, text=True).stdout)
    return "\n".join(lines)


def main(count: int, seed: int) -> int:
    report, longest = Report("ranks"), 0.0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        striker = Striker(Path(name))
        for case in range(seed, seed + count):
            outcome = striker.case(case)
            longest = max(longest, outcome.ended_s)
            print(f"   {case}: {outcome.what}", flush=True)
            if outcome.faults:
                report.failed(case, outcome.what, "\n".join(outcome.faults))
            else:
                report.passed()
    print(f"   {report.cases} cases, {report.failures} failures; the longest end took {longest:.1f} s", flush=True)
    return report.failures
