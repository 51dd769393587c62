"""Where completions end, chunk by chunk, without a model; and text from tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.utils import load_tokenizer

from backend.sampling.outputs import REPLACEMENT, CompletionBuffer, TextStream
from tests.support.random_models import tiny_tokenizer

ENDS = (1, 2)
SPECIAL = {1: "<end>", 2: "<stop>", 3: "<tool>"}


class Letters:
    """A tokenizer of one character a token."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        special = {} if skip_special_tokens else SPECIAL
        return "".join(special.get(i, "") if i in SPECIAL else chr(i) for i in ids)


def outputs_of(count: int, max_tokens: int, *stop: str) -> CompletionBuffer:
    return CompletionBuffer(count, max_tokens, Letters(), ENDS, stop)


def append(outputs: CompletionBuffer, rows: dict[int, list[int | str]], held: bool = False) -> None:
    """The next tokens of these rows, a letter or an id each. A token's log-probability is −(its row.its place in the
    chunk), the logs of what was kept and held are ten and a hundred times as much."""
    tokens = np.array([[ord(one) if isinstance(one, str) else one for one in row] for row in rows.values()]).T
    logps = -(np.array([*rows]) + np.arange(len(tokens))[:, None] / 100)
    outputs.append(np.array([*rows]), tokens, logps, 10 * logps, 100 * logps if held else None)


def ends(outputs: CompletionBuffer) -> list[tuple[str, str]]:
    made = [outputs.completion(row) for row in range(len(outputs.stop))]
    return [(completion.text, completion.stop) for completion in made]


def test_each_row_ends_at_its_first_end_of_sequence_or_at_the_limit_which_comes_first() -> None:
    outputs = outputs_of(5, 5)
    append(outputs, {0: [*"abc"], 1: ["a", 1, "c"], 2: [2, "b", 1], 3: ["a", 3, 1], 4: [*"abc"]})
    assert outputs.length.tolist() == [3, 2, 1, 3, 3] and outputs.token_count == 12
    append(outputs, {4: ["d", 1, "f"], 0: [*"de", 1], 1: [*"xyz"]})
    assert ends(outputs) == [("abcde", "length"), ("a", "eos"), ("", "eos"), ("a<tool>", "eos"), ("abcd", "eos")]
    assert outputs.token_count == 5 + 2 + 1 + 3 + 5
    append(outputs, {0: ["x"], 4: ["x"]})
    last = outputs.completion(4)
    assert last.tokens == [*map(ord, "abcd"), 1] and not last.log_held
    assert last.logps == pytest.approx([-4, -4.01, -4.02, -4, -4.01])
    assert last.log_kept == pytest.approx([-40, -40.1, -40.2, -40, -40.1])


LONG = "a stop string of thirty letters"


@pytest.mark.parametrize(
    ("stop", "chunks", "text"),
    [
        (["and"], ["no stop string, then one a", "nd"], "no stop string, then one and"),
        (["and"], ["and", " more"], "and"),
        (["and"], ["so and"], "so and"),
        (["and"], ["and then more than is read around new tokens"], "and"),
        (["no", "and"], ["thanks a", "n", "d"], "thanks and"),
        (["and", LONG], [*("x" * 40 + LONG)], "x" * 40 + LONG),
    ],
)
def test_a_stop_string_ends_a_row_with_its_last_token(stop: list[str], chunks: list[str], text: str) -> None:
    outputs = outputs_of(2, 200, *stop)
    for chunk in chunks:
        append(outputs, {1: [*chunk]})
    append(outputs, {0: ["x", 2], 1: ["y", 2]})
    assert ends(outputs) == [("x", "eos"), (text, "string")]


def test_under_a_grammar_a_stop_string_counts_where_its_token_completes_the_output() -> None:
    """“1” comes where the output is not whole, and the “x” that makes it whole completes no stop string."""
    whole = {"11x", "11x1;", "11x1;;"}
    outputs = outputs_of(1, 9, "1", ";")
    held: Any = SimpleNamespace(is_complete=lambda tokens: Letters().decode(tokens, False) in whole)
    outputs.held = held
    append(outputs, {0: [*"11x1;;"]}, held=True)
    completion = outputs.completion(0)
    assert (completion.text, completion.stop) == ("11x1;", "string")
    assert completion.log_held == pytest.approx([-0.0, -1, -2, -3, -4])


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


def test_a_leading_space_that_depends_on_the_token_before_is_kept():
    words = {1: "▁two", 2: "▁words"}

    def decode(ids) -> str:  # as SentencePiece decodes: no space at the beginning of a text
        return "".join(words[token] for token in ids).replace("▁", " ").removeprefix(" ")

    stream = TextStream(decode)
    assert [stream.push(1), stream.push(2), stream.rest()] == ["two", " words", ""]
