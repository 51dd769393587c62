"""Cut a prompt that is too long: the beginning of the last user message goes, and the chat template stays whole.

TRL cuts the finished token sequence instead, and with it the system message and the first markers of the chat template, so that the model
reads a conversation that begins in its middle. What stays here is a chat as any other, only with less text in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from backend.data.chat_tokens import Messages, TooLong, tokenize_if_fits

FIRST_TRY = 4
"""Characters a token, of which the search begins: a text in English has about as many."""


def cut_left(
    messages: Messages, tokenizer: Any, variables: Mapping[str, Any], where: str, most: int
) -> tuple[Messages, list[int]] | None:
    """The chat with as much of the end of its last user message as fits into `most` tokens, with its tokens; None where not even one
    character of it does, or there is no user message. Raises Mistake naming the row."""
    place = next((i for i in reversed(range(len(messages))) if messages[i]["role"] == "user"), None)
    if place is None or most < 1:
        return None
    text: str = messages[place]["content"]

    def tried(kept: int) -> tuple[Messages, list[int]] | None:
        shorter = {**messages[place], "content": text[len(text) - kept :]}
        chat = [*messages[:place], shorter, *messages[place + 1 :]]
        tokens = tokenize_if_fits(chat, tokenizer, variables, where, most)
        return None if isinstance(tokens, TooLong) or len(tokens) > most else (chat, tokens)

    return _longest(tried, len(text) - 1, most * FIRST_TRY)


def _longest(tried: Callable[[int], Any], most: int, guess: int) -> Any:
    """What `tried` gives for the largest number from 1 to `most` for which it gives something, found by doubling and halving; None where it
    gives nothing for 1."""
    if most < 1:
        return None
    fits, best, beyond = 0, None, most + 1
    candidate = max(1, min(guess, most))
    while True:  # upwards from the guess while it fits, so that a text of millions of characters is never tokenised
        found = tried(candidate)
        if found is None:
            beyond = candidate
            break
        fits, best = candidate, found
        if candidate == most:
            return best
        candidate = min(2 * candidate, most)
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        found = tried(middle)
        if found is None:
            beyond = middle
        else:
            fits, best = middle, found
    return best
