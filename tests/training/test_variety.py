"""How varied a step's completions are, from token ids: shares of distinct completions and of repeated n-grams."""

from __future__ import annotations

import pytest

from backend.training.variety import NGRAM, distinct_ngrams, repetition, variety_metrics
from backend.types import Completion, Group, Problem


def group(*completions: list[int], masks: tuple[list[int], ...] = ()) -> Group:
    problem = Problem(0, "", [], [1], "")
    made = [Completion(tokens, [0.0] * len(tokens), "", "eos") for tokens in completions]
    for completion, mask in zip(made, masks, strict=False):
        completion.mask = mask
    return Group(problem, made)


def test_distinct_completions_are_counted_within_each_group() -> None:
    same, different = group([1, 2], [1, 2], [1, 2], [1, 2]), group([1, 2], [1], [2], [1, 2])
    assert variety_metrics([same])["completions/distinct_fraction"] == 0.25
    assert variety_metrics([same, different])["completions/distinct_fraction"] == pytest.approx((0.25 + 0.75) / 2)
    assert variety_metrics([group([1]), group([1])])["completions/distinct_fraction"] == 1.0


def test_distinct_n_counts_the_different_ngrams_of_a_group_over_its_tokens() -> None:
    """By hand: (1 2 3) and (1 2 4) have 4 different tokens and the bigrams 12, 23, 24; 6 tokens in all."""
    metrics = variety_metrics([group([1, 2, 3], [1, 2, 4])])
    assert metrics["completions/distinct_1"] == pytest.approx(4 / 6)
    assert metrics["completions/distinct_2"] == pytest.approx(3 / 6)
    assert distinct_ngrams([[1], [2]], 2) == distinct_ngrams([[], []], 1) == 0  # no bigram reaches into the next one


def test_repetition_is_the_share_of_ngrams_that_stood_before() -> None:
    once = list(range(20))
    assert repetition(once) == 0.0
    assert repetition(once + once) == pytest.approx((20 - NGRAM + 1) / (40 - NGRAM + 1))
    assert repetition([7] * 40) == pytest.approx(1 - 1 / (40 - NGRAM + 1))
    assert repetition([7] * NGRAM) == repetition([]) == 0.0


def test_tokens_that_the_policy_did_not_produce_do_not_count() -> None:
    other = group([1, 9, 2], [1, 8, 2], masks=([1, 0, 1], [1, 0, 1]))
    assert variety_metrics([other])["completions/distinct_fraction"] == 0.5
