"""Diversity of a step's completions, from token ids: within a group and within a completion."""

import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from backend.types import Completion, Group

NGRAM = 8  # shorter repeats are normal text


def variety_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Diversity from 0 to 1, means over the groups: distinct completions (`distinct_fraction`), completions equal to
    another (`identical_fraction`), `distinct_1` and `_2`; over the completions `repetition`."""
    ids = [[_ids(completion) for completion in group.completions] for group in groups]
    counts = [Counter(map(tuple, group)) for group in ids]
    sizes = [len(group) for group in ids]
    identical = [sum(count for count in copies.values() if count > 1) for copies in counts]
    return {
        "completions/distinct_fraction": _mean_share(map(len, counts), sizes),
        "completions/identical_fraction": _mean_share(identical, sizes),
        "completions/distinct_1": statistics.fmean(distinct_ngrams(group, 1) for group in ids),
        "completions/distinct_2": statistics.fmean(distinct_ngrams(group, 2) for group in ids),
        "completions/repetition": statistics.fmean(repetition(tokens) for group in ids for tokens in group),
    }


def _mean_share(parts: Iterable[int], wholes: Sequence[int]) -> float:
    return statistics.fmean(part / whole for part, whole in zip(parts, wholes, strict=True))


def repetition(tokens: Sequence[int]) -> float:
    """Fraction of NGRAM-grams that occurred earlier in the completion; 0 with fewer than two."""
    ngrams = len(tokens) - NGRAM + 1
    if ngrams < 2:
        return 0.0
    # Shifted copies zipped: the tuples are made in C, at 0.1 µs each.
    return 1 - len(set(zip(*(tokens[start:] for start in range(NGRAM)), strict=False))) / ngrams


def _ids(completion: Completion) -> Sequence[int]:
    if not completion.mask:
        return completion.tokens
    return [token for token, is_own in zip(completion.tokens, completion.mask, strict=True) if is_own]


def distinct_ngrams(group: Sequence[Sequence[Hashable]], n: int) -> float:
    """Distinct n-grams over all tokens of a group (arXiv:1510.03055, section 5.2); falls with length."""
    tokens = sum(map(len, group))
    if not tokens:
        return 0.0
    # Shifted copies zipped: the tuples are made in C. No n-gram reaches from one text into the next.
    different: set[tuple[Hashable, ...]] = set()
    for ids in group:
        different.update(zip(*(ids[start:] for start in range(n)), strict=False))
    return len(different) / tokens
