"""A schedule that is a function of the program: update → learning rate."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backend.rewards.runner.error_text import class_name, describe_error
from backend.spec.faults import Mistake
from backend.spec.user_input.text import shown

SETTING = "schedule"
LONGEST = 200
"""Characters of the words for a schedule."""
_SAMPLES = (0, 1, 10, 100, 1_000, 10_000)
"""Updates whose rates stand in the words, as far as the run has them."""


@dataclass(frozen=True, slots=True)
class OwnSchedule:
    """Learning rates by a program's function. A call raises Mistake for what is no learning rate, and for what the function raises."""

    function: Callable[[int], Any]

    @classmethod
    def of(cls, given: Any) -> OwnSchedule:
        if not callable(given):
            sentence = f"A schedule is called with the number of an update, from 0, and gives its learning rate; {class_name(given)} is not."
            raise Mistake(SETTING, sentence)
        return cls(given)

    @property
    def name(self) -> str:
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        name: Any = getattr(function, "__name__", "") or type(function).__name__
        return "lambda" if name == "<lambda>" else shown(name, 40)

    def __call__(self, update: int) -> float:
        try:
            given = self.function(update)
        except Exception as error:
            what = describe_error(error, None, 90)
            raise Mistake(SETTING, f"{self.name} raised {what} for update {update:,}.") from error
        try:
            rate = float(given)
        except (TypeError, ValueError, OverflowError):
            rate = math.nan
        if not 0 <= rate < math.inf:
            sentence = f"{self.name} gave {shown(given, 40)} for update {update:,}; a learning rate is a finite number from 0 up."
            raise Mistake(SETTING, sentence)
        return rate

    def described(self, updates: int) -> str:
        """Its name and some rates of a run of so many updates, as in “half_life: 0.0001, 9.9e-05 at updates 0, 1”. Raises Mistake for one
        that gives another rate when it is asked again: a resumed run would not repeat it."""
        asked = [update for update in _SAMPLES if update < max(updates, 1)]
        rates = [self(update) for update in asked]
        again = [self(update) for update in reversed(asked)][::-1]
        if (
            differs := next((at for at, *pair in zip(asked, rates, again, strict=True) if pair[0] != pair[1]), None)
        ) is not None:
            sentence = f"{self.name} gives another rate when it is asked for update {differs:,} again; it may depend on the update alone."
            raise Mistake(SETTING, sentence)
        listed = ", ".join(f"{rate:g}" for rate in rates)
        return shown(
            f"{self.name}: {listed} at {'update' if len(asked) == 1 else 'updates'} {', '.join(map(str, asked))}",
            LONGEST,
        )
