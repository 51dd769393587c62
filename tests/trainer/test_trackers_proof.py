"""Whatever happens to a tracker, real packages and a real machine: its run has the same event log, weights and exit code, the user reads a sentence
about it, and no process stays. `python -m pytest -m proof -s tests/trainer/test_trackers_proof.py`; about a quarter of an hour on two cores.

Needs Linux; root for the full disks, `unshare` for the missing network; wandb and trackio where they are installed.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from backend.runs.run_folder import RunFolder
from backend.trainer.trackers.targets import TRACKERS
from backend.utils.command import backend_environment
from tests.support import small_run
from tests.support.tracked_runs import assert_same_but_for_the_tracker, events_of

pytestmark = [pytest.mark.proof, pytest.mark.skipif(sys.platform != "linux", reason="tmpfs, unshare and /proc")]

SLOWLY = """
import time
from backend.rewards import register_reward_function

@register_reward_function("low_half")
def low_half(prompts, completions, answer, types=None, completion_ids=None):
    time.sleep(0.1)
    return [sum(token < 160 for token in ids) / len(ids) for ids in completion_ids]
"""
STEPS = 100
"""Of at least 0.1 s: long enough for a tracker to be on its way before the run is over."""
LEAVES_S = 300
"""Seconds in which every process of a tracker has to end after its run: one that gets no answer ends itself after 120."""

Harm = Callable[[RunFolder, str], None]


@dataclass(frozen=True)
class Case:
    """What happens to a tracker, and whether the user has to read of it."""

    name: str
    prefix: tuple[str, ...] = ()
    """Before the command of the run."""
    environment: dict[str, str] = field(default_factory=dict)
    harm: Harm = lambda run, tracker: None
    is_told: bool = False
    only: tuple[str, ...] = tuple(TRACKERS)
    package: str = ""
    """Source of a package in place of the tracker's own."""
    fills: bool = False
    """Whether the file system of what it writes is full."""


def process_of(run: RunFolder, tracker: str) -> psutil.Process:
    """The tracker's process, as soon as there is one."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if str(run.path) in words and tracker in words and "backend.trainer.trackers.process" in words:
                return process
        time.sleep(0.02)
    raise TimeoutError(f"{tracker} was never started")


def signalled(number: signal.Signals) -> Harm:
    def harm(run: RunFolder, tracker: str) -> None:
        process = process_of(run, tracker)
        time.sleep(random.uniform(0, 6))
        process.send_signal(number)

    return harm


FAKE = """
import os, time
class Settings:
    def __init__(self, **settings): pass
class Table:
    def __init__(self, columns, data): pass
def init(**arguments):
    {at_start}
    return Run()
class Run:
    count = 0
    def log(self, metrics, step):
        Run.count += 1
        {in_the_middle}
    def finish(self, exit_code=0):
        {at_the_end}
"""


def fake(**parts: str) -> str:
    return FAKE.format(**{"at_start": "pass", "in_the_middle": "pass", "at_the_end": "pass"} | parts)


CASES = [
    Case("is left alone"),
    Case("is killed", harm=signalled(signal.SIGKILL), is_told=True),
    Case("is terminated", harm=signalled(signal.SIGTERM), is_told=True),
    Case("is stopped", harm=signalled(signal.SIGSTOP)),
    Case("has no network", prefix=("unshare", "--net"), environment={"WANDB_MODE": "offline"}),
    Case("should upload and has no network", prefix=("unshare", "--net"), only=("wandb",), is_told=True,
         environment={"WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40}),
    Case("has a full disk", fills=True, is_told=True, only=("tensorboard", "trackio", "wandb")),
    Case("raises at the start", package=fake(at_start="raise OSError('no')"), is_told=True, only=("wandb",)),
    Case("raises in the middle", package=fake(in_the_middle="if Run.count == 5: raise OSError('no')"), is_told=True, only=("wandb",)),
    Case("raises at the end", package=fake(at_the_end="raise OSError('no')"), is_told=True, only=("wandb",)),
    Case("exits in the middle", package=fake(in_the_middle="os._exit(7)"), is_told=True, only=("wandb",)),
    Case("never ends", package=fake(at_the_end="time.sleep(10000)"), is_told=True, only=("wandb",)),
    Case("never takes a step", package=fake(in_the_middle="time.sleep(10000)"), is_told=True, only=("wandb",)),
]  # fmt: skip


def settings(place: Path, **changes: object) -> dict[str, object]:
    (place / "rewards.py").write_text(SLOWLY)
    own = {"reward_functions": ["low_half"], "reward_weights": [], "reward_functions_file": str(place / "rewards.py")}
    return small_run.settings_for(place, iters=STEPS, save_every=STEPS // 2, **own, **changes)


def train(run: RunFolder, raw: dict[str, object], case: Case, tracker: str = "", **environment: str) -> int:
    """Train in a process of its own, with what happens to the tracker meanwhile. → its exit code."""
    run.path.mkdir(parents=True, exist_ok=True)
    small_run.prepare(run, raw)
    everything = dict(os.environ) | {"NICE": "0"} | case.environment | environment
    command = [*case.prefix, sys.executable, "-m", "backend", "train", "--run", str(run.path)]
    with (run.path.parent / f"{run.name}.out").open("wb") as out:
        trainer = subprocess.Popen(command, env=backend_environment(everything), stdout=out, stderr=out)
    if tracker:
        case.harm(run, tracker)
    return trainer.wait(300)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tracked")


@pytest.fixture(scope="module")
def alone(place: Path) -> RunFolder:
    """The run without a tracker."""
    run = RunFolder(place / "runs" / "alone")
    assert train(run, settings(place), Case("")) == 0, (run.path.parent / "alone.out").read_text()
    return run


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """A file system of a few pages there."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def left(run: RunFolder) -> list[str]:
    """The command lines of processes that have to do with the run: by an argument, or working in its folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words, folder = process.cmdline(), process.cwd()
            if process.status() != psutil.STATUS_ZOMBIE and (str(run.path) in " ".join([*words, folder])):
                found.append(" ".join(words))
    return found


@pytest.mark.parametrize(
    ("case", "tracker"), [pytest.param(case, name, id=f"{name} {case.name}") for case in CASES for name in case.only]
)
def test_a_run_does_not_notice_what_happens_to_its_tracker(
    place: Path, alone: RunFolder, tmp_path: Path, case: Case, tracker: str
) -> None:
    if not case.package:
        pytest.importorskip(TRACKERS[tracker].package or "csv")
    if case.prefix and shutil.which(case.prefix[0]) is None:
        pytest.skip(f"there is no {case.prefix[0]} on this machine")
    if (case.fills or case.prefix) and os.getuid():
        pytest.skip("only root may do this")
    run = RunFolder(tmp_path / "runs" / "tracked")
    folders = {"TRACKIO_DIR": tmp_path / "trackio", "WANDB": tmp_path / "prefs" / "wandb", "RUN": run.trackers}
    environment = {"TRACKIO_DIR": str(folders["TRACKIO_DIR"]), "GRPO_STUDIO_PREFS": str(tmp_path / "prefs")}
    if case.package:
        (tmp_path / "packages" / "wandb").mkdir(parents=True)
        (tmp_path / "packages" / "wandb" / "__init__.py").write_text(case.package)
        environment["PYTHONPATH"] = str(tmp_path / "packages")
    written = {"trackio": folders["TRACKIO_DIR"], "wandb": folders["WANDB"]}.get(tracker, folders["RUN"])
    with full_disk(written) if case.fills else contextlib.nullcontext():
        code = train(run, settings(place, report_to=[tracker]), case, tracker, **environment)
        until = time.monotonic() + LEAVES_S
        while left(run) and time.monotonic() < until:
            time.sleep(0.5)
        stayed = left(run)
    assert code == 0, (run.path.parent / "tracked.out").read_text()
    assert not stayed
    assert_same_but_for_the_tracker(run, alone, tracker)
    notes = [event["sentence"] for event in events_of(run) if event["kind"] == "note"]
    lines = run.log.read_text().splitlines() if run.log.exists() else []
    told = [text for text in [*notes, *lines] if tracker in text and "writes of this run" not in text]
    print(f"\n{tracker} {case.name}: {told[0] if told else 'nothing to tell'}")
    assert bool(told) == case.is_told and all(len(text) <= 200 for text in notes)
