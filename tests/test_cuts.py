"""Micro-batches cost as few tokens as they can, keep to their limits, and lose no row."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.cuts import CLASS, LAUNCH, Part, Row, cut


def rows(prompt: int, *lengths: int, groups: int = 1) -> list[Row]:
    return [Row(i, i * groups // len(lengths), prompt, length) for i, length in enumerate(lengths)]


def costs(parts: list[list[int]], of: list[Row], shared: bool = True) -> list[int]:
    return [Part(shared, [of[place] for place in part]).tokens for part in parts]


def test_completions_of_like_length_stay_together() -> None:
    assert cut(rows(10, *[100] * 8, groups=2)) == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_a_few_long_completions_do_not_pad_the_short_ones() -> None:
    """Eight rows of 500 would be 4,000 tokens; parted they are 500 and 140."""
    many = rows(10, 500, *[20] * 7)
    parts = cut(many)
    assert parts == [[0], [1, 2, 3, 4, 5, 6, 7]]
    assert costs(parts, many) == [510, 150]


def test_a_long_prompt_is_not_read_twice_to_save_less_padding() -> None:
    assert len(cut(rows(4000, 500, *[20] * 7))) == 1
    assert len(cut(rows(4000, 500, *[20] * 7), prompts="repeated")) == 2  # which is read for every row anyway


def test_a_limit_keeps_the_rows_of_a_prompt_together() -> None:
    assert cut(rows(50, *[64] * 8, groups=4), most_rows=4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cut(rows(50, *[64] * 4, groups=2), token_budget=2 * 64 + 50) == [[0, 1], [2, 3]]
    assert cut(rows(50, *[64] * 4, groups=2), token_budget=1) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("shared", [True, False])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=7),
    prompt=st.sampled_from([1, 60, 900]),
    groups=st.integers(1, 3),
)
def test_no_cut_by_length_is_cheaper(lengths: list[int], prompt: int, groups: int, shared: bool) -> None:
    """Against every way of parting the classes of like length."""
    many = rows(prompt, *lengths, groups=groups)
    mine = sum(cost + LAUNCH for cost in costs(cut(many, prompts="shared" if shared else "repeated"), many, shared))
    size = {row.place: row.length + (0 if shared else row.prompt) for row in many}
    falling = sorted(many, key=lambda row: -size[row.place])
    steps = [
        i for i in range(1, len(many)) if -(-size[falling[i].place] // CLASS) != -(-size[falling[i - 1].place] // CLASS)
    ]
    for count in range(len(steps) + 1):
        for chosen in combinations(steps, count):
            borders = [0, *chosen, len(many)]
            other = [falling[a:b] for a, b in pairwise(borders)]
            assert mine <= sum(Part(shared, part).tokens + LAUNCH for part in other)
