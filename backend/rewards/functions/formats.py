"""Shipped reward functions that judge the form of a completion: thoughts in their tags, JSON, a regular expression.

No text makes them slow: each passes over it a fixed number of times, and a regular expression has a time limit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

import regex

from backend.rewards.functions.math_equality import answer_part
from backend.rewards.registry import Ids, Scores, Texts, Types, register_reward_function, require
from backend.utils.text import excess

MATCH_S = 0.1
"""Seconds that a pattern may search one completion. `(a|aa)+$` can backtrack for years, and Python's `re` has no
timeout."""


@register_reward_function("think_format_reward", label="Think Format")
def think_format_reward(prompts: Texts, completions: Texts, answer: Texts, types: Types = None) -> Scores:
    """1.0 when the completion opens with `<think>`, once, and closes it; what follows is free.

    TRL's function of this name, but that white space before the tag is free. 0 for an empty completion; text of any
    size is read in linear time.
    """
    return [float(_thinks_first(text.lstrip())) for text in completions]


@register_reward_function("valid_json", label="Valid JSON")
def valid_json(prompts: Texts, completions: Texts, answer: Texts, types: Types = None) -> Scores:
    """1.0 when the answer is a JSON object, 0.5 when it is any other JSON, else 0.0.

    The answer is the text in the last `<answer>`, else what follows the thoughts, else everything; a Markdown fence
    around it is taken off. NaN and Infinity are no JSON. 0 for an empty completion and for JSON nested too deep for
    Python to read, some hundred levels; numbers of any length and text of any size are read in linear time.
    """
    return [_json_score(_unfenced(answer_part(text))) for text in completions]


@register_reward_function("regex_match", label="Regex Match")
def regex_match(prompts: Texts, completions: Texts, answer: Texts, types: Types = None, *, pattern: str) -> Scores:
    r"""1.0 when the regular expression `pattern` is found anywhere in the completion, else 0.0.

    `^` and `$` stand for its beginning and end, `(?s)` lets the dot pass newlines, `(?i)` ignores case; Python's
    syntax. 0 for an empty completion, unless the pattern matches nothing at all. A search that takes over 0.1 s, on
    huge or hostile text, is given up and scores 0.
    """
    compiled = _compiled(pattern)
    return [float(_matches(compiled, text)) for text in completions]


def _thinks_first(text: str) -> bool:
    before, _, rest = text.partition("<think>")
    return not before and "<think>" not in rest and "</think>" in rest


def _unfenced(text: str) -> str:
    if not (text.startswith("```") and text.endswith("```") and "\n" in text):
        return text
    return text.partition("\n")[2].removesuffix("```").strip()


def _json_score(text: str) -> float:
    try:
        # Numbers stay text: turning one of a million digits into a number takes long, and Python refuses to.
        value = json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return 0.0
    return 1.0 if isinstance(value, dict) else 0.5


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _compiled(pattern: str) -> Any:
    require("\b" not in pattern, r'pattern holds a backspace: write r"\b", not "\b", for the edge of a word')
    require(not excess(pattern), excess(pattern).removesuffix("."))
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"pattern is no regular expression: {error}") from None


def _matches(pattern: Any, text: str) -> bool:
    try:
        return pattern.search(text, timeout=MATCH_S) is not None
    except TimeoutError:
        return False


LONGEST_NGRAM = 100


@register_reward_function("keyword", label="Keyword")
def keyword(
    prompts: Texts, completions: Texts, answer: Texts, types: Types = None, *, word: str, case: bool = False
) -> Scores:
    """1.0 when the completion contains `word`, else 0.0.

    Anywhere, also inside a longer word; with `case`, capital and small letters count as different. 0 for an empty
    completion; text of any size is searched in linear time.
    """
    require(bool(word), "word must not be empty, for every text contains that")
    needle = word if case else word.casefold()
    return [float(needle in (text if case else text.casefold())) for text in completions]


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
    """`max_penalty` times the share of n-grams that repeat an earlier one: 0.0 without repetition.

    n-grams are runs of `ngram_size` token ids, as in TRL's function of this name (arXiv:2502.03373, appendix C.2). 0
    for an empty completion and one with fewer tokens than that, close to `max_penalty` for a huge one that says the
    same again and again; linear in the tokens. None where the sampled tokens are not known, as for texts scored from
    a file.
    """
    require(1 <= ngram_size <= LONGEST_NGRAM, f"ngram_size must be from 1 to {LONGEST_NGRAM}, not {ngram_size}")
    require(max_penalty <= 0, f"max_penalty must not be above 0, as {max_penalty:g} is")
    known = known_ids(completions, completion_ids)
    # Adding 0.0 makes a plain zero of the negative one.
    return [None if ids is None else max_penalty * _repeated(ids, ngram_size) + 0.0 for ids in known]


def known_ids(completions: list[str], completion_ids: list[list[int]] | None) -> list[list[int] | None]:
    """The sampled ids of each completion; None for a text without any, which a file gave and no model sampled."""
    ids = completion_ids or [[] for _ in completions]
    return [None if text and not tokens else tokens for text, tokens in zip(completions, ids, strict=True)]


def _repeated(ids: Sequence[int], size: int) -> float:
    count = len(ids) - size + 1
    if count < 1:
        return 0.0
    return 1.0 - len({tuple(ids[start : start + size]) for start in range(count)}) / count
