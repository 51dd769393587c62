"""A Mac is kept awake while a run works and not a moment longer, and heat is noted when it begins and ends.

The caffeinate here is a script that behaves like Apple's: it ends with the process that -w names.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.trainer import machine
from backend.trainer.machine import IS_COOL, IS_HOT, POWER_SETTINGS, THERMAL_LEVEL, SlowdownWatch
from tests.support import small_run

SCRIPT = """#!/bin/sh
echo "$$ $*" >> "$0.started"
while kill -0 "$3" 2>/dev/null; do sleep 0.02; done
"""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Mac with this caffeinate; the file that it writes a line to as it starts: its pid and its arguments."""
    program = tmp_path / "bin" / "caffeinate"
    program.parent.mkdir()
    program.write_text(SCRIPT)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setattr(machine, "sys", SimpleNamespace(platform="darwin"))
    return program.with_name("caffeinate.started")


def calls(started: Path) -> list[tuple[int, str]]:
    lines = started.read_text().splitlines() if started.exists() else []
    return [(int(pid), arguments) for pid, _, arguments in (line.partition(" ") for line in lines)]


def is_alive(pid: int) -> bool:
    return subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()[
        :1
    ] not in ("", "Z")


def until(condition: Callable[[], Any]) -> bool:
    for _ in range(250):
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_a_killed_trainer_leaves_no_mac_awake(started: Path) -> None:
    code = (
        "import sys, time\n"
        "from backend.trainer.machine import KeepAwake\n"
        "sys.platform = 'darwin'\n"
        "KeepAwake(print).start()\n"
        "time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code])
    assert until(lambda: calls(started))
    ((pid, arguments),) = calls(started)
    assert arguments == f"-is -w {child.pid}" and is_alive(pid)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert until(lambda: not is_alive(pid))


def test_a_run_holds_it_while_it_works_and_not_in_a_pause(tmp_path: Path, run: RunFolder, started: Path) -> None:
    alive: dict[str, list[bool]] = {}

    def echo(event: dict[str, Any]) -> None:
        pids = [pid for pid, _ in calls(started)]
        if event["kind"] == "step":
            assert until(lambda: len(calls(started)) == (1 if event["step"] == 1 else 2))
            alive[f"step {event['step']}"] = [is_alive(pid) for pid, _ in calls(started)]
            if event["step"] == 1:
                run.say("pause")
        elif event.get("phase") == "paused":
            alive["paused"] = [is_alive(pid) for pid in pids]
            run.say("resume")

    assert small_run.train_here(small_run.settings_for(tmp_path, iters=2), run, echo).kind == "finished"
    assert alive == {"step 1": [True], "paused": [False], "step 2": [False, True]}
    assert not any(is_alive(pid) for pid, _ in calls(started))
    assert not [event for event in read_events(run.events) if event.get("level") == "warning"]


DESKTOP = "System-wide power settings:\nCurrently in use:\n sleep                1\n"
LEVEL = "com.apple.system.thermalpressurelevel {}\n"


class Mac:
    """What the two commands print, one reading after the other, a minute apart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.level, self.settings, self.reads = 1000.0, 0, DESKTOP, 0
        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.setattr(machine.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(machine, "printed_by", self.printed)

    def printed(self, command: tuple[str, ...]) -> str:
        self.reads += 1
        return {THERMAL_LEVEL: LEVEL.format(self.level), POWER_SETTINGS: self.settings}[command]


def test_heat_is_noted_as_it_comes_and_as_it_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    mac, notes = Mac(monkeypatch), []
    watch = SlowdownWatch(notes.append)
    seen: list[list[str]] = []
    for level in (0, 1, 2, 3, 1, 2, 1, 0, 0):
        mac.level, mac.now = level, mac.now + 61
        watch.look()
        seen.append(list(notes))
        notes.clear()
    assert seen == [[], [], [IS_HOT], [], [], [], [], [IS_COOL], []]
