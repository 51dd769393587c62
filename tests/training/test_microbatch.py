"""Micro-batches cost as few tokens as possible, keep to their limits, and lose no row."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.training.microbatch import (
    LENGTH_BUCKET,
    PASS_OVERHEAD,
    MicroBatchRows,
    PromptMode,
    RowLengths,
    plan_micro_batches,
)


def rows(prompt: int, *lengths: int, groups: int = 1) -> list[RowLengths]:
    return [RowLengths(i, i * groups // len(lengths), prompt, length) for i, length in enumerate(lengths)]


def costs(parts: list[list[int]], of: list[RowLengths], shared: bool = True) -> list[int]:
    return [MicroBatchRows(shared, [of[index] for index in part]).tokens for part in parts]


MODES: list[PromptMode] = ["prefilled", "per_micro_batch", "per_row"]


@pytest.mark.parametrize("prompts", MODES)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300)), min_size=1, max_size=12),
    budget=st.integers(1, 1500),
    most_rows=st.none() | st.integers(1, 5),
)
def test_no_row_is_lost_and_limits_are_kept(
    prompts: PromptMode, sizes: list[tuple[int, int]], budget: int, most_rows: int | None
) -> None:
    many = [RowLengths(i, group, 100 * group + 1, length) for i, (group, length) in enumerate(sizes)]
    parts = plan_micro_batches(many, most_rows=most_rows, token_budget=budget, prompts=prompts)
    assert sorted(index for part in parts for index in part) == list(range(len(many)))
    counted = [RowLengths(row.index, row.group, 0, row.length) for row in many] if prompts == "prefilled" else many
    tokens = costs(parts, counted, prompts != "per_row")
    assert all(size <= budget or len(part) == 1 for size, part in zip(tokens, parts, strict=True))
    assert all(most_rows is None or len(part) <= most_rows for part in parts)
    assert tokens == sorted(tokens, reverse=True), "the one that needs most memory first"


@pytest.mark.parametrize("shared", [True, False])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=7),
    prompt=st.sampled_from([1, 60, 900]),
    groups=st.integers(1, 3),
)
def test_the_plan_is_the_cheapest_split_by_length(lengths: list[int], prompt: int, groups: int, shared: bool) -> None:
    """Compared with every split of the rows sorted by length."""
    many = rows(prompt, *lengths, groups=groups)
    planned = sum(
        cost + PASS_OVERHEAD
        for cost in costs(plan_micro_batches(many, prompts="per_micro_batch" if shared else "per_row"), many, shared)
    )
    size = {row.index: row.length + (0 if shared else row.prompt) for row in many}
    falling = sorted(many, key=lambda row: -size[row.index])
    steps = [
        i
        for i in range(1, len(many))
        if -(-size[falling[i].index] // LENGTH_BUCKET) != -(-size[falling[i - 1].index] // LENGTH_BUCKET)
    ]
    for count in range(len(steps) + 1):
        for chosen in combinations(steps, count):
            borders = [0, *chosen, len(many)]
            split = [falling[a:b] for a, b in pairwise(borders)]
            assert planned <= sum(MicroBatchRows(shared, part).tokens + PASS_OVERHEAD for part in split)
