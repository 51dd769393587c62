"""Where the reward function `code_tests` finds its tests, so that a dataset without any is refused before a run."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from backend.spec.faults import Mistake
from backend.spec.rewards.entry import read_call

CODE_TESTS = "code_tests"
TEST_COLUMNS = (
    *("tests", "test_list", "test_cases", "verification_info", "input_output", "official_tests", "test", "unit_tests"),
)
"""Columns that are taken for tests, the first that there is, where the entry names none."""


def tests_column(named: str, columns: Collection[str]) -> str:
    """The column with the tests: the one that is named, else the first known one; "" where there is none."""
    if named:
        return named if named in columns else ""
    return next((name for name in TEST_COLUMNS if name in columns), "")


def without_tests(entries: Iterable[str], columns: Collection[str]) -> list[str]:
    """The column that each entry of `code_tests` lacks among `columns`; a known one where the entry names none."""
    lacking: list[str] = []
    for entry in entries:
        try:
            call = read_call(entry)
        except Mistake:  # the check of entries says so
            continue
        named = str(call.arguments.get("column", ""))
        if call.function == CODE_TESTS and not call.file and not tests_column(named, columns):
            lacking.append(named or TEST_COLUMNS[0])
    return lacking
