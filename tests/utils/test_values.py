"""A nested value that nothing can work with is refused before anything does."""

from __future__ import annotations

from typing import Any

from backend.utils.documents import DEPTH, validation_error


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = {"a": value} if level % 2 else [value]
    return value


def test_usable_values() -> None:
    for value in (None, True, 1, 1.5, float("nan"), "naïve", [], {}, {"a": [1, {"b": None}]}, nested(DEPTH), 10**300):
        assert validation_error(value) == ""


def test_what_nothing_can_work_with_is_named() -> None:
    itself: list[Any] = []
    itself.append(itself)
    assert validation_error([{"a": "\ud800"}]) == r"contains characters that are not valid text: \ud800"
    assert validation_error({"\udcff": 1}).startswith("contains characters that are not valid text")
    assert validation_error([10**400]) == "contains a number of about 401 digits, which is beyond every limit"
    assert (
        validation_error(nested(DEPTH + 1))
        == validation_error(nested(10**5))
        == validation_error(itself)
        == "is nested more than 50 levels deep"
    )
    assert validation_error([0] * 12_000) == "contains more than 10,000 values"
