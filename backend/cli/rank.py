"""The verb `rank`: one process of a run on several machines, as the launcher or `mlx.launch` starts it."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from backend.cli.exit_codes import verb
from backend.cli.lost_terminal import ignore_sighup
from backend.cli.options import Live, Stream


@verb
@ignore_sighup
def rank(
    run: Annotated[Path, typer.Option("--run", help="The run's folder, on the machine of rank 0.")],
    stream: Stream = False,
    progress: Live = None,
) -> None:
    """One process of a run on several machines. Rank 0 trains the run, the others work for it.

    Started on each of them by train --hosts, or by hand: mlx.launch --hostfile FILE -- PYTHON -m backend rank --run RUN
    """
    from backend.cli.rank_session import rank_session
    from backend.distributed.launching.launcher_watch import end_with_launcher

    end_with_launcher()
    end_process(rank_session(run, stream, progress))


def end_process(code: int) -> None:
    """End without waiting for any thread: one may be in a sum of MLX that never returns, and so would MLX's own end of the process."""
    with suppress(Exception):
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]: what a reward file wants done at the end
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
