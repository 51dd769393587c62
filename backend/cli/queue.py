"""The verbs `queue list`, `add`, `remove`, `move`, `run`, `pause` and `resume`."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from backend.cli import help_page
from backend.cli.common import STOPPED, AllowCode, AsJson, RunsDir, ignore_sighup, stoppable, tell, tell_json, verb
from backend.cli.completions import Changes, run_names
from backend.config.config import read
from backend.rewards.allowed_code import require_allowed
from backend.runs.queue import QueueFile, train_queue
from backend.runs.run_folder import find_run
from backend.utils.errors import UserError
from backend.utils.files import exists, is_folder
from backend.utils.text import quote

queue = typer.Typer(no_args_is_help=True, help="Runs that wait their turn.", epilog=help_page.epilog("queue"))

WaitingRun = Annotated[str, typer.Argument(help="A run that waits, by name.", autocompletion=run_names)]
REMOVED = ("config.yaml", "log.txt", "about.json")  # `remove` deletes a folder with nothing but these


@queue.command("list")
@verb
def list_runs(runs_dir: RunsDir = None, as_json: AsJson = False) -> None:
    """List the waiting runs in order."""
    file = QueueFile(runs_dir)
    now = file.read()
    names = [run.name for run in now.waiting]
    if as_json:
        about = {"waiting": names, "paused": now.is_paused, "pause_after_failure": now.pauses_after_failure}
        return tell_json(about | {"running": file.has_runner()})
    for place, name in enumerate(names, 1):
        tell(f"{place}  {name}")
    tell(_state_sentence(file))


@queue.command()
@verb
def add(
    config: Annotated[Path, typer.Argument(help="The settings, a YAML file; or a run that is to begin or go on.")],
    runs_dir: RunsDir = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the run folder.")] = None,
    changes: Changes = None,
    first: Annotated[bool, typer.Option("--first", help="Before the runs that wait already.")] = False,
    allow_code: AllowCode = False,
) -> None:
    """Add a new run after checking its settings, or one that was stopped, crashed or cloned; prints its folder."""
    from backend.cli.training import new_run, read_settings
    from backend.distributed.hosts_file import require_hosts
    from backend.runs.steering import run_config

    if is_folder(config) or (not exists(config) and is_folder(QueueFile(runs_dir).folder / config)):
        if name or changes:
            raise UserError("config", "--set and --name go with a YAML file; a run folder is as it is.")
        run = find_run(config, runs_dir)
        require_allowed(read(run.config), run.path, allow=allow_code)
        require_hosts(run_config(run).hosts)
        file = QueueFile(runs_dir or run.path.parent)
    else:
        file = QueueFile(runs_dir)
        file.read()  # a broken queue is told before a folder is made for it
        raw, origin = read_settings(config, changes)
        run = new_run(raw, runs_dir, name, origin).folder
    file.add(run, first=first)
    tell(run.path)
    tell(_state_sentence(file))


@queue.command()
@verb
def remove(run: WaitingRun, runs_dir: RunsDir = None) -> None:
    """Remove a run from the queue, and delete its folder if it contains only settings."""
    file = QueueFile(runs_dir)
    folder = find_run(run, file.folder)
    file.remove(folder)
    if others := sorted(path.name for path in folder.path.iterdir() if path.name not in REMOVED):
        return tell(f"{folder.name} is out of the queue. Its folder stays, as it holds {quote(', '.join(others))}.")
    shutil.rmtree(folder.path)
    tell(f"{folder.name} is out of the queue, and its settings are deleted.")


@queue.command()
@verb
def move(
    run: WaitingRun,
    place: Annotated[int, typer.Argument(min=1, help="Its new place; 1 is the next to train.")],
    runs_dir: RunsDir = None,
) -> None:
    """Move a waiting run to another position."""
    file = QueueFile(runs_dir)
    file.move(find_run(run, file.folder), place - 1)
    list_runs(runs_dir)


@queue.command("run")
@verb
@ignore_sighup
def run_queue(runs_dir: RunsDir = None) -> None:
    """Train the waiting runs one after the other until the queue is empty. Waits for a run that is already training."""
    file = QueueFile(runs_dir)
    if file.read().is_paused:
        raise UserError("queue", "The queue is paused; `queue resume` lets it go on.")
    with stoppable("\nThe queue stops here. A run that trains goes on; `queue run` goes on with the rest.", tell):
        reason = train_queue(file, lambda sentence: tell(sentence, flush=True))
    tell(_state_sentence(file))
    if reason == "paused":
        raise typer.Exit(STOPPED)


@queue.command()
@verb
def pause(
    runs_dir: RunsDir = None,
    after_failure: Annotated[
        bool | None,
        typer.Option("--after-failure/--not-after-failure", help="Not now, but (or no longer) whenever a run fails."),
    ] = None,
) -> None:
    """Pause the queue. A run that is training continues."""
    file = QueueFile(runs_dir)
    if after_failure is None:
        file.change(is_paused=True)
    else:
        file.change(pauses_after_failure=after_failure)
    tell(_state_sentence(file))


@queue.command()
@verb
def resume(runs_dir: RunsDir = None) -> None:
    """Resume the queue."""
    file = QueueFile(runs_dir)
    file.change(is_paused=False)
    tell(_state_sentence(file))


def _state_sentence(file: QueueFile) -> str:
    now = file.read()
    count = len(now.waiting)
    waits = "No run waits." if not count else "1 run waits." if count == 1 else f"{count} runs wait."
    after = " A failure pauses it." if now.pauses_after_failure else ""
    if now.is_paused:
        return f"{waits} The queue is paused; `queue resume` lets it go on.{after}"
    if count and not file.has_runner():
        return f"{waits} `queue run` trains them.{after}"
    return f"{waits}{after}"
