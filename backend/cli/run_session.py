"""One training process on the command line: its display, its log file, its signal handlers and its exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from backend.cli.exit_codes import FINISHED
from backend.cli.launch_session import launch_and_exit, machine_settings
from backend.cli.new_run import PreparedRun
from backend.cli.output import tell, tell_json
from backend.cli.restart import display_options, restart
from backend.cli.run_log import logging_to, say
from backend.distributed.orders import RESTART_RANKS
from backend.trainer.control import handlers_restored
from backend.utils.command import shell_line

if TYPE_CHECKING:
    from backend.trainer.run_context import LoadContext


@dataclass(frozen=True, slots=True)
class SharedWork:
    """What rank 0 of several machines trains with: `backend.trainer.run_process.train` takes them under these names."""

    load: LoadContext
    look: Callable[[], None]
    goes_on: bool


def train_and_exit(run: PreparedRun, stream: bool, progress: bool | None) -> NoReturn:
    """Train with the chosen display, here or on the machines that the run's settings name, then exit with the run's code."""
    config = machine_settings(run)
    if config.hosts:
        launch_and_exit(run, config, stream, progress)
    train_or_exit(run, stream, progress)
    raise typer.Exit(FINISHED)


def train_or_exit(
    run: PreparedRun,
    stream: bool,
    progress: bool | None,
    *,
    quiet: bool = False,
    go_on_with: Sequence[str] = (),
    shared: SharedWork | None = None,
    command: str = "",
) -> None:
    """Train with the chosen display; exit unless the run finished. `quiet` leaves stdout to the caller.

    After a GPU error the process may turn into another, which goes on with the run: `go_on_with` is its verb and arguments, `resume` on
    this run by default. `shared`: of rank 0 of several machines, which leaves that to its launcher. `command`: what was typed, for the
    event log; this process's own by default.
    """
    from backend.engine.cpu import blas
    from backend.runs.start_progress import progress_listener
    from backend.trainer.ending import RESTART
    from backend.trainer.run_process import train

    says_on_stdout = not (stream or quiet)
    if says_on_stdout:
        say(str(run.folder.path), sys.stdout)
    with handlers_restored() as afterwards:
        with (
            logging_to(run.folder) as log,
            display(stream, progress, quiet, run.settings.steps_per_report) as echo,
            progress_listener(lambda sentence: say(sentence, sys.stderr)),
        ):
            tell(blas.prepare(), file=sys.stderr, flush=True)
            ending = train(
                run.settings,
                run.folder,
                command=command or shell_line([*sys.argv]),
                echo=log.checked(echo),
                inputs=run.inputs,
                may_restart=True,
                changes=run.changes,
                warnings=run.warnings,
                lock=run.lock,
                **({} if shared is None else {"load": shared.load, "look": shared.look, "goes_on": shared.goes_on}),
            )
        afterwards.process_ends = ending.exit_code != 0 and ending.kind != RESTART
        if ending.kind == RESTART and shared is not None:
            raise typer.Exit(RESTART_RANKS)
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
    """Takes every event of the event log: a live display, lines of text, or the events as JSON on stdout."""
    from backend.cli.consoles import new_console
    from backend.cli.progress import LineDisplay, LiveDisplay

    if stream:
        yield tell_json
        return
    console = new_console(stderr=quiet)
    is_live = console.is_terminal if progress is None else progress
    with LiveDisplay(console) if is_live else LineDisplay(console, steps_per_line) as echo:
        yield echo
