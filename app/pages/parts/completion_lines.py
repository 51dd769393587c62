"""The lines of the completions table: those of a step under their prompts, or any of a run's, read when they are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import numpy as np

from app.model.completions.facts import CompletionFacts, listed_completions
from app.model.completions.filters import Query, select, sort
from app.widgets.completions.completion_model import CompletionLine, lines_of_row

_KEPT_LINES = 512
"""Lines kept once read: a table asks for each of the visible ones a hundred times a repaint."""


def step_lines(
    placed_rows: Sequence[tuple[int, Mapping[str, Any]]],
    query: Query,
    order: tuple[str, bool],
    largest: dict[str, float] | None,
) -> list[CompletionLine]:
    """The lines of a step's rows, (offset, row): each prompt with what the query leaves of its completions, sorted within the group by
    (column, descending); a prompt of which it leaves nothing is left out. `largest` as in `select`."""
    facts = CompletionFacts()
    for offset, row in placed_rows:
        facts.append(row, offset)
    numbers = select(facts, query, largest)
    if order[0]:
        numbers = sort(facts, numbers, order[0], descending=order[1])
    of_row = facts.column("row")[numbers]
    lines: list[CompletionLine] = []
    for group, (offset, row) in enumerate(placed_rows):
        prompt, *completions = lines_of_row(group, row, offset)
        chosen = facts.column("place")[numbers[of_row == group]].tolist()
        if chosen or not completions:
            lines += [prompt, *(completions[place] for place in chosen)]
    return lines


class RunLines(Sequence[CompletionLine]):
    """Completions of a run by their numbers among `facts`; `read_row` reads the row at an offset."""

    def __init__(
        self, facts: CompletionFacts, numbers: np.ndarray, read_row: Callable[[int], Mapping[str, Any] | None]
    ) -> None:
        self.numbers = numbers
        self._offsets = facts.per_completion("offset")[numbers]
        self._places = facts.column("place")[numbers]
        self._read_row = read_row
        self._lines: dict[int, CompletionLine] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> CompletionLine: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[CompletionLine]: ...
    def __getitem__(self, index: int | slice) -> CompletionLine | Sequence[CompletionLine]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if index not in range(-len(self), len(self)):
            raise IndexError(index)
        if index not in self._lines:
            if len(self._lines) >= _KEPT_LINES:
                self._lines.clear()
            self._lines[index] = self._read(index)
        return self._lines[index]

    def place(self, index: int) -> tuple[int, int]:
        """(offset of its row, place in it) of a line, without reading it."""
        return int(self._offsets[index]), int(self._places[index])

    def begins_with(self, other: Sequence[CompletionLine]) -> bool:
        """Whether these lines are `other` and perhaps more."""
        return (
            isinstance(other, RunLines)
            and np.array_equal(self._offsets[: len(other)], other._offsets)
            and (np.array_equal(self._places[: len(other)], other._places))
        )

    def _read(self, index: int) -> CompletionLine:
        offset, place = self.place(index)
        row = self._read_row(offset) or {}
        completions = listed_completions(row)
        # {}: the file was cut back since, and is about to be read again.
        return CompletionLine(0, row, completions[place] if place < len(completions) else {}, offset, place)
