"""Shipped reward functions that judge the text of a completion: thoughts in their tags, JSON, a regular expression, a
word, and what it repeats. No text makes them slow: each passes over it a fixed number of times, and a regular
expression has a time limit.

Length rewards count the sampled tokens, with the end of the sequence and, as in TRL, the results of tools. Their limit
is the run's `max_completion_length` by default. They return None where the sampled tokens are not known."""

import json
import math
import re
import sys
from collections import defaultdict
from itertools import islice
from typing import Any

import regex

from backend.rewards.functions.math_equality import answer_part, correct
from backend.rewards.registry import Ids, Scores, Texts, Types, register_reward_function, require
from backend.utils.text import excess

MATCH_S = 0.1  # a pattern's search of one completion: `(a|aa)+$` can backtrack for years, and `re` has no timeout
CACHE_SHARE = 0.2  # DAPO's ratio: a buffer of 4096 tokens before a limit of 20480 (arXiv:2503.14476)
LONGEST_NGRAM = 100  # tokens
MOST_WORDS_OF_AN_NGRAM = 20
MOST_WORDS = 4000  # words of a completion that are compared: every pair of a group is
_WORD = re.compile(r"\w+|[^\w\s]")


@register_reward_function("think_format_reward", label="Think Format")
def think_format_reward(prompts: Texts, completions: Texts, answer: Texts, types: Types = None) -> Scores:
    """1.0 when the completion opens with `<think>`, once, and closes it; what follows is free. As TRL's function of
    this name, but that white space before the tag is free."""
    scores: list[float | None] = []
    for text in completions:
        before, _, rest = text.lstrip().partition("<think>")
        scores.append(float(not before and "<think>" not in rest and "</think>" in rest))
    return scores


@register_reward_function("valid_json", label="Valid JSON")
def valid_json(prompts: Texts, completions: Texts, answer: Texts, types: Types = None) -> Scores:
    """1.0 when the answer is a JSON object, 0.5 when it is any other JSON, else 0.0. A Markdown fence around it is
    taken off. NaN, Infinity and nesting too deep for Python to read are no JSON."""
    scores: list[float | None] = []
    for text in map(answer_part, completions):
        if text.startswith("```") and text.endswith("```") and "\n" in text:
            text = text.partition("\n")[2].removesuffix("```").strip()
        try:
            # Numbers stay text: turning one of a million digits into a number takes long, and Python refuses to. `int`
            # refuses NaN and Infinity.
            value = json.loads(text, parse_int=str, parse_float=str, parse_constant=int)
            scores.append(1.0 if isinstance(value, dict) else 0.5)
        except (ValueError, RecursionError):
            scores.append(0.0)
    return scores


@register_reward_function("regex_match", label="Regex Match")
def regex_match(prompts: Texts, completions: Texts, answer: Texts, types: Types = None, *, pattern: str) -> Scores:
    """1.0 when the regular expression `pattern` is found anywhere in the completion, else 0.0. A search that takes over
    0.1 s is given up and scores 0."""
    require("\b" not in pattern, r'pattern holds a backspace: write r"\b", not "\b", for the edge of a word')
    require(not excess(pattern), excess(pattern).removesuffix("."))
    try:
        compiled = regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"pattern is not a regular expression: {error}") from None
    scores: list[float | None] = []
    for text in completions:
        try:
            scores.append(float(compiled.search(text, timeout=MATCH_S) is not None))
        except TimeoutError:
            scores.append(0.0)
    return scores


@register_reward_function("keyword", label="Keyword")
def keyword(
    prompts: Texts, completions: Texts, answer: Texts, types: Types = None, *, word: str, case: bool = False
) -> Scores:
    """1.0 when the completion contains `word`, else 0.0. Anywhere, also inside a longer word; with `case`, capital and
    small letters count as different."""
    require(bool(word), "word must not be empty, for every text contains that")
    needle = word if case else word.casefold()
    return [float(needle in (text if case else text.casefold())) for text in completions]


@register_reward_function("diversity", label="Diversity")
def diversity(prompts: Texts, completions: Texts, answer: Texts, types: Types = None, *, ngram_size: int = 2) -> Scores:
    """How little a completion resembles the others of its prompt: 1.0 with no n-gram in common, 0.0 where all are the
    same. 1 minus the mean Jaccard similarity of their sets of `ngram_size` words or signs, without case. None for a
    prompt with one completion."""
    most = MOST_WORDS_OF_AN_NGRAM
    require(1 <= ngram_size <= most, f"ngram_size must be from 1 to {most}, not {ngram_size}")
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, key in enumerate(zip(prompts, answer, strict=True)):
        groups[key].append(index)
    scores: list[float | None] = [None] * len(completions)
    for members in groups.values():
        if len(members) < 2:
            continue
        sets: list[set[tuple[str, ...]]] = []
        for index in members:
            # A pattern that finds word after word: of a huge text no more than these are looked for.
            words = [found[0].casefold() for found in islice(_WORD.finditer(completions[index]), MOST_WORDS)]
            starts = range(max(len(words) - ngram_size + 1, min(len(words), 1)))
            sets.append({tuple(words[start : start + ngram_size]) for start in starts})
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


@register_reward_function("repetition_penalty_reward", label="Repetition Penalty")
def repetition_penalty_reward(
    prompts: Texts,
    completions: Texts,
    answer: Texts,
    types: Types = None,
    *,
    completion_ids: Ids = None,
    ngram_size: int = 3,
    max_penalty: float = -1.0,
) -> Scores:
    """`max_penalty` times the share of n-grams that repeat an earlier one: 0.0 without repetition. n-grams are runs of
    `ngram_size` token ids, as in TRL's function of this name (arXiv:2502.03373, appendix C.2)."""
    require(1 <= ngram_size <= LONGEST_NGRAM, f"ngram_size must be from 1 to {LONGEST_NGRAM}, not {ngram_size}")
    require(max_penalty <= 0, f"max_penalty must not be above 0, as {max_penalty:g} is")
    scores: list[float | None] = []
    for ids in known_ids(completions, completion_ids):
        count = max(len(ids or ()) - ngram_size + 1, 0)
        distinct = len({tuple(ids[start : start + ngram_size]) for start in range(count)}) if ids else 0
        # Adding 0.0 makes a plain zero of the negative one.
        scores.append(None if ids is None else max_penalty * (1.0 - distinct / count if count else 0.0) + 0.0)
    return scores


def known_ids(completions: list[str], completion_ids: list[list[int]] | None) -> list[list[int] | None]:
    """The sampled ids of each completion; None for a text without any, which a file gave and no model sampled."""
    ids = completion_ids or [[] for _ in completions]
    return [None if text and not tokens else tokens for text, tokens in zip(completions, ids, strict=True)]


@register_reward_function("soft_overlong_punishment_reward", label="Soft Overlong")
def soft_overlong_punishment_reward(
    prompts: Texts,
    completions: Texts,
    answer: Texts,
    types: Types = None,
    *,
    completion_ids: Ids = None,
    trainer_state: Any = None,
    max_completion_length: int | None = None,
    cache: int | None = None,
) -> Scores:
    """0.0 up to `cache` tokens below the limit, then falling evenly to -1.0 at the limit and beyond. Equation 13 of
    DAPO (arXiv:2503.14476), as TRL's function of this name. A `cache` of None is a fifth of the limit."""
    limit = _limit(max_completion_length, trainer_state, completions)
    buffer = round(CACHE_SHARE * limit) if cache is None else cache
    require(0 <= buffer <= limit, f"cache must be from 0 to max_completion_length ({limit}), not {buffer}")
    lengths = [None if ids is None else len(ids) for ids in known_ids(completions, completion_ids)]
    past = [None if length is None else length - (limit - buffer) for length in lengths]
    return [None if over is None else 0.0 if over <= 0 else -1.0 if over > buffer else -over / buffer for over in past]


@register_reward_function("cosine_scaled_reward", label="Cosine Length")
def cosine_scaled_reward(
    prompts: Texts,
    completions: Texts,
    answer: Texts,
    types: Types = None,
    *,
    completion_ids: Ids = None,
    trainer_state: Any = None,
    max_completion_length: int | None = None,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Scores:
    """Right answers from 1.0 for the shortest down to 0.5 at the limit, wrong ones from -1.0 up to -0.5, along a
    cosine. That of arXiv:2502.03373, as Open R1 has it. `accuracy_reward` judges what is right; None where the dataset
    has no answer."""
    limit = _limit(max_completion_length, trainer_state, completions)
    require(min_value_wrong <= max_value_wrong, "min_value_wrong must not be above max_value_wrong")
    require(min_value_correct <= max_value_correct, "min_value_correct must not be above max_value_correct")
    scores: list[float | None] = []
    for ids, right in zip(known_ids(completions, completion_ids), correct(completions, answer), strict=True):
        shortest, longest = (max_value_correct, min_value_correct) if right else (min_value_wrong, max_value_wrong)
        share = min(len(ids or ()) / limit, 1.0)
        score = longest + 0.5 * (shortest - longest) * (1.0 + math.cos(math.pi * share))
        scores.append(None if ids is None or right is None else score)
    return scores


@register_reward_function("length_target", label="Length Target")
def length_target(
    prompts: Texts,
    completions: Texts,
    answer: Texts,
    types: Types = None,
    *,
    completion_ids: Ids = None,
    target: int = 200,
) -> Scores:
    """1.0 at `target` tokens, falling evenly to 0.0 at none and at twice as many."""
    require(target >= 1, f"target must be at least 1, not {target}")
    known = known_ids(completions, completion_ids)
    return [None if ids is None else max(0.0, 1.0 - abs(len(ids) - target) / target) for ids in known]


def _limit(limit: int | None, trainer_state: Any, completions: list[str]) -> int:
    require(limit is None or limit >= 1, f"max_completion_length must be at least 1, not {limit}")
    limit = limit or getattr(trainer_state, "max_completion_length", None)
    require(bool(limit) or not completions, "it needs a max_completion_length")
    return limit or sys.maxsize
