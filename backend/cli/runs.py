"""The verbs about existing runs: `runs`, `doctor`, `compare`, `replay`, `clone`, `change` and `track`."""

import json
import os
import sys
import threading
import time
from typing import Annotated, Literal

import typer

from backend.cli.common import (
    BUG,
    STOPPED,
    USER_ERROR,
    AllowCode,
    AsJson,
    Live,
    RunsDir,
    Stream,
    ignore_sighup,
    print_problems,
    tell,
    tell_json,
    verb,
)
from backend.cli.completions import Changes, RunName, checkpoints
from backend.cli.completions import changes as changes_offered
from backend.cli.training import PreparedRun, check_settings, parse_changes, train_and_exit
from backend.config.config import load, read
from backend.distributed.hosts_file import allow_hosts
from backend.rewards.allowed_code import allow_named, require_allowed
from backend.runs.events import Follower, has_finished
from backend.runs.run_folder import all_runs, find_run
from backend.runs.steering import changed, request_change, run_config
from backend.utils.disk import disk_fault, fault_of
from backend.utils.errors import UserError
from backend.utils.file_lock import held
from backend.utils.places import path_text, runs_folder
from backend.utils.text import quote


@verb
def runs(
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
    query: Annotated[str, typer.Option("--search", metavar="QUERY", help="e.g. 'lr>1e-5 tag:math -state:failed'")] = "",
    archived: Annotated[bool, typer.Option("--archived", help="Also the runs that are archived.")] = False,
) -> None:
    """List the runs, newest first."""
    from backend.runs.metric_names import MEASURES
    from backend.runs.run_record import read_record
    from backend.runs.run_search import all_keys, asks_for_archived, search

    records = [read_record(run) for run in all_runs(runs_dir)]
    passes = search(query, all_keys(records))
    shows_all = archived or asks_for_archived(query)
    found = [record for record in records if passes(record) and (shows_all or not record.notes.archived)]
    if as_json:
        return tell_json([record.to_dict() for record in found])
    from backend.cli.display import new_console, new_table

    console, table = new_console(), new_table("run", "state", "step", "reward", "model", "tags")
    for column in table.columns[console.width < 80 : 4]:
        column.no_wrap = True
    table.columns[0].min_width = 10
    if console.width >= 80:  # a long name would leave the model a letter or two a line
        longest = max((len(record.summary.name) for record in found), default=0)
        model_column = table.columns[4]
        model_column.no_wrap, model_column.overflow = True, "ellipsis"
        model_column.max_width = max(console.width - longest - 40, 3)
    for record in found:
        run = record.summary
        measure = "" if run.measure == "reward" else f"{MEASURES[run.measure]} "
        reward = "–" if run.reward_after is None else f"{measure}{run.reward_after:.3g}"
        name = quote(f"{run.name} ({record.notes.title})" if record.notes.title else run.name)
        star = "★ " if record.notes.favourite else ""
        steps = f"{run.step or 0}/{run.iterations or '–'}"
        model, tags = quote(path_text(run.model)), quote(" ".join(record.notes.tags))
        table.add_row(star + name, run.state, steps, reward, model, tags)
    nothing = "No run matches." if records else f"There are no runs yet in {runs_dir or runs_folder()}."
    console.print(table if found else nothing, soft_wrap=not found)


@verb
def doctor(run: RunName, runs_dir: RunsDir = None, as_json: AsJson = False) -> None:
    """Diagnose a run: problems, their steps and limits, and what to do about them."""
    from backend.trainer.health.rules import RULES
    from backend.trainer.health.watch import examine

    examination = examine(find_run(run, runs_dir))
    if as_json:
        return tell_json(examination.to_dict())
    counts = {"step": examination.steps, "evaluation": examination.evaluations}
    counted = ", ".join(f"{count:,} {name}{'s' * (count != 1)}" for name, count in counts.items())
    lines = [f"{examination.run}: {examination.state}, {counted}."]
    lines += [examination.sentence] if examination.sentence else []
    if not examination.steps:
        return tell("\n".join([*lines, "There is no finished step to look at."]))
    for episode in examination.episodes:
        since, until = f"{episode.since:,}", episode.until
        when = f"since step {since}" if until is None else f"steps {since} to {until:,}"
        proposal = " ".join(
            f"--set {key}={f'{value:g}' if isinstance(value, float) else json.dumps(value)}"
            for key, value in episode.settings.items()
            if key != "system_prompt"
        )
        lines += ["", f"{episode.title} ({episode.level}, {when})", f"    {episode.sentence}", f"    {episode.advice}"]
        lines += [f"    Proposed: {proposal}"] if proposal else []
    if not examination.episodes:
        looked_at = [RULES[code].title for code in examination.looked_at]
        lines += ["", f"Nothing found. Looked at: {'; '.join(looked_at)}." if looked_at else "Nothing found."]
    needed = {code: f"{steps} steps" for code, steps in examination.too_short.items()}
    for why, rules in (("is too short for", needed), ("did not measure", examination.not_measured)):
        missing = "; ".join(f"{RULES[code].title} ({lacks})" for code, lacks in rules.items())
        lines += ["", f"Not looked at, because the run {why} it: {missing}."] if missing else []
    tell("\n".join(lines))


@verb
def compare(
    names: Annotated[list[str], typer.Argument(metavar="RUN RUN …", help="Run folders, or names in the runs folder.")],
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Both tables in Markdown.")] = False,
) -> None:
    """Compare the settings and results of runs."""
    from backend.runs import run_record

    if len(names) < 2:
        raise UserError("run", "Name at least two runs to compare.")
    settings, results = run_record.compare([find_run(name, runs_dir) for name in names])
    if as_json:
        return tell_json({"settings": settings, "results": results})
    tables = [run_record.settings_table([one["title"] for one in results], settings), run_record.results_table(results)]
    if markdown:
        return tell("\n".join(map(run_record.as_markdown, tables)), end="")
    from backend.cli.display import new_console, new_table

    console = new_console()
    if not settings:
        console.print("Their settings are the same.\n")
    for head, *rows in [tables[0], [*zip(*tables[1], strict=True)]]:  # a column for each run in both
        if rows:
            table = new_table(*head)
            for row in rows:
                table.add_row(*row)
            console.print(table, end="\n\n")


@verb
def replay(
    run: RunName,
    speed: Annotated[float, typer.Option("--speed", help="How many times as fast as it was; 0: at once.")] = 1.0,
    runs_dir: RunsDir = None,
    name: Annotated[str, typer.Option("--name", help="Name of the new folder, instead of RUN-replay.")] = "",
) -> None:
    """Replay a recorded run into a new folder, in real time or faster. Trains nothing."""
    from backend.runs.replay import Replay

    playing = Replay(find_run(run, runs_dir), runs_dir, name, speed)
    tell(playing.folder.path, flush=True)
    playing.control.listen_to_signals()
    if not playing.play():
        raise typer.Exit(STOPPED)


@verb
@ignore_sighup
def clone(
    run: RunName,
    step: Annotated[
        str, typer.Option("--step", help="The checkpoint: a step, best or last.", autocompletion=checkpoints)
    ] = "last",
    warm: Annotated[bool, typer.Option("--warm/--cold", help="Go on from that step, or start at 0 from it.")] = True,
    changes: Changes = None,
    name: Annotated[str, typer.Option("--name", help="Name of the clone's folder.")] = "",
    reference: Annotated[
        Literal["base", "clone"],
        typer.Option("--reference", help="Of a cold clone: stay near the base model, or the weights it starts from."),
    ] = "base",
    start: Annotated[bool, typer.Option("--start", help="Train it at once.")] = False,
    allow_code: AllowCode = False,
    runs_dir: RunsDir = None,
    stream: Stream = False,
    progress: Live = None,
) -> None:
    """Make a new run from a checkpoint and print its folder. --start trains it."""
    parent, changed = find_run(run, runs_dir), parse_changes(changes or [])
    from backend.runs.clone import clone as make_clone
    from backend.runs.clone import clone_settings

    if changed:
        settings = clone_settings(parent, step, changed, warm=warm)[1].model_dump()
        allow_named(changed)
        require_allowed(settings, allow=allow_code)
        check_settings(settings)
    folder = make_clone(parent, step, changed, warm=warm, name=name, runs_dir=runs_dir, reference=reference)
    if start:
        require_allowed(read(folder.config), allow=allow_code)
        if changed.get("hosts"):
            allow_hosts(load(folder.config).hosts)
        train_and_exit(PreparedRun(folder, load(folder.config)), stream, progress)
    tell(folder.path)


POLL_S = 0.1
PATIENCE_S = 60.0  # the trainer checks for changes only between batches


@verb
def change(
    run: RunName,
    settings: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE …", help="What to change.", autocompletion=changes_offered)
    ],
    runs_dir: RunsDir = None,
) -> None:
    """Change settings of a training or paused run from its next step on, and print that step."""
    folder, asked = find_run(run, runs_dir), parse_changes(settings)
    if not folder.is_locked():
        more = ["iters=N"] if has_finished(folder) and "iters" not in asked else []
        resumed = f"resume {folder.name} {' '.join(f'--set {text}' for text in [*settings, *more])}"
        raise UserError("run", f"The run {folder.name} is not training; “{resumed}” goes on with other settings.")
    # With every problem at once, and before the trainer is asked, which checks it again.
    changed(run_config(folder), asked)
    with held(folder.config):  # one at a time: an answer does not name its request
        follower = Follower(folder.events)
        while follower.read():
            pass  # what was written before
        request_change(folder, asked)
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until and folder.is_locked():
            for event in follower.read():
                if event.get("answers") == "change":
                    if event.get("level") == "warning":
                        raise UserError("run", str(event["sentence"]))
                    return tell(event["sentence"])
            time.sleep(POLL_S)
    if not folder.is_locked():
        raise UserError("run", f"The run {folder.name} ended before it took the change.")
    tell(f"Asked; the trainer has not answered within {PATIENCE_S:.0f} s. Its event log will tell.")


@verb
def track(
    run: RunName,
    to: Annotated[str, typer.Option("--to", help="csv, tensorboard, trackio or wandb.")],
    runs_dir: RunsDir = None,
    upload: Annotated[bool, typer.Option("--upload", help="wandb only: send it to your account.")] = False,
) -> None:
    """Write a run's metrics and completions to a tracker, with TRL's metric names."""
    from backend.trainer.trackers.follow import track as follow
    from backend.trainer.trackers.targets import TRACKERS

    if to not in TRACKERS:
        raise UserError("to", f"There is no tracker {quote(to, 40)}; there are {', '.join(TRACKERS)}.")
    if upload and to != "wandb":
        raise UserError("upload", f"{to} uploads nothing; --upload goes with wandb.")
    folder = find_run(run, runs_dir)
    before = threading.excepthook

    def end(what: threading.ExceptHookArgs) -> None:
        """Exit if a tracker's thread dies, as tensorboardX's writer does on a full disk: it blocks the main thread."""
        error, code = what.exc_value, BUG
        if error is not None and fault_of(error) is not None:
            print_problems(disk_fault(folder.trackers / to, error))
            code = USER_ERROR
        else:
            before(what)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)

    threading.excepthook = end
    try:
        follow(folder, to, may_upload=upload, say=print)
    finally:
        threading.excepthook = before
    place = "your account at Weights & Biases" if upload else TRACKERS[to].place
    tell(f"What {to} writes of {folder.name} is in {place}.")
