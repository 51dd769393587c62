"""distinct-n: how varied texts are in their wording. Of a group's completions it is a metric, of a dataset's prompts a figure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def distinct_ngrams(group: Sequence[Sequence[Hashable]], n: int) -> float:
    """distinct-n (Li et al. 2016, arXiv:1510.03055, section 5.2) of a group: its different n-grams of tokens, or words, over all of them.

    0 to 1. It falls with length, since long texts use words again, so only texts of about one length compare. 0 without tokens.
    """
    tokens = sum(map(len, group))
    if not tokens:
        return 0.0
    # Shifted copies zipped: the tuples are made in C. No n-gram reaches from one text into the next.
    different: set[tuple[Hashable, ...]] = set()
    for ids in group:
        different.update(zip(*(ids[start:] for start in range(n)), strict=False))
    return len(different) / tokens
