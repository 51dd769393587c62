"""A run on several machines on the command line: its machines are checked, its ranks started, and its exit code is rank 0's."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from backend.cli.exit_codes import FINISHED
from backend.cli.new_run import PreparedRun
from backend.cli.restart import display_options
from backend.cli.run_log import IS_LOG_VARIABLE, say, stdout_is_log
from backend.config.config import SETTINGS, Config, parse
from backend.distributed.allowed_hosts import allow_hosts, require_hosts
from backend.distributed.hosts_file import launch_command
from backend.distributed.orders import Orders
from backend.runs.changeable import AT_RESUME
from backend.runs.run_lock import held_for_launch
from backend.runs.steering import run_config
from backend.utils.command import shell_line
from backend.utils.errors import UserError
from backend.utils.files import user_path

if TYPE_CHECKING:
    from backend.distributed.launching.launcher import Launch

NONE = "none"
"""In place of a hosts file: this machine alone."""


def hosts_setting(text: str | None) -> dict[str, Any]:
    """The settings that the option --hosts stands for. Raises UserError for what cannot be a path."""
    if text is None:
        return {}
    return {"hosts": "" if text == NONE else str(user_path(text, "hosts").absolute())}


def machine_settings(run: PreparedRun) -> Config:
    """The settings of a run with the changes that it is resumed with, as far as they decide where it trains. Raises UserError."""
    config = run_config(run.folder) if run.folder.has_event_log else run.settings
    asked = {key: value for key, value in run.changes.items() if key in AT_RESUME}
    return parse(
        config.model_dump() | {key: SETTINGS[key].default if value is None else value for key, value in asked.items()}
    )


def launch_and_exit(run: PreparedRun, config: Config, stream: bool, progress: bool | None) -> NoReturn:
    """Train on the machines of `config`, the settings of `machine_settings`; exit with the run's code. Raises UserError for a run that another
    process trains, and for machines that cannot train it."""
    from backend.distributed.launching.launcher import run_ranks

    if run.inputs is not None:
        run.inputs.scorer.close()  # rank 0 reads them again
    if run.lock is not None:
        os.close(run.lock)  # it is rank 0's
    with held_for_launch(run.folder):
        end = run_ranks(_prepared_launch(run, config, stream, progress))
    if end.sentence:
        say(end.sentence, sys.stderr)
    raise typer.Exit(end.exit_code if end.exit_code else FINISHED)


def _prepared_launch(run: PreparedRun, config: Config, stream: bool, progress: bool | None) -> Launch:
    """`_launch`, whose UserError ends the event log too: the window sees nothing but the folder."""
    from backend.distributed.launching.late_ending import write_late_ending

    # mpirun gives rank 0 a terminal of its own, whatever there is here.
    is_live = sys.stdout.isatty() if progress is None else progress
    if stdout_is_log(run.folder):
        os.environ[IS_LOG_VARIABLE] = "1"
    try:
        return _launch(run, config, display_options(stream, is_live))
    except UserError as mistake:
        write_late_ending(run.folder, "failed", " ".join(fault.sentence for fault in mistake.faults))
        raise


def _launch(run: PreparedRun, config: Config, options: Sequence[str]) -> Launch:
    """What is to be started. Raises UserError for machines that cannot train it, and for a hosts file that was never allowed here."""
    from backend.distributed.check.machine_check import check_machines_answer, plan_machines
    from backend.distributed.launching.launcher import Launch
    from backend.trainer.run_process import record_changes

    if run.changes.get("hosts"):  # named on the command line; the run folder's own may be somebody else's
        allow_hosts(config.hosts)
    require_hosts(config.hosts)
    planned = plan_machines(config)
    warnings = check_machines_answer(planned, config)
    record_changes(run.settings, run.folder, run.changes)
    by_hand = launch_command(planned.hosts, planned.file, planned.choice.backend, run.folder.path)
    say(f"{planned.choice.why} By hand it would be: {shell_line(by_hand)}", sys.stderr)
    orders = Orders(
        shell_line([*sys.argv]), is_checked=True, goes_on=config.on_lost_rank == "go_on", notes=planned.notes,
        warnings=[*run.warnings, *warnings],
    )  # fmt: skip
    return Launch(run.folder, planned.hosts, planned.choice.backend, orders, options)
