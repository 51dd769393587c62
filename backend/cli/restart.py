"""Go on with a run in a fresh process: the same pid and streams, another program, a GPU that knows nothing of the last one.

The run's lock and any pending signal pass through the exec (`backend.trainer.run_process`), so neither the window nor Ctrl-C notices it.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from backend.utils.command import backend_command, backend_environment


def restart(verb: str, *arguments: str) -> NoReturn:
    """Replace this process's program by `python -m backend VERB …`."""
    command = backend_command(verb, *arguments)
    # An exec ends no interpreter: what a reward file wants done at the end, such as stopping its judge, would be left out.
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]: multiprocessing ends its children with it too
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execve(command[0], command, backend_environment())


def display_options(stream: bool, progress: bool | None) -> Sequence[str]:
    """The options `Stream` and `Live` as they were given."""
    live = () if progress is None else ("--progress" if progress else "--no-progress",)
    return [*(("--stream",) if stream else ()), *live]
