"""Runs a command that ends, with all that it started, when its stdin is closed or this program's parent ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from backend.rewards.confinement.guard import guard


def main(arguments: Sequence[str] = ()) -> NoReturn:
    """Become the command. It has the variables that it would have without us."""
    guard(0, scoped=False)
    _, _, theirs = os.environ.pop("PYTHONPATH", "").partition(os.pathsep)  # see `backend_environment`
    if theirs:
        os.environ["PYTHONPATH"] = theirs
    try:
        os.execvp(arguments[0], [*arguments])
    except OSError as error:
        sys.exit(f"{arguments[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
