"""Tokens to text piece by piece: never half a character, and all of the text in the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.utils import load_tokenizer

from backend.sampling.text_stream import REPLACEMENT, TextStream
from tests.support.random_models import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(models: Path):
    return load_tokenizer(tiny_tokenizer(models / "tokenizer"))


def pieces(tokenizer, tokens: list[int]) -> list[str]:
    stream = TextStream(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False))
    return [*(stream.push(token) for token in tokens), stream.rest()]


@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=40))
def test_a_character_of_several_tokens_comes_whole(tokenizer, text: str):
    tokens = tokenizer.encode(text, add_special_tokens=False)
    shown = pieces(tokenizer, tokens)
    assert "".join(shown) == text
    assert not any(REPLACEMENT in piece for piece in shown) or REPLACEMENT in text


@settings(deadline=None, max_examples=60)
@given(tokens=st.lists(st.integers(3, 319), max_size=40))  # most are single bytes, of every kind
def test_bytes_that_are_no_characters_are_shown_in_the_end(tokenizer, tokens: list[int]):
    shown = pieces(tokenizer, tokens)
    assert "".join(shown) == tokenizer.decode(tokens, skip_special_tokens=False)


def test_a_leading_space_that_depends_on_the_token_before_is_kept():
    words = {1: "▁two", 2: "▁words"}

    def decode(ids) -> str:  # as SentencePiece decodes: no space at the beginning of a text
        return "".join(words[token] for token in ids).replace("▁", " ").removeprefix(" ")

    stream = TextStream(decode)
    assert [stream.push(1), stream.push(2), stream.rest()] == ["two", " words", ""]
