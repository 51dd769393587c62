"""How a verb ends: the exit codes, and the sentence on stderr."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import typer

from backend.spec.faults import Mistake

FINISHED, BUG, MISTAKE, STOPPED = 0, 1, 2, 3


def verb(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a Mistake into its sentences on stderr and exit code 2."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Mistake as mistake:
            tell(mistake)
            raise typer.Exit(MISTAKE) from None

    return guarded


def tell(mistake: Mistake) -> None:
    for fault in mistake.faults:
        print(fault, file=sys.stderr)
