"""The shipped reward function that compares the completions of one prompt with each other."""

from __future__ import annotations

import re
from collections import defaultdict

from backend.rewards.registry import Scores, Texts, Types, register_reward_function, require

LONGEST_NGRAM = 20
MOST_WORDS = 4000  # words of a completion that are compared: every pair of a group is
_WORD = re.compile(r"\w+|[^\w\s]")

Ngrams = frozenset[tuple[str, ...]]


@register_reward_function("diversity", label="Diversity")
def diversity(prompts: Texts, completions: Texts, answer: Texts, types: Types = None, *, ngram_size: int = 2) -> Scores:
    """How little a completion resembles the others of its prompt: 1.0 with no n-gram in common, 0.0 where all are the
    same.

    1 minus the mean, over the other completions of the prompt, of the Jaccard similarity of their sets of
    `ngram_size` words or signs, without case. None for a prompt with one completion. An empty completion resembles
    other empty ones alone; of a huge one the first 4000 words are read.
    """
    require(1 <= ngram_size <= LONGEST_NGRAM, f"ngram_size must be from 1 to {LONGEST_NGRAM}, not {ngram_size}")
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, key in enumerate(zip(prompts, answer, strict=True)):
        groups[key].append(index)
    scores: list[float | None] = [None] * len(completions)
    for members in groups.values():
        if len(members) < 2:
            continue
        sets = [_ngrams(completions[index], ngram_size) for index in members]
        similarity = [0.0] * len(sets)
        for i, first in enumerate(sets):
            for j in range(i):
                common = len(first & sets[j])
                union = len(first) + len(sets[j]) - common
                shared = common / union if union else 1.0
                similarity[i] += shared
                similarity[j] += shared
        for index, total in zip(members, similarity, strict=True):
            scores[index] = 1.0 - total / (len(sets) - 1)
    return scores


def _ngrams(text: str, size: int) -> Ngrams:
    # A pattern that finds word after word: of a huge text no more than these are looked for.
    words = [found[0].casefold() for found, _ in zip(_WORD.finditer(text), range(MOST_WORDS), strict=False)]
    if len(words) < size:
        return frozenset({tuple(words)} if words else ())
    return frozenset(tuple(words[start : start + size]) for start in range(len(words) - size + 1))
