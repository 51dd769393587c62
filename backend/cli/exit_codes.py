"""Exit codes, and the decorator that turns a user's mistake into its sentences on stderr and exit code 2."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import typer

from backend.cli.output import tell
from backend.trainer.machine import fault_of_gpu
from backend.utils.disk_faults import fault_of
from backend.utils.environment import require_environment
from backend.utils.errors import UserError

FINISHED, BUG, MISTAKE, STOPPED = 0, 1, 2, 3


def verb(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function a verb: a UserError that it raises, a full disk or too little memory is printed without a traceback, and the process exits with 2."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            require_environment()
            return function(*args, **kwargs)
        except UserError as mistake:
            print_faults(mistake)
            raise typer.Exit(MISTAKE) from None
        except (OSError, RuntimeError, MemoryError) as error:
            # A full or broken disk, met by code that is not ours, and want of memory; everything else may be a bug.
            if (fault := fault_of(error) or fault_of_gpu(error)) is None:
                raise
            print_faults(fault)
            raise typer.Exit(MISTAKE) from None

    return wrapper


def print_faults(mistake: UserError) -> None:
    """One line for each fault, on stderr."""
    for fault in mistake.faults:
        tell(fault, file=sys.stderr)
