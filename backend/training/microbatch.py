"""How a step is cut into micro-batches: which rows go through the model together. Plain lists; no arrays, no model.

Padding costs as much as real tokens, and a prompt may be read once for all of its rows that go together. So rows of like length
belong together, and rows of one prompt do too; what is cheaper is counted, in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Literal

CLASS = 32
"""Completions whose lengths round up to the same multiple of it are never parted for their length."""

LAUNCH = 256
"""What one more forward and backward pass costs by itself, in tokens: below it a device is not kept busy."""


PromptUse = Literal["apart", "shared", "repeated"]
"""How prompts are read: once, before all micro-batches; in every micro-batch once for its rows; or for every row."""


@dataclass(frozen=True, slots=True)
class RowLengths:
    """A completion: its place in the batch, the number of its group, tokens of its prompt and of itself."""

    place: int
    group: int
    prompt: int
    length: int


def plan_micro_batches(
    rows: Sequence[RowLengths],
    *,
    most_rows: int | None = None,
    token_budget: int | None = None,
    prompts: PromptUse = "shared",
) -> list[list[int]]:
    """Places by micro-batch, the one that needs most memory first.

    Each has at most `most_rows` rows and `token_budget` tokens, padding counted; a row larger than the budget stands alone.
    """
    shared = prompts != "repeated"
    if prompts == "apart":
        rows = [replace(row, prompt=0) for row in rows]
    falling = sorted(rows, key=lambda row: (-_size(row, shared), row.group))
    classes = [
        MicroBatchRows(shared, list(same))
        for _, same in groupby(falling, key=lambda row: -(-_size(row, shared) // CLASS))
    ]
    parts = [part for merged in _merged(classes) for part in _fitted(merged, most_rows, token_budget)]
    return [[row.place for row in part.rows] for part in sorted(parts, key=lambda part: -part.tokens)]


class MicroBatchRows:
    """Rows that go together, and what they cost."""

    def __init__(self, shared: bool, rows: Sequence[RowLengths] = ()) -> None:
        self.shared = shared
        self.rows = list(rows)
        self.groups = {row.group for row in rows}
        self.longest = max((_size(row, shared) for row in rows), default=0)
        self.prompt = max((row.prompt for row in rows), default=0)

    @property
    def tokens(self) -> int:
        """What goes through the model, padding included."""
        completions = len(self.rows) * self.longest
        return completions + len(self.groups) * self.prompt if self.shared else completions

    def tokens_with(self, row: RowLengths) -> int:
        completions = (len(self.rows) + 1) * max(self.longest, _size(row, self.shared))
        prompts = len(self.groups | {row.group}) * max(self.prompt, row.prompt)
        return completions + prompts if self.shared else completions

    def add(self, row: RowLengths) -> None:
        self.rows.append(row)
        self.groups.add(row.group)
        self.longest, self.prompt = max(self.longest, _size(row, self.shared)), max(self.prompt, row.prompt)

    def __add__(self, other: MicroBatchRows) -> MicroBatchRows:
        return MicroBatchRows(self.shared, self.rows + other.rows)


def _size(row: RowLengths, shared: bool) -> int:
    """Tokens that this row alone adds."""
    return row.length if shared else row.prompt + row.length


def _merged(classes: list[MicroBatchRows]) -> list[MicroBatchRows]:
    """Neighbouring classes put together wherever that costs less than reading their prompts, and launching, once more: the
    cheapest of all ways, found from the back (a shortest path over the borders between classes)."""
    borders = len(classes)
    cost, following = [0.0] * (borders + 1), [borders] * (borders + 1)
    for start in reversed(range(borders)):
        ways = []
        for end, together in enumerate(accumulate(classes[start:]), start + 1):
            ways.append((together.tokens + LAUNCH + cost[end], end))
        cost[start], following[start] = min(ways)
    path = [0]
    while path[-1] < borders:
        path.append(following[path[-1]])
    return [sum(classes[start + 1 : end], classes[start]) for start, end in pairwise(path)]


def _fitted(part: MicroBatchRows, most_rows: int | None, token_budget: int | None) -> list[MicroBatchRows]:
    """Cut where a limit asks for it, group after group, so that few prompts are read twice."""
    parts = [MicroBatchRows(part.shared)]
    for row in sorted(part.rows, key=lambda row: (row.group, row.place)):
        last = parts[-1]
        too_many = most_rows is not None and len(last.rows) == most_rows
        too_large = token_budget is not None and last.tokens_with(row) > token_budget
        if last.rows and (too_many or too_large):
            parts.append(MicroBatchRows(part.shared))
        parts[-1].add(row)
    return parts
