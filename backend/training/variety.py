"""How varied a step's completions are: different from one another within a group, and within themselves. From token ids alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from backend.types import Completion, Group

NGRAM = 8
"""Tokens of the n-grams whose repeats are counted. Shorter ones recur in sound text: names, formulas, tags. A text that turns in a
circle repeats them all, however long the circle."""


def variety_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`completions/distinct_fraction` and `completions/repetition`, both shares from 0 to 1.

    The first is the share of distinct completions of a group, mean over the groups: 1/G where all G are the same. The second is
    `repetition` of a completion, mean over all.
    """
    ids = [[_ids(completion) for completion in group.completions] for group in groups]
    return {
        "completions/distinct_fraction": statistics.fmean(len(set(map(tuple, group))) / len(group) for group in ids),
        "completions/repetition": statistics.fmean(repetition(tokens) for group in ids for tokens in group),
    }


def repetition(tokens: Sequence[int]) -> float:
    """The share of the NGRAM-grams that stood in the completion before, 0 to 1; 0 for one with fewer than two of them."""
    ngrams = len(tokens) - NGRAM + 1
    if ngrams < 2:
        return 0.0
    # Shifted copies zipped: the tuples are made in C, at 0.1 µs each.
    return 1 - len(set(zip(*(tokens[start:] for start in range(NGRAM)), strict=False))) / ngrams


def _ids(completion: Completion) -> Sequence[int]:
    """The tokens that the policy produced."""
    if not completion.mask:
        return completion.tokens
    return [token for token, is_own in zip(completion.tokens, completion.mask, strict=True) if is_own]
