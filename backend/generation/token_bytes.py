"""The bytes that each token of a tokenizer stands for inside a text, which a grammar is followed in.

Three kinds of tokenizers are read from their own tables: byte-level ones, which write bytes as printable characters (GPT-2), those with
SentencePiece's pieces, where ▁ is a blank and <0x0A> a byte, and others, whose tokens are decoded one at a time behind another. Added
tokens such as <think> stand for their own text unless they are marked as special; special tokens stand for nothing.
"""

from __future__ import annotations

import json
from typing import Any

from backend.generation.text_stream import REPLACEMENT

BLANK = "▁"


class TokenBytes:
    """A tokenizer as llguidance's TokenizerWrapper takes one. `vocabulary`: entries of the model's logits, often more than tokens."""

    def __init__(self, tokenizer: Any, eos_ids: list[int], vocabulary: int) -> None:
        self.eos_token_id, self.bos_token_id = eos_ids[0], None
        special = {*tokenizer.all_special_ids, *eos_ids}
        self.special_token_ids = sorted(token for token in special if token < vocabulary)
        self.tokens = [b""] * vocabulary
        for token, data in bytes_of(tokenizer).items():
            if token < vocabulary and token not in special:
                self.tokens[token] = data
        self._ids = {data: token for token, data in enumerate(self.tokens) if data}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens of the text, the longest first, as far as there are any."""
        data, start = text.encode() if isinstance(text, str) else text, 0
        tokens: list[int] = []
        while start < len(data):
            ends = range(min(len(data), start + self._longest), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is None:
                break
            tokens.append(self._ids[data[start:end]])
            start = end
        return tokens


def bytes_of(tokenizer: Any) -> dict[int, bytes]:
    """Token → its bytes, those without any left out."""
    fast = getattr(getattr(tokenizer, "_tokenizer", tokenizer), "backend_tokenizer", None)
    table: dict[str, Any] = json.loads(fast.to_str()) if fast is not None else {}
    kinds = _parts(table.get("decoder")) | _parts(table.get("pre_tokenizer"))
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    added = {entry["id"]: entry["content"].encode() for entry in table.get("added_tokens", ()) if not entry["special"]}
    if "ByteLevel" in kinds:
        byte_of = _byte_level()
        own = {token: _bytes_by(byte_of, text) for text, token in vocabulary.items()}
    elif kinds & {"ByteFallback", "Metaspace"}:
        own = {token: _piece(text) for text, token in vocabulary.items()}
    else:
        own = _decoded(tokenizer, vocabulary)
    return {token: data for token, data in (own | added).items() if data}


def _parts(stage: Any) -> set[str]:
    """The types of a stage of tokenizer.json, which may be a sequence of others."""
    if not isinstance(stage, dict):
        return set()
    parts = [*stage.get("decoders", ()), *stage.get("pretokenizers", ())]
    return {stage["type"], *(kind for part in parts for kind in _parts(part))}


def _byte_level() -> dict[str, int]:
    """Character → byte: printable ones of Latin-1 stand for themselves, the others in their order for 256, 257, …"""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _bytes_by(byte_of: dict[str, int], text: str) -> bytes:
    """Empty for a token that is not of this alphabet."""
    return bytes(byte_of[char] for char in text) if all(char in byte_of for char in text) else b""


def _piece(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace(BLANK, " ").encode()


def _decoded(tokenizer: Any, vocabulary: dict[str, int]) -> dict[int, bytes]:
    """Each token decoded behind another, because a decoder may strip what begins a text. Part of a character has no text of its own."""
    anchor = next((token for text, token in vocabulary.items() if len(text) == 1 and text.isalnum()), None)
    before = [] if anchor is None else [anchor]
    start = len(tokenizer.decode(before)) if before else 0
    texts = {token: tokenizer.decode([*before, token])[start:] for token in vocabulary.values()}
    return {token: text.encode() for token, text in texts.items() if REPLACEMENT not in text}
