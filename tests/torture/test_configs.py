"""A sample of `python -m tests.torture configs`, and that the harness sees what it is for. Both in a process of their own: the harness forks, and
the threads that mlx has in a process of earlier tests would be missing in the fork."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.torture.warm import ROOT


def done(*arguments: str) -> str:
    """What Python prints. Raises AssertionError where it fails."""
    child = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout + child.stderr
    return child.stdout


def test_a_sample_of_hostile_configurations() -> None:
    assert "configs" in done("-m", "tests.torture", "configs", "--count", "80", "--seed", "0")


BROKEN = """
import json, sys, time
from pathlib import Path
from tests.torture import configs

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

configs._load()
configs.try_case, configs.SECONDS = broken, 0.2
told = configs.forked_cases(range(4), configs.make_place(Path(sys.argv[1])))
print(json.dumps([result["failure"] for result in told]))
"""


def test_a_traceback_a_hang_and_a_stray_file_are_seen(tmp_path: Path) -> None:
    sound, traceback, stray, hang = json.loads(done("-c", BROKEN, str(tmp_path)))
    assert sound == ""
    assert "RecursionError: deep" in traceback and "stray" in stray
    assert "hang" in hang or "hung" in hang  # by its processor time, or on a busy machine by the clock
