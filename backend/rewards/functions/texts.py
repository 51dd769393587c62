"""Shipped reward functions that judge what a completion says, without an answer to compare with."""

from __future__ import annotations

from collections.abc import Sequence

from backend.rewards.registry import register_reward_function, require

LONGEST_NGRAM = 100


@register_reward_function("keyword", label="Keyword")
def keyword(
    prompts: list[str],
    completions: list[str],
    answer: list[str],
    types: list[str] | None = None,
    *,
    word: str,
    case: bool = False,
) -> list[float]:
    """1.0 when the completion contains `word`, else 0.0.

    Anywhere, also inside a longer word; with `case`, capital and small letters count as different. 0 for an empty
    completion; text of any size is searched in linear time.
    """
    require(bool(word), "word must not be empty, for every text contains that")
    needle = word if case else word.casefold()
    return [float(needle in (text if case else text.casefold())) for text in completions]


@register_reward_function("repetition_penalty_reward", label="Repetition Penalty")
def repetition_penalty_reward(
    prompts: list[str],
    completions: list[str],
    answer: list[str],
    types: list[str] | None = None,
    *,
    completion_ids: list[list[int]] | None = None,
    ngram_size: int = 3,
    max_penalty: float = -1.0,
) -> list[float | None]:
    """`max_penalty` times the share of n-grams that repeat an earlier one: 0.0 without repetition.

    n-grams are runs of `ngram_size` token ids, as in TRL's function of this name (arXiv:2502.03373, appendix C.2). 0 for
    an empty completion and one with fewer tokens than that, close to `max_penalty` for a huge one that says the same
    again and again; linear in the tokens. None where the sampled tokens are not known, as for texts scored from a file.
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
    """1 − different n-grams / all n-grams."""
    count = len(ids) - size + 1
    if count < 1:
        return 0.0
    return 1.0 - len({tuple(ids[start : start + size]) for start in range(count)}) / count
