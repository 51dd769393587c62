"""One training process on the command line: its display, its log file, its signal handlers and its exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer

from backend.cli.exit_codes import FINISHED
from backend.cli.new_run import PreparedRun
from backend.cli.restart import display_options, restart
from backend.cli.run_log import logging_to, say
from backend.run.stop_signals import handlers_restored
from backend.spec.command import shell_line


def train_and_exit(run: PreparedRun, stream: bool, progress: bool | None) -> NoReturn:
    """Train with the chosen display, then exit with the run's code."""
    train_or_exit(run, stream, progress)
    raise typer.Exit(FINISHED)


def train_or_exit(
    run: PreparedRun,
    stream: bool,
    progress: bool | None,
    *,
    quiet: bool = False,
    go_on_with: Sequence[str] = (),
) -> None:
    """Train with the chosen display; exit unless the run finished. `quiet` leaves stdout to the caller.

    After a GPU error the process may turn into another, which goes on with the run: `go_on_with` is its verb and arguments, `resume` on
    this run by default.
    """
    from backend.engine.cpu import blas
    from backend.run.ending import RESTART
    from backend.run.run_process import train

    says_on_stdout = not (stream or quiet)
    if says_on_stdout:
        say(str(run.folder.path), sys.stdout)
    with handlers_restored() as afterwards:
        with (
            logging_to(run.folder) as log,
            display(stream, progress, quiet, run.settings.steps_per_report) as echo,
        ):
            print(blas.prepare(), file=sys.stderr, flush=True)
            command = shell_line([*sys.argv])
            ending = train(
                run.settings,
                run.folder,
                command=command,
                echo=log.checked(echo),
                inputs=run.inputs,
                may_restart=True,
                changes=run.changes,
                warnings=run.warnings,
            )
        afterwards.process_ends = ending.exit_code != 0 and ending.kind != RESTART
        if ending.kind == RESTART:  # with the handlers that the trainer has left
            verb = go_on_with or ("resume", str(run.folder.path))
            restart(*verb, *display_options(stream, progress))
    if ending.exit_code:
        say(ending.sentence, sys.stderr)
        raise typer.Exit(ending.exit_code)
    if says_on_stdout:
        say(ending.sentence, sys.stdout)


@contextmanager
def display(stream: bool, progress: bool | None, quiet: bool, steps_per_line: int) -> Iterator[Callable[[Any], None]]:
    """Takes every event of the diary: a live display, lines of text, or the events as JSON on stdout."""
    from rich.console import Console

    from backend.cli.progress import LineDisplay, LiveDisplay

    if stream:
        yield lambda event: print(json.dumps(event, ensure_ascii=False), flush=True)
        return
    console = Console(stderr=quiet)
    is_live = console.is_terminal if progress is None else progress
    with LiveDisplay(console) if is_live else LineDisplay(console, steps_per_line) as echo:
        yield echo
