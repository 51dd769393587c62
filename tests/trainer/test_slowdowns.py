"""Low Power Mode and heat are read from what macOS prints, and noted when they begin and end."""

from __future__ import annotations

import sys

import pytest

from backend.trainer import machine
from backend.trainer.machine import (
    IS_COOL,
    IS_HOT,
    POWER_SETTINGS,
    THERMAL_LEVEL,
    SlowdownWatch,
    is_low_power,
    thermal_level,
)

LAPTOP = """System-wide power settings:
Currently in use:
 standby              1
 Sleep On Power Button 1
 hibernatefile        /var/vm/sleepimage
 powernap             1
 networkoversleep     0
 disksleep            10
 sleep                1 (sleep prevented by powerd, caffeinate)
 hibernatemode        3
 ttyskeepawake        1
 displaysleep         10
 tcpkeepalive         1
 lowpowermode         1
 womp                 0
"""
WITH_A_CHOICE_OF_THREE = LAPTOP.replace(" lowpowermode         1", " powermode            {}")
DESKTOP = "".join(line for line in LAPTOP.splitlines(keepends=True) if "lowpowermode" not in line)
LEVEL = "com.apple.system.thermalpressurelevel {}\n"


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (LAPTOP, True),
        (LAPTOP.replace("lowpowermode         1", "lowpowermode         0"), False),
        (WITH_A_CHOICE_OF_THREE.format(0), False),
        (WITH_A_CHOICE_OF_THREE.format(1), True),
        (WITH_A_CHOICE_OF_THREE.format(2), False),  # High Power
        (DESKTOP, None),
        ("", None),
    ],
)
def test_low_power_mode(printed: str, expected: bool | None) -> None:
    assert is_low_power(printed) is expected


@pytest.mark.parametrize(
    ("printed", "expected"), [(LEVEL.format(0), 0), (LEVEL.format(2), 2), ("notifyutil: failed\n", None), ("", None)]
)
def test_thermal_pressure(printed: str, expected: int | None) -> None:
    assert thermal_level(printed) == expected


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
