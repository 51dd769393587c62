"""The verb `job`: train a run as a job of Hugging Face, with TRL."""

import os
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from backend.cli.common import (
    FINISHED,
    STOPPED,
    AllowCode,
    AsJson,
    Live,
    RunsDir,
    Stream,
    ignore_sighup,
    logging_to,
    tell,
    tell_error,
    tell_json,
    verb,
)
from backend.cli.display import new_console, new_table
from backend.cli.export import given_settings
from backend.cli.training import display, end_before_start, write_new_run
from backend.config.config import Config, load
from backend.jobs.job_file import read_job
from backend.runs.run_folder import RunFolder, hold_lock
from backend.trainer.control import StopPending
from backend.utils.errors import UserError
from backend.utils.files import user_path


@verb
@ignore_sighup
def job(
    settings: Annotated[str | None, typer.Argument(metavar="[SETTINGS|RUN]", help="A YAML file, or a run.")] = None,
    run: Annotated[Path | None, typer.Option("--run", help="Train in this folder, which holds config.yaml.")] = None,
    flavor: Annotated[str, typer.Option("--flavor", help="The machine; --hardware lists them.")] = "",
    timeout: Annotated[float, typer.Option("--timeout", help="Hours after which the job is ended.")] = 6.0,
    owner: Annotated[str, typer.Option("--owner", help="Who pays: you, or an organisation.")] = "",
    name: Annotated[str | None, typer.Option("--name", help="Name of the run folder.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Submit without asking.")] = False,
    hardware: Annotated[bool, typer.Option("--hardware", help="List machines and prices.")] = False,
    as_json: AsJson = False,
    allow_code: AllowCode = False,
    runs_dir: RunsDir = None,
    stream: Stream = False,
    progress: Live = None,
) -> None:
    """Train with TRL on Hugging Face's GPUs, followed as a run. Ctrl-C leaves the job; resume follows it again."""
    from backend.jobs import hub_jobs

    if hardware:
        found = hub_jobs.hardware()
        if as_json:
            return tell_json({"hardware": [asdict(each) for each in found]})
        table = new_table("flavor", "GPU", "memory", "$ an hour", right=slice(3, 4))
        for each in found:
            table.add_row(each.name, each.accelerator, each.memory, f"{each.usd_per_hour:.2f}")
        return new_console().print(table)
    if (settings is None) == (run is None):
        raise UserError("config", "Give a YAML file or a run, or --run with a run folder; --hardware lists machines.")
    if not timeout > 0:
        raise UserError("timeout", "The time-out must be more than 0 hours.")
    folder = None if run is None else RunFolder(Path(os.path.realpath(user_path(str(run), "run"))))
    if folder is not None and (folder.has_event_log or folder.job.exists()):
        raise UserError("run", f"The run {folder.name} has begun already; resume it, or start another.")
    lock = None if folder is None else hold_lock(folder)
    try:
        config = load(folder.config) if folder else given_settings(str(settings), runs_dir, allow_code)[0]
        machine = hub_jobs.choose(flavor)
        most = machine.usd_per_hour * timeout
        cost = f"{machine.title}: ${machine.usd_per_hour:.2f} an hour, ${most:.2f} at most in {timeout:g} hours."
        tell_error(cost)
        if not yes:
            if not sys.stdin.isatty():
                raise UserError("yes", f"{cost} Add --yes to submit.")
            typer.confirm("Submit?", abort=True)
        folder = folder or write_new_run(config.model_copy(update={"run_name": name or ""}), runs_dir)
        lock = hold_lock(folder) if lock is None else lock
        folder.control.unlink(missing_ok=True)  # of a process that is no more
        from backend.jobs.follow import submit_run

        submit_run(folder, config, machine, timeout, owner, tell_error)
    except UserError as error:
        if folder is not None and lock is not None:
            end_before_start(folder, lock, "failed", str(error))
        raise
    except StopPending:
        assert folder is not None and lock is not None
        end_before_start(folder, lock, "stopped", "Stopped before the job was submitted.")
        raise typer.Exit(STOPPED) from None
    follow_and_exit(folder, config, lock, stream, progress)


def follow_and_exit(run: RunFolder, config: Config, lock: int, stream: bool, progress: bool | None) -> NoReturn:
    """Follow the job of a run whose lock this process holds; exit with its code, or STOPPED after Ctrl-C."""
    from backend.jobs.follow import Follower

    job = read_job(run)
    assert job is not None
    if not stream:
        tell(run.path, flush=True)
    try:
        with (
            logging_to(run) as write_log,
            display(stream, progress, False, config.steps_per_report) as echo,
            closing(Follower(run, config, job, echo, write_log, tell_error)) as follower,
        ):
            code, sentence = follower.follow()
    except KeyboardInterrupt:
        tell_error(f"The job trains on. To follow it again: resume {run.name}")
        code, sentence = STOPPED, ""
    finally:
        os.close(lock)
    if sentence:
        tell(sentence, file=sys.stderr if code else sys.stdout, flush=True)
    raise typer.Exit(code or FINISHED)
