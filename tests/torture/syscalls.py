"""Every system call with which runs change files fails in turn: no space, a broken disk, a short write, a kill before it and after it.

Two runs are traced, one with adapters and one of every weight: from their first file over two saves, of which the second replaces the first, to the
exports at the end. Then each call of theirs is failed in a run of its own. What has to hold is said in `_faults_of`; in the end the run is
resumed, on a disk that is well again, and has to equal the one that nothing disturbed.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from backend.runs.checkpoints import checkpoint
from backend.runs.events import first_and_last_events, has_finished
from backend.runs.run_folder import RunFolder
from tests.support.small_run import write_config
from tests.torture.drawn_settings import Inputs
from tests.torture.equality import differences
from tests.torture.preload import ACTIONS, WITH_DATA, Blow, Call, traced
from tests.torture.report import Report
from tests.torture.warm import Ended, WarmProcess

SETTINGS: dict[str, dict[str, Any]] = {
    "adapters": {"train_type": "lora", "lora_keys": ["self_attn.q_proj"], "num_layers": 1, "fuse": True},
    "every weight": {"train_type": "full", "optimizer": "sgd", "steps_per_eval": 2, "val_batches": 1},
}
COMMON = {"iters": 2, "save_every": 1, "keep_checkpoints": 1, "lm_studio_name": "tortured"}

FIRST_ONLY = ("control.taken", "change.taken")
"""Files that the trainer asks for again and again, as often as its time allows: the first question stands for all."""


@dataclass(frozen=True, slots=True)
class Case:
    """One call of one of the runs, and what happens to it."""

    run: str
    blow: Blow
    follows_a_save: bool
    """Whether a checkpoint was complete by then."""

    def __str__(self) -> str:
        return f"{self.blow}, {self.run}"


class Syscalls:
    """The traced runs, and every case that they give."""

    def __init__(self, folder: Path, warm: WarmProcess, names: tuple[str, ...] = tuple(SETTINGS)) -> None:
        self.folder, self.warm = folder, warm
        inputs = Inputs(folder / "inputs")
        self.raw = {name: inputs.settings(**COMMON, **SETTINGS[name]) for name in names}
        # What both runs do alike, their beginning for instance, is tried once.
        cases = {case.blow: case for name in reversed(names) for case in self._traced(name)}
        self.cases = sorted(cases.values(), key=str)

    def numbered(self, number: int) -> Case:
        """Case `number`; neighbours are far apart, and the first len(cases) numbers are every case once."""
        count = len(self.cases)
        stride = next(step for step in range(int(count * 0.618) or 1, 2 * count) if math.gcd(step, count) == 1)
        return self.cases[number * stride % count]

    def _traced(self, name: str) -> list[Case]:
        home, trace = self._home(name, "whole"), self.folder / f"trace {name}"
        ended = self.warm.run("train", home / "config.yaml", home=home, trace=trace)
        assert ended.code == 0, ended.last_words
        calls = traced(trace)
        saved = calls.index(Call("rename", "runs/mine/checkpoints/000001"))
        return [
            Case(name, Blow(call, action), follows_a_save=at > saved)
            for at, call in enumerate(calls)
            for action in ACTIONS
            if (action != "short write" or call.name in WITH_DATA)
            and (call.occurrence == 1 or not call.path.endswith(FIRST_ONLY))
        ]

    def _home(self, name: str, what: str) -> Path:
        home = self.folder / f"{what} {name}"
        (home / ".lmstudio" / "models").mkdir(parents=True)
        (home / "runs").mkdir()
        write_config(home / "config.yaml", self.raw[name])
        return home

    def try_case(self, case: Case) -> list[str]:
        """What is wrong after it; [] where all is as it has to be."""
        home = self._home(case.run, "broken")
        try:
            ended = self.warm.run("train", home / "config.yaml", home=home, blow=case.blow)
            return self._faults_of(case, home, ended) or self._faults_resumed(case, home)
        finally:
            shutil.rmtree(home)
            self.warm.take_temporary_files()

    def _faults_of(self, case: Case, home: Path, ended: Ended) -> list[str]:
        """What must hold at once: exit code 2 with a sentence, its ending in the event log, and every weight that was complete is whole."""
        run, blow = RunFolder(home / "runs" / "mine"), case.blow
        told = ended.output + (run.events.read_text(errors="replace") if run.events.exists() else "")
        told += run.log.read_text(errors="replace") if run.log.exists() else ""
        # 0 after a kill: it never came, for how often an event log is written depends on the time that things take.
        allowed = (-9, 0) if blow.action.startswith("kill") else (0, 2)
        faults: list[str] = []
        if ended.hung or ended.left:
            faults.append(f"hung: {ended.hung}, left behind: {ended.left}")
        if ended.code not in allowed:
            faults.append(f"ended with {ended.code}: {ended.last_words}")
        if "Traceback (most recent" in told:
            faults.append(f"a traceback: {_traceback(told)}")
        if ended.code == 2 and not ended.output.strip():
            faults.append("it said nothing")
        if (
            ended.code == 2
            and run.has_event_log
            and blow.action != "full disk"
            and not blow.call.path.endswith(run.events.name)
        ):
            last = first_and_last_events(run.events)[1]
            if not last or last[-1]["kind"] != "failed":
                faults.append(f"the event log has no ending but {last[-1] if last else None}")
        return faults + _unreadable(run, case.follows_a_save)

    def _faults_resumed(self, case: Case, home: Path) -> list[str]:
        run = RunFolder(home / "runs" / "mine")
        for _ in range(2):  # a run that failed before it had settings begins again
            if not has_finished(run):
                verb = ["resume", run.path] if run.config.exists() else ["train", home / "config.yaml"]
                ended = self.warm.run(*verb, home=home)
                if ended.code != 0 or ended.left:
                    return [f"{verb[0]} ended with {ended.code}: {ended.last_words}"]
        # A finished run that LM Studio refused tells so in a note, and is exported by hand; that clears what could not be deleted, too.
        lm_studio, export = home / ".lmstudio", ["export", "mine", "--overwrite"]
        for command, model, staging in (
            (
                [*export, "--to", "lmstudio", "--name", "tortured"],
                lm_studio / "models" / "grpo-studio" / "tortured",
                lm_studio,
            ),
            ([*export, "--to", "folder"], run.fused if self.raw[case.run]["fuse"] else run.path, run.path),
        ):
            if not model.exists() or any(staging.glob(".grpo-studio-*")):
                ended = self.warm.run(*command, home=home)
                if ended.code != 0:
                    return [f"export ended with {ended.code}: {ended.last_words}"]
        whole = self.folder / f"whole {case.run}"
        return differences(home, whole, may_have_saved_more=not case.blow.action.startswith("kill"))


def _traceback(text: str) -> str:
    """The first traceback of a text, without its middle."""
    lines = text[text.index("Traceback (most recent") :].splitlines()
    end = next((i for i, line in enumerate(lines[1:], 1) if not line.startswith(" ")), len(lines) - 1)
    return "\n".join(line[:300] for line in lines[max(0, end - 6) : end + 1])


def _unreadable(run: RunFolder, has_saved: bool) -> list[str]:
    """Weights that a reader finds and cannot read."""
    faults: list[str] = []
    checkpoints = checkpoint.all_checkpoints(run)
    if has_saved and not checkpoints:
        faults.append("no checkpoint is left")
    files = [file for saved in checkpoints for file in saved.path.glob("*.safetensors")]
    shown = (run.adapters / "adapters.safetensors", run.model / "model.safetensors", run.fused / "model.safetensors")
    for file in [*files, *(path for path in shown if path.exists())]:
        try:
            mx.eval(mx.load(str(file)))
        except RuntimeError as error:
            faults.append(f"{file.relative_to(run.path)} cannot be read: {error}")
    for file in (run.adapters / "adapter_config.json", run.model / "config.json", run.fused / "config.json"):
        if file.exists():
            try:
                json.loads(file.read_text(encoding="utf-8"))
            except ValueError:
                faults.append(f"{file.relative_to(run.path)} is no JSON")
    return faults


def main(count: int, seed: int) -> int:
    report = Report("syscalls")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, WarmProcess(Path(name)) as warm:
        syscalls = Syscalls(Path(name), warm)
        calls = len({case.blow.call for case in syscalls.cases})
        print(f"   {calls} calls and {len(ACTIONS)} actions are {len(syscalls.cases)} cases", flush=True)
        for number in range(seed, seed + (count or len(syscalls.cases))):
            case = syscalls.numbered(number)
            if faults := syscalls.try_case(case):
                report.failed(number, str(case), "\n".join(faults))
            else:
                report.passed()
    return report.failures
