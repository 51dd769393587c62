"""SIGKILL at random moments of real runs: after any number of them the run is resumed to its end, and equals the one that nothing broke.

A case draws what is done (a run, a sweep, an export …) and its settings, does it once without a break, and again with kills: at a moment, or
before or after one of the system calls that the unbroken process made. Then everything in the two homes is compared, files left over
included, and no process may have outlived the one that was killed.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from backend.runs.run_folder import RunFolder
from backend.runs.steering import request_change
from backend.utils.errors import UserError
from tests.torture.drawn_settings import Inputs
from tests.torture.equality import differences
from tests.torture.preload import Blow, Call, traced
from tests.torture.report import Report
from tests.torture.warm import Ended, WarmProcess
from tests.torture.work import WORKS, Work

MOST_KILLS = 4
"""In one case."""
MOST_CONTINUATIONS = 5
"""After the last kill. One is enough for a run; a queue is added to, and then run."""


@dataclass(slots=True)
class Outcome:
    """What came of one case."""

    what: str
    kills: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class Killer:
    """Does the cases of one torture. `folder` is its own."""

    def __init__(self, folder: Path, warm: WarmProcess) -> None:
        self.folder, self.warm = folder, warm
        self.inputs = Inputs(folder / "inputs")

    def case(self, seed: int, name: str | None = None) -> Outcome:
        """`name`: of WORKS; drawn where it is left out."""
        random = Random(seed)
        drawn = random.choices(list(WORKS), [work.weight for work in WORKS.values()])[0]
        work = WORKS[name or drawn](self.inputs, random, self.warm)
        whole, broken = self.folder / f"{seed}-whole", self.folder / f"{seed}-broken"
        outcome = Outcome(f"{work}")
        try:
            trace = self.folder / f"{seed}-trace"
            unbroken = self._whole(work, whole, trace)
            if unbroken.code != 0:
                outcome.faults.append(f"without a break it ended with {unbroken.code}: {unbroken.last_words}")
                return outcome
            calls = traced(trace)
            self._broken(work, broken, random, calls, unbroken.seconds, outcome)
            steered = RunFolder(broken / "runs" / "mine")
            if not outcome.faults and steered.changes.exists():
                shutil.rmtree(whole)
                again = self._whole(work, whole, None, steered)
                outcome.faults += (
                    [f"with its changes it ended with {again.code}: {again.last_words}"] if again.code else []
                )
            outcome.faults += [] if outcome.faults else differences(broken, whole)
            temporary = self.warm.take_temporary_files()
            if self.warm.last and self.warm.last.code == 0:  # what a killed process has left, the next one deletes
                outcome.faults += [f"in the folder of temporary files: {name}" for name in temporary]
        finally:
            if not outcome.faults:
                for path in (whole, broken):
                    shutil.rmtree(path, ignore_errors=True)
            (self.folder / f"{seed}-trace").unlink(missing_ok=True)
        return outcome

    def _whole(self, work: Work, home: Path, trace: Path | None, steered: RunFolder | None = None) -> Ended:
        """Do the work without a break. `steered`: the broken run, which was asked for changes of settings; they determine it too."""
        work.prepare(home)
        if steered is None:
            return work.do(home, trace)
        run, prefs = RunFolder(home / "runs" / "mine"), steered.path.parents[1] / "prefs"
        run.path.mkdir()
        if prefs.exists():  # the reward file was allowed there
            shutil.copytree(prefs, home / "prefs")
        for source, target in ((steered.config, run.config), (steered.changes, run.changes)):
            shutil.copyfile(source, target)
        return self.warm.run("train", "--run", run.path, home=home)

    def _broken(
        self, work: Work, home: Path, random: Random, calls: list[Call], seconds: float, outcome: Outcome
    ) -> None:
        work.prepare(home)
        timer = self._steering(work, home, random, seconds)
        for _ in range(random.randint(1, MOST_KILLS)):
            kill = _moment(random, calls, seconds, is_certain=not outcome.kills)
            ended = work.go_on(
                home, kill if isinstance(kill, float) else None, kill if isinstance(kill, Blow) else None
            )
            if ended.code == -9:
                outcome.kills.append(str(kill))
            if ended.hung or ended.code not in (0, -9):
                outcome.faults.append(f"ended with {ended.code} after {outcome.kills}: {ended.last_words}")
            if ended.left and not work.leaves_processes:
                outcome.faults.append(f"left behind by {kill}: {ended.left}")
            if outcome.faults or work.is_done(home):
                break
        if timer is not None:
            timer.join()
        for _ in range(MOST_CONTINUATIONS):
            if outcome.faults or work.is_done(home):
                return
            ended = work.go_on(home, None, None)
            if ended.code != 0 or ended.hung or (ended.left and not work.leaves_processes):
                outcome.faults.append(f"going on ended with {ended.code}, {ended.left} left: {ended.last_words}")
        outcome.faults += [] if outcome.faults or work.is_done(home) else ["it does not come to its end"]

    def _steering(self, work: Work, home: Path, random: Random, seconds: float) -> threading.Timer | None:
        """Sometimes, a change of settings that comes at some moment of the run."""
        if not work.can_be_steered or random.random() > 0.25:
            return None
        asked = random.choice([{"learning_rate": 3e-4}, {"temperature": 1.1}, {"max_grad_norm": 0.1}, {"epsilon": 0.2}])
        run = RunFolder(home / "runs" / "mine")

        def ask() -> None:
            if run.config.exists() and not work.is_done(home):
                try:
                    request_change(run, asked)
                except UserError:
                    return

        timer = threading.Timer(random.random() * seconds, ask)
        timer.start()
        return timer


def _moment(random: Random, calls: list[Call], seconds: float, *, is_certain: bool) -> float | Blow:
    """When to kill: so many seconds after the start, or before or after a call. A call of the unbroken process is certain to come."""
    if not is_certain and random.random() < 0.4:
        return random.random() * seconds
    # The files first, since most calls write to the few large ones.
    path = random.choice(sorted({call.path for call in calls}))
    call = random.choice([call for call in calls if call.path == path])
    if not is_certain and random.random() < 0.5:
        call = Call(call.name, call.path)  # a process that goes on makes fewer
    return Blow(call, random.choice(["kill before", "kill after"]))


def main(count: int, seed: int) -> int:
    report = Report("kills")
    kills = 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, WarmProcess(Path(name)) as warm:
        killer = Killer(Path(name), warm)
        for case in range(seed, seed + count):
            outcome = killer.case(case)
            kills += len(outcome.kills)
            if outcome.faults:
                report.failed(case, f"{outcome.what}, killed {outcome.kills}", "\n".join(outcome.faults))
            else:
                report.passed()
    print(f"   {kills} kills in {report.cases} cases, {report.cases - report.failures} equal", flush=True)
    return report.failures
