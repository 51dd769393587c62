"""Any value becomes one short printable line; and how long a user's regular expression is with its repetitions written
out, which is what `regex` would compile."""

from __future__ import annotations

import time
from functools import reduce
from pathlib import Path

import pytest

from backend.utils.errors import ConfigProblem, UserError
from backend.utils.text import SENTENCE, excess, quote, visible, written_out
from tests.support.cases import cases


@cases(
    ("value", "expected"),
    [
        ("two\nlines\r\n\tand   spaces ", "two lines and spaces"),
        ("\x00\x07\x1b[31m", r"\x00\x07\x1b[31m"),
        ("a\ud800b\udcff", r"a\ud800b\udcff"),
        ("\u202eevil\u2066", r"\u202eevil\u2066"),
        ("zero\u200bwidth\u2028line", r"zero\u200bwidth line"),
        ("naïve 日本語 🙂", "naïve 日本語 🙂"),
        (None, "None"),
        (10**5000, "a number of about 5,001 digits"),
        (-(16**9000), "a number of about 10,838 digits"),
        ([1, "two", None], "[1, 'two', None]"),
        (reduce(lambda inner, _: [inner], range(5000), []), "[[[[…]]]]"),
        (ValueError("a\nb"), "a b"),
    ],
)
def test_a_value_is_one_short_printable_line(value: object, expected: str) -> None:
    assert quote(value) == expected


LONG = ["x" * 10**6, "\n" * 10**6, "\u202e" * 500, list(range(10**6)), {"k" * 900: 1}]


@cases("value", LONG)
def test_what_was_left_out_is_an_ellipsis_and_the_limit_holds(value: object) -> None:
    for limit in (10, 80, 200):
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


def test_a_sentence_loses_the_middle_of_its_longest_words_and_none_of_its_own() -> None:
    long, two_paths = "x" * 5000, ("/a" * 150, "/b" * 150)
    for sentence, words in (
        (f"The run {long} has finished; clone it to go on.", ["The run xxx", "x has finished; clone it to go on."]),
        ("{}/rows.csv is not {}/more.csv.".format(*two_paths), ["/a/a", "/rows.csv is not /b", "/more.csv."]),
    ):
        fault = ConfigProblem("run", sentence)
        assert len(fault.sentence) <= SENTENCE and all(word in fault.sentence for word in words)


BOMBS = [
    "(.{1000000000})",
    "a{" + "9" * 5_000 + "}",
    "((?:.{999}){9999})",
    "((a{100}){100}){100}b",
    "(?:(?:(?:[]{]{99}){99}){99}){9}",
    r"(?:\[.{2000}){2000}",
    "(?x) # [\n (.{1000000000})",
    "(?V1)([[a-z]--[{]]{2000}){2000}",
    "x" * 2_000 + "(" + "[a-z]x?" * 200 + "){10000}",
    "a{9}" * 20_000 + "(b{1000}){1000}",
    "{3}" * 30_000 + "(b{9999}){9999}",
]
SOUND = [
    r"#### ([0-9]{1,9})",
    r"(\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{3}[+-]\d{2}:\d{2})",
    "#([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}) {3}x{3}y{3}z{3}a{3}b{3}c{3}d{3}e{3}f{3}g{3}h{3}",
    "(.{0,1000000000})",
    r"a\{99999999\}",
    "[{99999999}]",
    "((((",
    "",
]


@cases("pattern", BOMBS)
def test_a_pattern_that_would_fill_the_memory_is_refused_in_one_sentence_and_at_once(pattern: str) -> None:
    began = time.process_time()
    sentence = excess(pattern)
    assert "more than 1,000,000 characters long with its repetitions written out" in sentence and len(sentence) <= 200
    assert time.process_time() - began < 3


@cases("pattern", SOUND)
def test_patterns_as_people_write_them_are_left_alone(pattern: str) -> None:
    assert not excess(pattern)


@pytest.mark.parametrize(
    ("pattern", "length"), [("abc", 3), ("(?:ab){5000}c{5000}" * 2, 70_000), (r"[^]a]{2000}\{{2000}" * 2, 8_000)]
)
def test_only_what_is_repeated_counts_more_than_once(pattern: str, length: int) -> None:
    """Every character of a group counts, its brackets too: (?:ab) is six."""
    assert written_out(pattern) == length
