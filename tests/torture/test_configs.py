"""A sample of `python -m tests.torture configs`, and that the harness sees what it is for. Both in one process of their own: the harness forks, and
the threads that mlx has in a process of earlier tests would be missing in the fork; most of its time goes into its imports."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.torture.warm import ROOT

BOTH = """
import json, sys, time
from pathlib import Path
from tests.torture import configs

failures = configs.main(80, 0)

def broken(case, place, is_repeated):
    number = len(list(place.root.glob("tried-*")))
    (place.root / f"tried-{number}").touch()
    if number == 1:
        raise RecursionError("deep")
    if number == 2:
        (place.root / "cwd" / "stray").touch()
    while number == 3:
        time.monotonic()
    return "A sentence."

configs.try_case, configs.SECONDS = broken, 0.2
told = configs.forked_cases(range(4), configs.make_place(Path(sys.argv[1])))
print(json.dumps([failures, [result["failure"] for result in told]]))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int, list[str]]:
    """What the sample printed, how many of its cases failed, and the failures of the four cases that are broken on purpose."""
    command = [sys.executable, "-c", BOTH, str(tmp_path_factory.mktemp("broken"))]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout + child.stderr
    printed, _, last = child.stdout.rstrip().rpartition("\n")
    failures, broken = json.loads(last)
    return printed, failures, broken


def test_a_sample_of_hostile_configurations(told: tuple[str, int, list[str]]) -> None:
    printed, failures, _ = told
    assert failures == 0 and "slowest case" in printed, printed


def test_a_traceback_a_hang_and_a_stray_file_are_seen(told: tuple[str, int, list[str]]) -> None:
    sound, traceback, stray, hang = told[2]
    assert sound == ""
    assert "RecursionError: deep" in traceback and "stray" in stray
    assert "hang" in hang or "hung" in hang  # by its processor time, or on a busy machine by the clock
