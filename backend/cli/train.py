"""The verbs `train`, `resume`, `job`, which trains as a job of Hugging Face with TRL, and `demo`."""

import os
import sys
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from backend.cli import sweep
from backend.cli.common import (
    FINISHED,
    STOPPED,
    AllowCode,
    AsJson,
    Hosts,
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
from backend.cli.completions import Changes, checkpoints, run_names
from backend.cli.display import new_console, new_table
from backend.cli.export import given_settings
from backend.cli.training import (
    PreparedRun,
    display,
    end_before_start,
    hosts_setting,
    new_run,
    parse_changes,
    prepared_run,
    read_settings,
    train_and_exit,
    train_or_exit,
    write_new_run,
)
from backend.config import updates
from backend.config.config import Config, load, parse, read
from backend.config.other_programs.translation import translate
from backend.jobs.job_file import read_job
from backend.rewards.allowed_code import require_allowed
from backend.runs.events import check_format, has_finished, is_paused, last_event
from backend.runs.run_folder import RunFolder, find_run, hold_lock
from backend.runs.saved_weights import find_checkpoint
from backend.runs.sweep_results import find_sweep
from backend.trainer.control import StopPending
from backend.trainer.machine import relax_gpu_timeout
from backend.utils.errors import UserError
from backend.utils.files import resolved, user_path
from backend.utils.places import demo_config, resources

LENGTHENING = {"iters", "stop_when", "early_stopping_patience"}  # settings that can extend a finished run
GO_ON = {"stop_when": "stop_when=[]", "early_stopping": "early_stopping_patience=0"}  # after such an end; else iters


@verb
@ignore_sighup
def train(
    config: Annotated[Path | None, typer.Argument(help="The settings, a YAML file.")] = None,
    run: Annotated[Path | None, typer.Option("--run", help="Train in this folder, which holds config.yaml.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Without a YAML file: a Hub id or a folder.")] = None,
    data: Annotated[str | None, typer.Option("--data", help="With --model: a dataset's id, file or folder.")] = None,
    runs_dir: RunsDir = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the run folder.")] = None,
    changes: Changes = None,
    hosts: Hosts = None,
    allow_code: AllowCode = False,
    stream: Stream = False,
    progress: Live = None,
) -> None:
    """Train from a YAML file, or with --model, --data and --set without one; prints the run folder."""
    if sum(each is not None for each in (config, run, model)) != 1 or (data is not None and model is None):
        raise UserError("config", "Give a YAML file, --model with --data, or --run with a run folder.")
    if run is not None:
        if name or changes or runs_dir or hosts:
            what = "--set, --name, --hosts and --runs-dir go with a YAML file"
            raise UserError("run", f"{what}; the folder of --run is as it is.")
        prepared = prepared_run(run, allow_code=allow_code)
    else:
        given = {"model": model} | ({"data": data} if data is not None else {})
        raw, origin = (given | parse_changes(changes or []), "") if config is None else read_settings(config, changes)
        prepared = new_run(raw | hosts_setting(hosts), runs_dir, name, origin)
    train_and_exit(prepared, stream, progress)


@verb
@ignore_sighup
def resume(
    run: Annotated[str, typer.Argument(help="A run or a sweep: its folder or its name.", autocompletion=run_names)],
    runs_dir: RunsDir = None,
    changes: Changes = None,
    step: Annotated[
        str | None,
        typer.Option("--step", help="Go back to this checkpoint, a step or best.", autocompletion=checkpoints),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="With --step: take the later steps back without asking.")] = False,
    hosts: Hosts = None,
    allow_code: AllowCode = False,
    stream: Stream = False,
    progress: Live = None,
) -> None:
    """Resume from the newest complete checkpoint, or start over without one; let a paused run go on.

    --set iters=N extends a finished run. --step goes back to a checkpoint; a clone keeps both. Also resumes sweeps.
    """
    if find_sweep(run, runs_dir) is not None:
        if hosts or changes or step is not None:
            sentence = "A sweep goes on here as its file says; --hosts, --set and --step go with a single run."
            raise UserError("sweep", sentence)
        return sweep.resume_sweep(run, runs_dir, allow_code=allow_code)
    folder = find_run(run, runs_dir)
    check_format(folder)  # before its settings, of which a newer version may have others
    if read_job(folder) is not None and not has_finished(folder):
        if changes or hosts or step is not None:
            raise UserError("run", f"The run {folder.name} is a Hugging Face job, which goes on as it was submitted.")
        lock = hold_lock(folder)
        folder.control.unlink(missing_ok=True)  # of a process that is no more
        return follow_and_exit(folder, load(folder.config), lock, stream, progress)
    if is_paused(folder) and not (changes or hosts) and step is None:
        folder.say("resume")
        return tell(f"The run {folder.name} goes on.")
    is_over = has_finished(folder) and step is None
    if is_over and not changes:
        asks = GO_ON.get(last_event(folder).get("reason", ""), "iters=N")
        more = f" More steps: --set {asks}." if folder.checkpoints.is_dir() else ""  # a replay has none
        return tell(f"The run {folder.name} has finished; there is nothing to resume.{more}")
    require_allowed(read(folder.config), allow=allow_code)
    from backend.trainer.library.own_functions import require_no_program, require_rollout

    settings, asked = load(folder.config), parse_changes(changes or []) | hosts_setting(hosts)
    require_no_program(settings)
    require_rollout(folder.path)
    updates.require_no_program(settings)
    if is_over and not translate(asked).values.keys() & LENGTHENING:
        raise UserError("iters", f"The run {folder.name} has finished; give it more steps as well, with --set iters=N.")
    relax_gpu_timeout(settings)
    warnings = () if step is None else _taken_back(folder, step, yes=yes)
    train_and_exit(PreparedRun(folder, settings, changes=asked, warnings=warnings), stream, progress)


def _taken_back(run: RunFolder, which: str, *, yes: bool) -> tuple[str, ...]:
    from backend.runs.checkpoint import go_back, last_step

    chosen, last = find_checkpoint(run, which).step, last_step(run)
    if last <= chosen:
        return ()
    taken = f"step {last}" if last == chosen + 1 else f"steps {chosen + 1} to {last}"
    sentence = f"Going on from step {chosen} deletes {taken} of this run for good"
    if not yes:
        if not sys.stdin.isatty():
            raise UserError("step", f"{sentence}; add --yes, or keep both: clone {run.name} --step {chosen} --start.")
        typer.confirm(f"{sentence} (a clone would keep both). Go on?", abort=True)
    return (go_back(run, which),)


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
    folder = None if run is None else RunFolder(resolved(user_path(str(run), "run")))
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


@verb
@ignore_sighup
def demo(
    runs_dir: RunsDir = None,
    iters: Annotated[int | None, typer.Option(help="Steps, in place of the preset's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed, in place of the preset's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
    tools: Annotated[bool, typer.Option("--tools", help="Learn to call a calculator instead.")] = False,
    images: Annotated[bool, typer.Option("--images", help="Learn to count shapes in pictures instead.")] = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Make the bundled model and data again.")] = False,
    stream: Stream = False,
    progress: Live = None,
) -> None:
    """Train the bundled model on bundled sums, and measure its accuracy before and after."""
    if tools and images:
        raise UserError("images", "--tools and --images are two demos; choose one.")
    name = "shapes" if images else "calculator" if tools else "demo"
    if rebuild:
        if name != "demo":
            sentence = f"--rebuild makes the sums again; this demo is made by packaging/{name}_demo.py in a checkout."
            raise UserError("rebuild", sentence)
        from backend.demo import rebuild as make_again

        return make_again(resources() / name, progress=print)
    start = time.monotonic()
    changes = {key: value for key, value in (("iters", iters), ("seed", seed)) if value is not None}
    settings = read(demo_config(name)) | changes
    from backend.demo import test_accuracy

    before = test_accuracy(parse(settings), None)
    sentences = sys.stderr if as_json else sys.stdout
    tell(f"Before: {before:.0%} of the test questions are answered right.", file=sentences, flush=True)
    demo_run = new_run(settings, runs_dir, None)
    train_or_exit(demo_run, stream, progress, quiet=as_json)
    after = test_accuracy(demo_run.settings, demo_run.folder)
    tell(f"After:  {after:.0%}.", file=sentences, flush=True)
    seconds = round(time.monotonic() - start, 1)
    if as_json:
        tell_json({"run": str(demo_run.folder.path), "before": before, "after": after, "seconds": seconds})
