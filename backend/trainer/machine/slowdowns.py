"""Notes about what slows a Mac down: Low Power Mode, and heat.

macOS tells both without administrator rights. `notifyutil -g com.apple.system.thermalpressurelevel` prints the level that powermetrics
shows: 0 nominal, 1 moderate, 2 heavy, 3 trapping, 4 sleeping (libkern/OSThermalNotification.h). `pmset -g therm` would be the documented
way and reports nothing on Apple silicon. `pmset -g` prints the power settings in use, `lowpowermode 1` or, where there is a choice of three,
`powermode 1`. Does nothing on other systems.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from backend.utils.system_command import printed_by

EVERY_S = 60.0
"""Least seconds between two looks; one takes about 20 ms."""

THERMAL_LEVEL = ("/usr/bin/notifyutil", "-g", "com.apple.system.thermalpressurelevel")
POWER_SETTINGS = ("/usr/bin/pmset", "-g")

HOT = 2
"""Level of thermal pressure from which macOS slows the machine down markedly; a sustained load alone reaches 1."""

IS_HOT = "macOS slows the machine down because it is hot: steps take longer. Air, a cooler room or a stand help."
IS_COOL = "The machine has cooled down; macOS no longer slows it."
LOW_POWER = (
    "Low Power Mode is on: macOS slows the machine down, and steps take longer. System Settings, Battery, turns it off."
)
FULL_POWER = "Low Power Mode is off."


def thermal_level(printed: str) -> int | None:
    """The level that THERMAL_LEVEL printed; None where it is none."""
    found = re.match(r"com\.apple\.system\.thermalpressurelevel\s+(\d+)\s*$", printed)
    return int(found[1]) if found else None


def is_low_power(printed: str) -> bool | None:
    """Whether POWER_SETTINGS printed that Low Power Mode is in use; None where it says nothing of it, as on a desktop Mac."""
    values = re.findall(r"^\s*(?:lowpowermode|powermode)\s+(\d+)\s*$", printed, re.MULTILINE)
    return "1" in values if values else None


@dataclass(slots=True)
class SlowdownWatch:
    """`look` between two steps: calls `note` with a sentence when the machine was slowed down, and when that is over."""

    note: Callable[[str], None]
    _next: float = 0.0
    _is_hot: bool = False
    _is_low_power: bool = False

    def look(self) -> None:
        if sys.platform != "darwin" or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + EVERY_S
        level, low_power = thermal_level(printed_by(THERMAL_LEVEL)), is_low_power(printed_by(POWER_SETTINGS))
        # Cool only at 0: between 1 and 2 the level goes to and fro under a steady load.
        if level is not None and (level == 0 if self._is_hot else level >= HOT):
            self._is_hot = not self._is_hot
            self.note(IS_HOT if self._is_hot else IS_COOL)
        if low_power is not None and low_power != self._is_low_power:
            self._is_low_power = low_power
            self.note(LOW_POWER if low_power else FULL_POWER)
