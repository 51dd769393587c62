"""Which texts nearly repeat an earlier one.

Two texts are nearly the same where their sets of shingles (runs of SHINGLE words) have a Jaccard similarity of at least NEAR: what both have
over what either has (Broder 1997, "On the resemblance and containment of documents"). Pairs are found by prefix filtering (Chaudhuri, Ganti and
Kaushik 2006, "A primitive operator for similarity joins in data cleaning"; Bayardo, Ma and Srikant 2007, "Scaling up all pairs similarity
search"): with all shingles in one order, the rarest first, two sets of similarity t share one among the first |x| − ⌈t·|x|⌉ + 1 of each. Where
as many are in one text alone, that text is like no other, which holds for most texts of most datasets. Nothing is drawn at random.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain, islice

SHINGLE = 3
"""Words of a shingle."""
NEAR = 0.8
"""Similarity from which a text counts as nearly the same. One word changed in twenty takes three shingles of eighteen: 0.71; in forty, 0.85."""
SHARED_ROWS = 20
"""Wording is told apart from what the texts say only among more texts than this: see `near_repeats`."""
COMPARISONS = 50
"""Most earlier texts that one is compared with. Only texts that resemble many others, and none enough, have as many; theirs may be missed."""

Words = tuple[str, ...]


def near_repeats(texts: Sequence[Words]) -> int:
    """How many of these different texts are nearly the same as an earlier one.

    Shingles that more than half of all texts have, an instruction before every question, are left out of account: with them, short questions
    after a long instruction would all be nearly the same.
    """
    sets = [_shingles(words) for words in texts]
    texts_with = Counter(chain.from_iterable(sets))
    most = max(SHARED_ROWS, len(texts) // 2)
    common = {shingle for shingle, count in texts_with.items() if count > most}
    shared = {shingle for shingle, count in texts_with.items() if 1 < count <= most}
    first_with: defaultdict[int, list[int]] = defaultdict(list)
    """Shingle → the texts, none nearly the same as another, that have it among their rarest."""
    found = 0
    for number, shingles in enumerate(sets):
        own = sets[number] = shingles - common if common else shingles
        own_shared = own & shared
        tried = len(own) - math.ceil(NEAR * len(own)) + 1 - (len(own) - len(own_shared))
        if tried <= 0:
            continue
        rarest = sorted(own_shared, key=lambda shingle: (texts_with[shingle], shingle))[:tried]
        candidates = dict.fromkeys(other for shingle in rarest for other in first_with[shingle][:COMPARISONS])
        if any(_are_near(own, sets[other]) for other in islice(candidates, COMPARISONS)):
            found += 1
            continue
        for shingle in rarest:
            first_with[shingle].append(number)
    return found


def _shingles(words: Words) -> set[int]:
    """All runs of SHINGLE words as their hashes, of 64 bits, which take half the memory; of a shorter text, all of its words as one."""
    if len(words) < SHINGLE:
        return {hash(words)}
    return set(map(hash, zip(*(words[start:] for start in range(SHINGLE)), strict=False)))


def _are_near(one: set[int], other: set[int]) -> bool:
    shared = len(one & other)
    return shared >= NEAR * (len(one) + len(other) - shared)
