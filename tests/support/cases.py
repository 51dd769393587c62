"""A table of cases as one test: a parametrized one costs ten milliseconds a case, whatever the case does; and the one
message of a user's error."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from backend.utils.errors import UserError


def cases(names: str | Sequence[str], table: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """As pytest.mark.parametrize, for a test that takes nothing but its case. A failure names the case."""

    def decorate(test: Callable[..., None]) -> Callable[[], None]:
        def every_case() -> None:
            for case in table:
                try:
                    test(case) if isinstance(names, str) else test(*case)
                except BaseException as error:
                    error.add_note(f"In the case {case!r:.500}")
                    raise

        every_case.__name__, every_case.__doc__, every_case.__module__ = test.__name__, test.__doc__, test.__module__
        return every_case

    return decorate


def mistake(work: Any, *arguments: Any) -> tuple[str, str]:
    """(setting, sentence) of the one UserError that `work` raises."""
    with pytest.raises(UserError) as caught:
        work(*arguments)
    (fault,) = caught.value.faults
    assert fault.sentence.endswith(".") and fault.sentence.isprintable() and len(fault.sentence) <= 200
    return fault.setting, fault.sentence
