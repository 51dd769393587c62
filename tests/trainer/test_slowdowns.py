"""Low Power Mode and heat are read from what macOS prints, and noted when they begin and end."""

from __future__ import annotations

import sys

import pytest

from backend.trainer import machine
from backend.trainer.machine import IS_COOL, IS_HOT, POWER_SETTINGS, THERMAL_LEVEL, SlowdownWatch

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
