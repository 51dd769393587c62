"""A few cases of each torture, with what they would find: the frame's own faults, and those of the runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.runs.run_folder import RunFolder
from tests.torture.equality import differences
from tests.torture.kills import Killer
from tests.torture.preload import WORKS_HERE, Blow, Call, traced
from tests.torture.syscalls import Case, Syscalls
from tests.torture.warm import ROOT, WarmProcess

pytestmark = pytest.mark.skipif(not WORKS_HERE, reason="preloads a library of glibc's names, and forks")


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmProcess]:
    with WarmProcess(tmp_path_factory.mktemp("warm"), compiles=False) as process:
        yield process


@pytest.fixture(scope="module")
def syscalls(warm: WarmProcess, tmp_path_factory: pytest.TempPathFactory) -> Syscalls:
    return Syscalls(tmp_path_factory.mktemp("syscalls"), warm, ("adapters",))


def test_a_run_that_was_killed_equals_one_that_was_not(warm: WarmProcess, tmp_path: Path) -> None:
    outcome = Killer(tmp_path, warm).case(198, "run")
    assert outcome.kills
    assert not outcome.faults


def test_every_call_is_a_case_and_has_its_number(syscalls: Syscalls) -> None:
    numbered = {syscalls.numbered(number) for number in range(len(syscalls.cases))}
    assert numbered == set(syscalls.cases)
    names = {case.blow.call.name for case in numbered}
    assert {"open", "write", "copy", "fsync", "rename", "mkdir", "unlink", "rmdir"} <= names
    files = {case.blow.call.path for case in numbered}
    assert "runs/mine/.grpo-studio-fused/new/model.safetensors" in files  # written by mlx itself


@pytest.mark.parametrize(
    ("call", "action"),
    [
        (Call("write", "runs/mine/checkpoints/.000002/optimizer.safetensors"), "EIO"),
        pytest.param(Call("rename", "runs/mine/checkpoints/000002"), "kill before", marks=pytest.mark.proof),
        # The model is in LM Studio, and the run does not know it yet.
        pytest.param(
            Call("rmdir", ".lmstudio/.grpo-studio-tortured/reference"), "kill before", marks=pytest.mark.proof
        ),
    ],
    ids=str,
)
def test_a_call_that_fails_costs_nothing(call: Call, action: str, syscalls: Syscalls) -> None:
    case = next(case for case in syscalls.cases if case.blow == Blow(call, action))
    assert not syscalls.try_case(case)


def test_the_homes_of_two_runs_differ_by_a_byte_a_file_or_an_event(syscalls: Syscalls, tmp_path: Path) -> None:
    """The comparison that everything rests on sees each kind of damage."""
    whole, home = syscalls.folder / "whole adapters", tmp_path / "home"
    run = RunFolder(home / "runs" / "mine")

    def fresh() -> None:
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(whole, home)

    fresh()
    weights = run.checkpoints / "000002" / "adapters.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert differences(home, whole) == [
        f"differs: runs/mine/checkpoints/000002/adapters.safetensors at byte {len(content) - 1:,} of {len(content):,} and {len(content):,}"
    ]
    fresh()
    (run.checkpoints / ".000003").mkdir()
    run.completions.unlink()
    assert differences(home, whole) == [
        "only after the kills: runs/mine/checkpoints/.000003",
        "missing after the kills: runs/mine/completions.jsonl",
    ]
    for damage in (b'{"kind":"step","step":2,"seq":99,"metrics":{}}\n', b'{"half'):
        fresh()
        with run.events.open("ab") as event_log:
            event_log.write(damage)
        assert len(differences(home, whole)) == 1


OUTLIVED = """
import ctypes, os, subprocess
from pathlib import Path
from tests.torture import warm

ctypes.CDLL(None).prctl(36, 1)
warm.ORPHANS_MAY_TAKE_S = 0.3
pid = os.fork()
if not pid:
    subprocess.Popen(["sleep", "77"], start_new_session=True)
    subprocess.Popen(["sleep", "0.05"])
    os.kill(os.getpid(), 9)
print(warm._wait(pid, None, Path("nothing")))
"""


def test_a_process_that_outlives_its_trainer_is_seen_and_ended() -> None:
    ended = subprocess.run([sys.executable, "-c", OUTLIVED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "code=-9" in ended.stdout
    assert "left=['sleep 77']" in ended.stdout


def test_a_trace_counts_calls_by_name_and_file(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("write\ta\nwrite\tb\nwrite\ta\nfsync\ta\n")
    assert traced(tmp_path / "trace") == [
        Call("write", "a"),
        Call("write", "b"),
        Call("write", "a", 2),
        Call("fsync", "a"),
    ]
    assert Case("run", Blow(Call("write", "a"), "EIO"), follows_a_save=False)
