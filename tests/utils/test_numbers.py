"""Numbers that no arithmetic could use are refused in one sentence."""

from __future__ import annotations

import math

import pytest

from backend.utils.documents import number, whole_number
from backend.utils.errors import UserError

HOSTILE = [True, None, "3", [], {}, math.nan, math.inf, -math.inf, 10**400, -(10**5000)]


@pytest.mark.parametrize("value", [*HOSTILE, 2.5], ids=range(len(HOSTILE) + 1))
def test_what_is_no_whole_number_is_named(value: object) -> None:
    with pytest.raises(UserError) as told:
        whole_number(value, "iters")
    (fault,) = told.value.faults
    assert fault.setting == "iters" and fault.sentence.startswith("iters must be a whole number, not ")
    assert len(fault.sentence) < 200


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_number_is_named(value: object) -> None:
    with pytest.raises(UserError, match="beta must be a number, not "):
        number(value, "beta")


def test_numbers_are_returned_in_their_type() -> None:
    assert whole_number(3.0, "n") == 3 and isinstance(whole_number(3.0, "n"), int)
    assert whole_number(10**300, "n") == 10**300
    assert number(3, "n") == 3.0 and isinstance(number(3, "n"), float)
