"""How few tokens a text can have, from its length alone.

A token stands for a limited number of characters wherever the tokenizer keeps every character: byte-pair encoding over bytes, or with a
token for each byte or each unknown character. Then a text has at least as many tokens as its characters divided by those of the longest
token. White space is not counted, since tokens around it may take in any amount of it. Normalisation to NFC or NFKC puts up to four
characters together (Unicode Standard Annex 15: no character decomposes canonically into more than four), so a token then stands for four
times as many.

For tokenizers that may drop or merge text without limit (word pieces, unigrams with one token for all that is unknown) nothing follows
from the length, and a text of a million characters and a thousand characters per token that fits counts as too long.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

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
