"""Any value becomes one short printable line, whatever it is made of."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from backend.utils.errors import ConfigProblem, UserError
from backend.utils.text import SENTENCE, quote, visible


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("plain", "plain"),
        ("", ""),
        ("two\nlines\r\n\tand   spaces ", "two lines and spaces"),
        ("\x00\x07\x1b[31m", r"\x00\x07\x1b[31m"),
        ("a\ud800b\udcff", r"a\ud800b\udcff"),
        ("\u202eevil\u2066", r"\u202eevil\u2066"),
        ("zero\u200bwidth\u2028line", r"zero\u200bwidth line"),
        ("naïve 日本語 🙂", "naïve 日本語 🙂"),
        (None, "None"),
        (True, "True"),
        (0.25, "0.25"),
        (12, "12"),
        (10**5000, "a number of about 5,001 digits"),
        (-(16**9000), "a number of about 10,838 digits"),
        ([1, "two", None], "[1, 'two', None]"),
        ({"a": {"b": [1]}}, "{'a': {'b': [1]}}"),
        (deep(5000), "[[[[…]]]]"),
        (ValueError("a\nb"), "a b"),
    ],
    ids=itertools.count(),
)
def test_a_value_is_one_short_printable_line(value: object, expected: str) -> None:
    assert quote(value) == expected


@pytest.mark.parametrize(
    "value", ["x" * 10**6, "\n" * 10**6, "\u202e" * 500, list(range(10**6)), {"k" * 900: 1}], ids=range(5)
)
@pytest.mark.parametrize("limit", [10, 80, 200])
def test_what_was_left_out_is_an_ellipsis_and_the_limit_holds(value: object, limit: int) -> None:
    text = quote(value, limit)
    assert len(text) <= limit and "…" in text and text.isprintable()


def test_a_long_path_keeps_its_name() -> None:
    text = quote(Path("/" + "long/" * 60 + "config.yaml"))
    assert len(text) == 120 and text.startswith("/long/") and text.endswith("/config.yaml") and text.count("…") == 1


def test_a_fault_is_one_printable_line_whatever_it_was_given() -> None:
    fault = ConfigProblem("key\n" + "x" * 500, "It is\nbroken\x1b[31m\ud800.")
    assert fault.sentence == r"It is broken\x1b[31m\ud800."
    assert fault.setting.startswith("key x") and len(fault.setting) <= 60
    assert str(UserError("a\0", "b\0.")) == r"a\x00: b\x00."


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("a\u202eb\x07c\x1b[31m", "a\\u202eb\\x07c\\x1b[31m"),
        ("one\ttwo\r\nthree\rfour", "one\ttwo\r\nthree\\rfour"),
        ("سلام می\u200cخواهم 👩\u200d🚀 全角\u3000空白", "سلام می\u200cخواهم 👩\u200d🚀 全角\u3000空白"),
    ],
)
def test_what_cannot_be_seen_is_escaped_and_writing_stays(text: str, seen: str):
    assert visible(text) == seen


@pytest.mark.parametrize(
    ("sentence", "words"),
    [
        (f"The run {'x' * 5000} has finished; clone it to go on from its end.", ("The run xxx", "x has finished; clone it")),
        (f"{'/a' * 150}/rows.csv is not {'/b' * 150}/more.csv, the other.", ("/a/a", "/rows.csv is not /b", "more.csv, the other.")),
    ],
)  # fmt: skip
def test_a_sentence_loses_the_middle_of_its_longest_words_and_none_of_its_own(
    sentence: str, words: tuple[str, ...]
) -> None:
    fault = ConfigProblem("run", sentence)
    assert len(fault.sentence) <= SENTENCE and all(word in fault.sentence for word in words)
