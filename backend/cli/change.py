"""The verb `change`: settings of a run that is training, changed from its next step on."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from backend.cli.completions import changes as changes_offered
from backend.cli.completions import run_names
from backend.cli.exit_codes import verb
from backend.cli.new_run import parse_changes
from backend.cli.options import ExistingRunsDir
from backend.cli.output import tell
from backend.runs.events import Follower
from backend.runs.run_folder import RunFolder, find_run
from backend.runs.steering import changed, request_change, run_config
from backend.utils.errors import UserError

POLL_S = 0.1
PATIENCE_S = 60.0
"""How long the answer is waited for: the trainer looks between two bursts of work, which take seconds at most but for rewards."""


@verb
def change(
    run: Annotated[str, typer.Argument(help="A run folder, or its name.", autocompletion=run_names)],
    settings: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE …", help="What to change.", autocompletion=changes_offered)
    ],
    runs_dir: ExistingRunsDir = None,
) -> None:
    """Change settings of a run that is training or paused, from its next step on. Tells which step that is."""
    folder, asked = find_run(run, runs_dir), parse_changes(settings)
    if not folder.is_locked():
        resumed = f"resume {folder.name} {' '.join(f'--set {text}' for text in settings)}"
        raise UserError("run", f"The run {folder.name} is not training; “{resumed}” goes on with other settings.")
    # With every fault at once, and before the trainer is asked, which checks it again.
    changed(run_config(folder), asked)
    tell(_answer(folder, asked))


def _answer(folder: RunFolder, asked: dict[str, object]) -> str:
    """Ask, and wait for the trainer's answer, a note of the event log. Raises UserError for a refusal."""
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
                return str(event["sentence"])
        time.sleep(POLL_S)
    if not folder.is_locked():
        raise UserError("run", f"The run {folder.name} ended before it took the change.")
    return f"Asked; the trainer has not answered within {PATIENCE_S:.0f} s. Its event log will tell."
