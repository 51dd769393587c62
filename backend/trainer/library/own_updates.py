"""An optimizer and a schedule of the program, in place of those that the settings name (docs/library.md).

The settings of such a run say `optimizer: own` or `lr_schedule: own`, and in words what stands for it. A resume compares the words: with
another optimizer or another schedule the run would not be the one that it began as.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlx.optimizers import Optimizer

from backend.config.config import Config
from backend.config.updates import OWN
from backend.rewards.runner.error_text import class_name, describe_error
from backend.trainer.library.own_optimizer import ProgramOptimizer, described, is_of_mlx, keeps_rate, maker, try_out
from backend.trainer.run_context import Engine
from backend.training.optimizers import OwnUpdates, rate_of
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.text import quote

# A schedule that is a function of the program: update → learning rate.

SETTING = "schedule"
LONGEST = 200
"""Characters of the words for a schedule."""
_SAMPLES = (0, 1, 10, 100, 1_000, 10_000)
"""Updates whose rates stand in the words, as far as the run has them."""


@dataclass(frozen=True, slots=True)
class OwnSchedule:
    """Learning rates by a program's function. A call raises UserError for what is no learning rate, and for what the function raises."""

    function: Callable[[int], Any]

    @classmethod
    def of(cls, given: Any) -> OwnSchedule:
        if not callable(given):
            sentence = f"A schedule is called with the number of an update, from 0, and gives its learning rate; {class_name(given)} is not."
            raise UserError(SETTING, sentence)
        return cls(given)

    @property
    def name(self) -> str:
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        name: Any = getattr(function, "__name__", "") or type(function).__name__
        return "lambda" if name == "<lambda>" else quote(name, 40)

    def __call__(self, update: int) -> float:
        try:
            given = self.function(update)
        except Exception as error:
            what = describe_error(error, None, 90)
            raise UserError(SETTING, f"{self.name} raised {what} for update {update:,}.") from error
        try:
            rate = float(given)
        except (TypeError, ValueError, OverflowError):
            rate = math.nan
        if not 0 <= rate < math.inf:
            sentence = f"{self.name} gave {quote(given, 40)} for update {update:,}; a learning rate is a finite number from 0 up."
            raise UserError(SETTING, sentence)
        return rate

    def described(self, updates: int) -> str:
        """Its name and some rates of a run of so many updates, as in “half_life: 0.0001, 9.9e-05 at updates 0, 1”. Raises UserError for one
        that gives another rate when it is asked again: a resumed run would not repeat it."""
        asked = [update for update in _SAMPLES if update < max(updates, 1)]
        rates = [self(update) for update in asked]
        again = [self(update) for update in reversed(asked)][::-1]
        if (
            differs := next((at for at, *pair in zip(asked, rates, again, strict=True) if pair[0] != pair[1]), None)
        ) is not None:
            sentence = f"{self.name} gives another rate when it is asked for update {differs:,} again; it may depend on the update alone."
            raise UserError(SETTING, sentence)
        listed = ", ".join(f"{rate:g}" for rate in rates)
        return quote(
            f"{self.name}: {listed} at {'update' if len(asked) == 1 else 'updates'} {', '.join(map(str, asked))}",
            LONGEST,
        )


# ── own updates ──────────────────────────────────────────────────────────────────────────────────────────────────────

_WORDS = 55
"""Characters of each of two descriptions in one sentence."""


class GivenUpdates:
    """What a program passed as `optimizer` and `schedule`, checked and tried out. `config`: the settings of the run.

    Raises UserError for what cannot train, cannot be saved, or contradicts itself.
    """

    def __init__(self, optimizer: Any, schedule: Any, config: Config) -> None:
        self._schedule = None if schedule is None else OwnSchedule.of(schedule)
        self._make = None if optimizer is None else maker(optimizer)
        self._sample = None if self._make is None else self._make(config.learning_rate)
        self._has_own_rate = isinstance(optimizer, Optimizer)
        self._keeps_rate = self._sample is not None and keeps_rate(self._sample)
        if self._keeps_rate and self._schedule is not None:
            what = "several learning rates, none, or a schedule inside"
            raise UserError(
                "schedule", f"The optimizer has {what}, so a schedule beside it would set nothing; give one of the two."
            )
        if self._make is not None:
            try_out(self._make)

    def settings(self, config: Config) -> dict[str, Any]:
        """What the run's settings say of it: raw settings that take the place of the program's other ones."""
        raw: dict[str, Any] = {}
        if self._sample is not None:
            raw |= {"optimizer": OWN, "own_optimizer": described(self._sample)}
            if self._has_own_rate and not self._keeps_rate:
                raw["learning_rate"] = float(f"{rate_of(self._sample):.7g}")  # float32 has no more digits
        if self._keeps_rate:
            raw |= {"lr_schedule": OWN, "own_schedule": "the optimizer"}
        elif self._schedule is not None:
            raw |= {"lr_schedule": OWN, "own_schedule": self._schedule.described(_updates(config))}
        return raw

    def require_those_of(self, config: Config) -> None:
        """Raise UserError unless a run with these settings was trained with this optimizer and this schedule."""
        now = self.settings(config)
        pairs = (("optimizer", "optimizer", "own_optimizer"), ("schedule", "lr_schedule", "own_schedule"))
        faults = [fault for argument, key, words in pairs if (fault := _unlike(argument, key, words, config, now))]
        if not faults and (rate := now.get("learning_rate", config.learning_rate)) != config.learning_rate:
            asked = f"the optimizer given has {rate:g}; to change it: changes={{'learning_rate': {rate:g}}}"
            faults.append(
                ConfigProblem(
                    "optimizer", f"The run began with the learning rate {config.learning_rate:g}, and {asked}."
                )
            )
        if faults:
            raise UserError(faults)

    def engine(self) -> Engine:
        make = self._make
        program = None if make is None else lambda rate: ProgramOptimizer(make(rate))
        compiles = self._sample is None or is_of_mlx(self._sample)
        return Engine(OwnUpdates(program, self._schedule, self._keeps_rate, compiles))


def _updates(config: Config) -> int:
    """Of the run as it began; 0 where rows or stages decide it."""
    return 0 if config.epochs or config.stages else config.iters * config.updates_per_step


def _unlike(argument: str, key: str, words: str, config: Config, now: Mapping[str, Any]) -> ConfigProblem | None:
    """`argument` of `resume` stands for the setting `key`, which the setting `words` describes."""
    before = getattr(config, words) if getattr(config, key) == OWN else ""
    given = now.get(words, "")
    if before == given:
        return None
    if not given:
        sentence = f"The run was trained with {quote(before, 80)} of a program; give it again: backend.resume(run, {argument}=…)."
    elif not before:
        sentence = f"The run was trained with {getattr(config, key)}, by its settings; an object takes its place from a run's beginning on."
    else:
        sentence = f"The run was trained with {quote(before, _WORDS)}, and given is {quote(given, _WORDS)}; only the same goes on exactly."
    return ConfigProblem(argument, sentence)
