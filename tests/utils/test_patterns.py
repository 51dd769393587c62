"""How long a user's regular expression is once its repetitions are written out: what `regex` would compile."""

from __future__ import annotations

import time

import pytest

from backend.utils.text import excess, written_out

BOMBS = [
    ".{1000000000}",
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
    "(.{10000})",
    r"a\{99999999\}",
    "[{99999999}]",
    "((((",
    "[",
    "",
]


@pytest.mark.parametrize("pattern", BOMBS, ids=range(len(BOMBS)))
def test_a_pattern_that_would_fill_the_memory_is_refused_in_one_sentence_and_at_once(pattern: str) -> None:
    began = time.process_time()
    sentence = excess(pattern)
    assert "more than 1,000,000 characters long with its repetitions written out" in sentence and len(sentence) <= 200
    assert time.process_time() - began < 3


@pytest.mark.parametrize("pattern", SOUND)
def test_patterns_as_people_write_them_are_left_alone(pattern: str) -> None:
    assert not excess(pattern)


@pytest.mark.parametrize(
    ("pattern", "length"), [("abc", 3), ("(?:ab){5000}c{5000}" * 2, 70_000), (r"[^]a]{2000}\{{2000}" * 2, 8_000)]
)
def test_only_what_is_repeated_counts_more_than_once(pattern: str, length: int) -> None:
    """Every character of a group counts, its brackets too: (?:ab) is six."""
    assert written_out(pattern) == length
