"""Plans which rows go through the model together, on plain lists, for the fewest tokens with padding: sort by length
into buckets, merge neighbours where padding costs less than another pass (dynamic programming), split what exceeds the
limits, largest first, so that the allocator's cache serves the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Literal

LENGTH_BUCKET = 32  # tokens

PASS_OVERHEAD = 256  # cost of one more pass, in tokens


# prompts are read once in all, once per micro-batch, or once per row
PromptMode = Literal["prefilled", "per_micro_batch", "per_row"]


@dataclass(frozen=True, slots=True)
class RowLengths:
    """Index in the batch, group number, and lengths of prompt and completion in tokens."""

    index: int
    group: int
    prompt: int
    length: int


def plan_micro_batches(
    rows: Sequence[RowLengths],
    *,
    most_rows: int | None = None,
    token_budget: int | None = None,
    prompts: PromptMode = "per_micro_batch",
) -> list[list[int]]:
    """Row indices by micro-batch, largest first, each of at most `most_rows` rows and `token_budget` tokens with
    padding; a larger row goes alone."""
    shared = prompts != "per_row"
    # Prefilled for all micro-batches, a prompt costs none of them anything, wherever its rows are.
    if prompts == "prefilled":
        rows = [replace(row, prompt=0) for row in rows]
    # By group within a length, so that ties keep rows of one prompt together.
    by_length = sorted(rows, key=lambda row: (-_own_tokens(row, shared), row.group))
    buckets = [
        MicroBatchRows(shared, list(same))
        for _, same in groupby(by_length, key=lambda row: -(-_own_tokens(row, shared) // LENGTH_BUCKET))
    ]
    planned = [part for merged in _merge_buckets(buckets) for part in _split_to_limits(merged, most_rows, token_budget)]
    return [[row.index for row in part.rows] for part in sorted(planned, key=lambda part: -part.tokens)]


class MicroBatchRows:
    """Rows that go through the model together. `shared`: prompts are read once per group."""

    def __init__(self, shared: bool, rows: Sequence[RowLengths] = ()) -> None:
        self.shared = shared
        self.rows = list(rows)
        self.groups = {row.group for row in rows}
        self.longest = max((_own_tokens(row, shared) for row in rows), default=0)
        self.longest_prompt = max((row.prompt for row in rows), default=0)

    @property
    def tokens(self) -> int:
        # Two padded arrays where prompts are shared, [rows, longest] and [groups, longest prompt]; else one with whole
        # rows.
        completions = len(self.rows) * self.longest
        return completions + len(self.groups) * self.longest_prompt if self.shared else completions

    def tokens_with(self, row: RowLengths) -> int:
        completions = (len(self.rows) + 1) * max(self.longest, _own_tokens(row, self.shared))
        prompts = len(self.groups | {row.group}) * max(self.longest_prompt, row.prompt)
        return completions + prompts if self.shared else completions

    def add(self, row: RowLengths) -> None:
        self.rows.append(row)
        self.groups.add(row.group)
        self.longest = max(self.longest, _own_tokens(row, self.shared))
        self.longest_prompt = max(self.longest_prompt, row.prompt)

    def __add__(self, other: MicroBatchRows) -> MicroBatchRows:
        return MicroBatchRows(self.shared, self.rows + other.rows)


def _own_tokens(row: RowLengths, shared: bool) -> int:
    return row.length if shared else row.prompt + row.length


def _merge_buckets(buckets: list[MicroBatchRows]) -> list[MicroBatchRows]:
    """`cost[i]` is the least cost of buckets i…, `next_border[i]` the end of its first merged run."""
    borders = len(buckets)
    cost, next_border = [0.0] * (borders + 1), [borders] * (borders + 1)
    # At most a few dozen buckets (max_completion_length / LENGTH_BUCKET), so all O(n²) merged runs are tried.
    for start in reversed(range(borders)):
        options = []
        for end, merged in enumerate(accumulate(buckets[start:]), start + 1):
            options.append((merged.tokens + PASS_OVERHEAD + cost[end], end))
        # Ties by the nearer border, so the plan depends on the lengths alone.
        cost[start], next_border[start] = min(options)
    path = [0]
    while path[-1] < borders:
        path.append(next_border[path[-1]])
    return [sum(buckets[start + 1 : end], buckets[start]) for start, end in pairwise(path)]


def _split_to_limits(part: MicroBatchRows, most_rows: int | None, token_budget: int | None) -> list[MicroBatchRows]:
    parts = [MicroBatchRows(part.shared)]
    # First fit in the order of groups: a prompt is in two micro-batches only where a limit falls among its rows.
    for row in sorted(part.rows, key=lambda row: (row.group, row.index)):
        last = parts[-1]
        too_many = most_rows is not None and len(last.rows) == most_rows
        too_large = token_budget is not None and last.tokens_with(row) > token_budget
        if last.rows and (too_many or too_large):
            parts.append(MicroBatchRows(part.shared))
        parts[-1].add(row)
    return parts
