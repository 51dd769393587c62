"""A chat becomes token ids: rendered by the model's chat template, tokenised. Both have limits, and never cut a prompt.

A text that surely has more tokens than fit is not tokenised: ten million characters take a tokenizer half a minute. A template that does
not end is interrupted. Everything else is exactly what the tokenizer makes of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from backend.data.files import first_line
from backend.models.time_limit import TimeLimitError, time_limit
from backend.models.tokenizers import is_panic
from backend.utils.errors import UserError

# How few tokens a text can have, from its length alone.

UNPROVEN_TEXT, UNPROVEN_TOKEN = 1_000_000, 1000
"""Where nothing is proven: characters of a text, and characters per token, above which it counts as too long."""
_COMPOSED = 4
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def least_tokens(text: str, tokenizer: Any) -> int:
    """A number of tokens that `text` surely has; 0 where it may have any number."""
    written = len("".join(text.split()))
    longest = _longest_token(_Key(tokenizer))
    if longest:
        return -(-written // longest)
    return len(text) // UNPROVEN_TOKEN if len(text) > UNPROVEN_TEXT else 0


class _Key:
    """A tokenizer as the key of a cache, by identity: some are not hashable."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.tokenizer is self.tokenizer

    def __hash__(self) -> int:
        return id(self.tokenizer)


@lru_cache(maxsize=2)
def _longest_token(key: _Key) -> int:
    """Characters of a text that one token can stand for, white space left out of account; 0 where there is no such number."""
    try:
        about = json.loads(key.tokenizer.backend_tokenizer.to_str())
        model, vocabulary = about["model"], about["model"]["vocab"]
        keeps = _keeps_characters(about.get("normalizer")) and _splits_only(about.get("pre_tokenizer"))
        if not keeps or model["type"] != "BPE" or not _has_every_character(model, about.get("pre_tokenizer")):
            return 0
        added = [token["content"] for token in about.get("added_tokens") or []]
    except (AttributeError, KeyError, TypeError, ValueError):  # a tokenizer of another make
        return 0
    return _COMPOSED * max(map(len, [*vocabulary, *added, " "]))


def _keeps_characters(normalizer: dict[str, Any] | None) -> bool:
    if normalizer is None:
        return True
    if normalizer["type"] == "Sequence":
        return all(map(_keeps_characters, normalizer["normalizers"]))
    if normalizer["type"] == "Replace":  # one character, such as a space, by one or more
        return len(normalizer["pattern"].get("String", "??")) == 1 and len(normalizer["content"]) >= 1
    return normalizer["type"] in ("NFC", "NFD", "NFKC", "NFKD", "Prepend", "ByteLevel")


def _splits_only(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return True
    if pre_tokenizer["type"] == "Sequence":
        return all(map(_splits_only, pre_tokenizer["pretokenizers"]))
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return pre_tokenizer.get("behavior") != "Removed"
    return pre_tokenizer["type"] in ("ByteLevel", "Metaspace", "Digits")


def _has_every_character(model: dict[str, Any], pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether no character is dropped, and none shares its token with others for being unknown."""
    if model.get("byte_fallback") and all(byte in model["vocab"] for byte in _BYTES):
        return True
    if '"ByteLevel"' in json.dumps(pre_tokenizer) and all(letter in model["vocab"] for letter in _byte_letters()):
        return True
    return model.get("unk_token") in model["vocab"] and not model.get("fuse_unk") and not model.get("byte_fallback")


def _byte_letters() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()


# ── chat tokens ──────────────────────────────────────────────────────────────────────────────────────────────────────

Messages = list[dict[str, Any]]
"""A chat as tokenizers take it: [{"role": …, "content": …}, …]."""

CHAT_S = 4.0
"""Seconds for rendering one chat: a template takes about a millisecond."""
ALWAYS_EXACT = 200_000
"""Characters of a chat that are always tokenised, in about a tenth of a second."""


@dataclass(frozen=True, slots=True)
class TooLong:
    """In place of token ids: the chat has at least so many tokens, which do not fit."""

    at_least: int


def count(tokens: list[int] | TooLong) -> int:
    """The number of tokens, or a number that it is not below."""
    return tokens.at_least if isinstance(tokens, TooLong) else len(tokens)


def characters(messages: Messages) -> int:
    return sum(len(message["content"]) for message in messages)


def check_unicode(messages: Messages, where: str) -> None:
    """Raises UserError for a lone surrogate, which JSON can carry and no tokenizer takes."""
    try:
        for message in messages:
            (message["role"] + message["content"]).encode()
    except UnicodeEncodeError:
        raise UserError("prompt_feature", f"The text of {where} is broken: it holds half a character.") from None


def apply_chat_template(messages: Messages, tokenizer: Any, variables: Mapping[str, Any]) -> list[int]:
    """Token ids of a chat up to where the assistant begins. Without a chat template the contents are joined as text."""
    if _has_template(tokenizer):
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, **variables))
    return list(tokenizer.encode(_joined(messages)))


def tokenize(messages: Messages, tokenizer: Any, variables: Mapping[str, Any], where: str) -> list[int]:
    """`apply_chat_template`, with a UserError that names the row where the text or the template makes that impossible."""
    tokens = tokenize_if_fits(messages, tokenizer, variables, where, None)
    assert not isinstance(tokens, TooLong)
    return tokens


def tokenize_if_fits(
    messages: Messages, tokenizer: Any, variables: Mapping[str, Any], where: str, most: int | None
) -> list[int] | TooLong:
    """As `tokenize`, except that a long chat of more than `most` tokens need not be tokenised."""
    check_unicode(messages, where)
    try:
        with time_limit(CHAT_S):
            if characters(messages) <= ALWAYS_EXACT:
                return apply_chat_template(messages, tokenizer, variables)
            text = _rendered(messages, tokenizer, variables)
        if most is not None and (least := least_tokens(text, tokenizer)) > most:
            return TooLong(least)
        # Rendered once more, and tokenised without a limit on time, which would count that of the tokenizer too.
        return apply_chat_template(messages, tokenizer, variables)
    except TimeLimitError:
        raise UserError("prompt_feature", f"The model's chat template does not end for {where}; it is stopped after "
                      f"{CHAT_S:g} seconds.") from None  # fmt: skip
    except TemplateError as error:  # templates call raise_exception: no system message, turns that do not alternate
        raise UserError("prompt_feature", f"The model's chat template refuses {where}: {first_line(error)}") from None
    except Exception as error:  # of any kind: a template divides by zero, recurses, adds text to a number
        raise UserError("prompt_feature", f"The model's chat template fails for {where}: {first_line(error)}") from None
    except BaseException as error:
        if not is_panic(error):
            raise
        raise UserError("prompt_feature", f"The model's tokenizer fails for {where}: {first_line(error)}") from None


def _has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "has_chat_template", False) or getattr(tokenizer, "chat_template", None))


def _joined(messages: Messages) -> str:
    return "\n\n".join(message["content"] for message in messages)


def _rendered(messages: Messages, tokenizer: Any, variables: Mapping[str, Any]) -> str:
    """What of a chat is tokenised; the messages alone for a tokenizer that gives no text."""
    if not _has_template(tokenizer):
        return _joined(messages)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **variables)
    return text if isinstance(text, str) else _joined(messages)


# ── cut prompts ──────────────────────────────────────────────────────────────────────────────────────────────────────

# Cut a prompt that is too long: the beginning of the last user message goes, and the chat template stays whole.

FIRST_TRY = 4
"""Characters a token, of which the search begins: a text in English has about as many."""


def cut_left(
    messages: Messages, tokenizer: Any, variables: Mapping[str, Any], where: str, most: int
) -> tuple[Messages, list[int]] | None:
    """The chat with as much of the end of its last user message as fits into `most` tokens, with its tokens; None where not even one
    character of it does, or there is no user message. Raises UserError naming the row."""
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
