"""The order in which a run takes its prompts: seeded, reshuffled every epoch, resumed from one number.

Neither reads nor tokenises a row: `problems` makes each problem when it is taken.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from backend.data.row_views import INDEX
from backend.types import Problem


class PromptStream:
    """Rows in a seeded order, reshuffled each epoch. `cursor` counts the rows consumed; it, and the `first` of these rows where others
    came before them, are the only state to save.

    A row whose prompt leaves no room for the completion (None) is skipped when its turn comes, so the order does not
    depend on which rows those are, and no row need be tokenised before its turn. At least one row must be a problem.
    """

    def __init__(self, problems: Sequence[Problem | None], seed: int, cursor: int = 0) -> None:
        self.problems = problems
        self.seed = seed
        self.cursor = cursor
        self.first = 0
        """The cursor at which these rows began: 0, unless an earlier stage of the run had others."""
        self._epoch, self._order = -1, array(INDEX)

    @property
    def epoch(self) -> float:
        """Passes over the dataset so far, the current one as a fraction."""
        return (self.cursor - self.first) / len(self.problems)

    def go_on_with(self, problems: Sequence[Problem | None], *, are_same_rows: bool) -> None:
        """Take `problems` from now on: of the same rows in the order that they have, of others from the beginning of their own."""
        if not are_same_rows:
            self.first = self.cursor
        self.problems = problems
        self._epoch, self._order = -1, []

    def take(self, count: int) -> list[Problem]:
        """The next `count` problems; every problem comes once an epoch."""
        problems: list[Problem] = []
        while len(problems) < count:
            if (problem := self._next()) is not None:
                problems.append(problem)
        return problems

    def _next(self) -> Problem | None:
        epoch, position = divmod(self.cursor - self.first, len(self.problems))
        if epoch != self._epoch:
            # Seeded by the epoch's number, not by one generator for all epochs: a resumed run then shuffles as the first process did.
            self._epoch, self._order = epoch, shuffled(len(self.problems), random.Random(f"{self.seed} {epoch}"))
        self.cursor += 1
        return self.problems[self._order[position]]


def shuffled(count: int, generator: random.Random) -> array[int]:
    """The numbers below `count` in the order of `generator.sample(range(count), count)`, in four bytes each: as a list of Python's numbers the
    order of some million rows would take more memory than the rows of a step."""
    left = array(INDEX, range(count))
    order = array(INDEX, bytes(left.itemsize * count))
    for i in range(count):
        # As `sample` draws: one of those that are left, whose place the last of them takes.
        j = generator.randrange(count - i)
        order[i] = left[j]
        left[j] = left[count - i - 1]
    return order
