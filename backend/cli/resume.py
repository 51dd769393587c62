"""The verb `resume`: continue a run from its newest complete checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from backend.cli import sweep
from backend.cli.completions import changes as changes_offered
from backend.cli.completions import run_names
from backend.cli.exit_codes import verb
from backend.cli.gpu_timeout import relax_gpu_timeout
from backend.cli.lost_terminal import outlives_terminal
from backend.cli.new_run import PreparedRun, parse_changes
from backend.cli.options import AllowCode, Live, NewRunsDir, Stream
from backend.cli.run_session import train_and_exit
from backend.spec.config import load, read
from backend.spec.diary_ends import has_finished
from backend.spec.faults import Mistake
from backend.spec.other_programs.translation import translate
from backend.spec.places import find_run
from backend.spec.rewards.allowed_code import require_allowed
from backend.spec.runs.run_format import check_format
from backend.spec.sweeps.sweep_results import find_sweep


@verb
@outlives_terminal
def resume(
    run: Annotated[str, typer.Argument(help="A run or a sweep: its folder or its name.", autocompletion=run_names)],
    runs_dir: NewRunsDir = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value, from the next step on.", autocompletion=changes_offered),
    ] = None,
    allow_code: AllowCode = False,
    stream: Stream = False,
    progress: Live = None,
) -> None:
    """Go on from the newest whole checkpoint; without one, start over. With --set iters=N a finished run goes on too.

    A sweep goes on with all of its runs.
    """
    if find_sweep(run, runs_dir) is not None:
        if changes:
            raise Mistake("set", "The settings of a sweep are those of its file; change those of a single run.")
        return sweep.resume_sweep(run, runs_dir, allow_code=allow_code)
    folder = find_run(run, runs_dir)
    check_format(folder)  # before its settings, of which a newer version may have others
    if has_finished(folder) and not changes:
        print(f"The run {folder.name} has finished; there is nothing to resume. More steps: --set iters=N.")
        return
    require_allowed(read(folder.config), allow=allow_code)
    settings, asked = load(folder.config), parse_changes(changes or [])
    if has_finished(folder) and not translate(asked)[0].keys() & LENGTHENING:
        raise Mistake("iters", f"The run {folder.name} has finished; give it more steps as well, with --set iters=N.")
    relax_gpu_timeout(settings)
    train_and_exit(PreparedRun(folder, settings, changes=asked), stream, progress)


LENGTHENING = {"iters", "stop_when", "early_stopping_patience"}
"""Settings without which a finished run has no step left."""
