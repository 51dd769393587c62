"""Shipped reward functions that judge the form of a completion: thoughts in their tags, JSON, a regular expression.

No text makes them slow: each passes over it a fixed number of times, and a regular expression has a time limit.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

import regex

from backend.rewards.functions.answer_text import answer_part
from backend.rewards.registry import register_reward_function, require
from backend.utils.text import excess

MATCH_S = 0.1
"""Seconds that a pattern may search one completion. `(a|aa)+$` can backtrack for years, and Python's `re` has no timeout."""


@register_reward_function("think_format_reward", label="Think Format")
def think_format_reward(
    prompts: list[str], completions: list[str], answer: list[str], types: list[str] | None = None
) -> list[float]:
    """1.0 when the completion opens with `<think>`, once, and closes it; what follows is free.

    TRL's function of this name, but that white space before the tag is free. 0 for an empty completion; text of any
    size is read in linear time.
    """
    return [float(_thinks_first(text.lstrip())) for text in completions]


@register_reward_function("valid_json", label="Valid JSON")
def valid_json(
    prompts: list[str], completions: list[str], answer: list[str], types: list[str] | None = None
) -> list[float]:
    """1.0 when the answer is a JSON object, 0.5 when it is any other JSON, else 0.0.

    The answer is the text in the last `<answer>`, else what follows the thoughts, else everything; a Markdown fence
    around it is taken off. NaN and Infinity are no JSON. 0 for an empty completion and for JSON nested too deep for
    Python to read, some hundred levels; numbers of any length and text of any size are read in linear time.
    """
    return [_json_score(_unfenced(answer_part(text))) for text in completions]


@register_reward_function("regex_match", label="Regex Match")
def regex_match(
    prompts: list[str],
    completions: list[str],
    answer: list[str],
    types: list[str] | None = None,
    *,
    pattern: str,
) -> list[float]:
    r"""1.0 when the regular expression `pattern` is found anywhere in the completion, else 0.0.

    `^` and `$` stand for its beginning and end, `(?s)` lets the dot pass newlines, `(?i)` ignores case; Python's syntax.
    0 for an empty completion, unless the pattern matches nothing at all. A search that takes over 0.1 s, on huge or
    hostile text, is given up and scores 0.
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
