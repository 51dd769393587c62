"""The verb `runs`: the archive of runs."""

from __future__ import annotations

from typing import Annotated

import typer

from backend.cli.exit_codes import verb
from backend.cli.options import AsJson, ExistingRunsDir
from backend.cli.output import tell_json


@verb
def runs(
    runs_dir: ExistingRunsDir = None,
    as_json: AsJson = False,
    query: Annotated[str, typer.Option("--search", metavar="QUERY", help="e.g. 'lr>1e-5 tag:math -state:failed'")] = "",
    archived: Annotated[bool, typer.Option("--archived", help="Also the runs that are archived.")] = False,
) -> None:
    """List the runs, newest first."""
    from backend.runs.run_folder import all_runs
    from backend.runs.run_record import read_record
    from backend.runs.run_search import all_keys, asks_for_archived, search
    from backend.utils.text import quote

    records = [read_record(run) for run in all_runs(runs_dir)]
    passes = search(query, all_keys(records))
    shows_all = archived or asks_for_archived(query)
    found = [record for record in records if passes(record) and (shows_all or not record.notes.archived)]
    if as_json:
        tell_json([record.to_dict() for record in found])
        return
    from rich.table import Table

    from backend.cli.consoles import new_console

    table = Table("run", "state", "step", "reward", "model", "tags", box=None)
    for record in found:
        run = record.summary
        reward = "–" if run.reward is None else f"{run.reward:.3g}"
        name = quote(f"{run.name} ({record.notes.title})" if record.notes.title else run.name)
        star = "★ " if record.notes.favourite else ""
        steps = f"{run.step or 0}/{run.iterations or '–'}"
        table.add_row(star + name, run.state, steps, reward, quote(run.model), quote(" ".join(record.notes.tags)))
    nothing = "No run matches." if records else "There are no runs yet."
    new_console().print(table if found else nothing)
