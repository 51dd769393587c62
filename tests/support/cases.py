"""A table of cases as one test: a parametrized one costs ten milliseconds a case, whatever the case does."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any


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
