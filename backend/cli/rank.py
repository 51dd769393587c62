"""The verb `rank`: one process of a distributed run, started by the launcher or `mlx.launch`."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backend.cli.common import BUG, FINISHED, USER_ERROR, Live, Stream, ignore_sighup, print_problems, verb
from backend.cli.training import PreparedRun, prepared_run, train_or_exit
from backend.config.config import load, read
from backend.distributed import ranks
from backend.distributed.launcher import write_late_ending
from backend.engine import cpu_setup
from backend.rewards.allowed_code import require_allowed
from backend.runs.events import check_format
from backend.runs.run_folder import RunFolder
from backend.utils.errors import UserError

if TYPE_CHECKING:
    from backend.distributed.channel import LeaderChannel
    from backend.distributed.collectives import MlxCollectives


@verb
@ignore_sighup
def rank(
    run: Annotated[Path, typer.Option("--run", help="The run's folder, on the machine of rank 0.")],
    stream: Stream = False,
    progress: Live = None,
) -> None:
    """Run one process of a distributed run. Rank 0 trains the run, the others work for it.

    Started by train --hosts, or by hand: mlx.launch --hostfile FILE -- PYTHON -m backend rank --run RUN
    """
    if os.environ.get(ranks.WATCH_VARIABLE):
        ranks.end_with_stdin()
    code = rank_session(run, stream, progress)
    # Exit without joining threads: one may wait for ever in an MLX sum.
    with suppress(Exception):
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]: what a reward file wants done at the end
    for output in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            output.flush()
    os._exit(code)


def rank_session(run: Path, stream: bool, progress: bool | None) -> int:
    """Join the other ranks and work until the run ends. Returns the exit code."""
    orders, channel, collectives = ranks.Orders.given(), None, None
    marks = ranks.BACKEND_MARKS.items()
    if backend := next((mark or os.environ[name] for name, mark in marks if os.environ.get(name)), ""):
        from backend.distributed.channel import WorkerChannel, open_channel
        from backend.distributed.collectives import init_collectives

        try:
            collectives = init_collectives(backend)
            if collectives.rank:  # before anything is compiled; rank 0 shares its folder with other programs
                cpu_setup.use_own_kernel_folder()
                ranks.leave_stops_to_leader()
            else:
                orders.report(pid=os.getpid())
            channel = open_channel(collectives)
        except (UserError, OSError) as error:
            if isinstance(error, OSError):
                error = UserError("hosts", f"The ranks cannot be connected: {error}.")
            print_problems(error)
            if collectives is not None and collectives.rank == 0:
                write_late_ending(RunFolder(run), "failed", str(error))
            return USER_ERROR
        if isinstance(channel, WorkerChannel):
            from backend.distributed.worker import work

            try:
                work(channel, collectives)
            except BaseException as error:
                traceback.print_exception(error)
                channel.fault(error)
                return USER_ERROR if isinstance(error, UserError) else BUG
            channel.close()
            return FINISHED
    code = BUG
    try:
        shared = None
        if channel is not None and collectives is not None:
            shared = _shared_by_leader(channel, collectives, backend, orders)
        code = _train(run, orders, stream, progress, shared)
    except UserError as error:
        print_problems(error)
        code = USER_ERROR
    except Exception:
        traceback.print_exc()
    finally:
        if channel is not None:
            channel.close()
    with suppress(OSError):
        orders.report(exit_code=code)  # the launcher cannot see it: mpirun would hide it
    return code


def _shared_by_leader(
    channel: LeaderChannel, collectives: MlxCollectives, backend: str, orders: ranks.Orders
) -> dict[str, Any]:
    from backend.distributed.leader import load_leader_context

    def report_lost(failure: UserError) -> None:
        if isinstance(failure, ranks.LostRankError):
            with suppress(OSError):
                orders.report(lost=[failure.rank, failure.faults[0].sentence])

    collectives.check, channel.on_failure = channel.check, report_lost
    orders.report(met=True)

    def load_context(config: Any, note: Callable[[str], None], *rest: Any) -> Any:
        for sentence in orders.notes:
            note(sentence)
        return load_leader_context(channel, collectives, backend, config, note, *rest)

    return {"load": load_context, "look": channel.check, "goes_on": orders.goes_on}


def _train(run: Path, orders: ranks.Orders, stream: bool, progress: bool | None, shared: dict[str, Any] | None) -> int:
    folder = RunFolder(run)
    try:
        if not orders.is_checked and not folder.has_event_log:
            prepared = prepared_run(run)
        else:
            check_format(folder)
            if not orders.is_checked:
                require_allowed(read(folder.config))
            prepared = PreparedRun(folder, load(folder.config), warnings=tuple(orders.warnings))
        train_or_exit(prepared, stream, progress, shared=shared, command=orders.command)
    except typer.Exit as ended:
        return ended.exit_code
    return FINISHED
