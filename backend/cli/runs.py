"""The verb `runs`: the archive of runs."""

from __future__ import annotations

import json

from backend.cli.exit_codes import verb
from backend.cli.options import AsJson, ExistingRunsDir


@verb
def runs(runs_dir: ExistingRunsDir = None, as_json: AsJson = False) -> None:
    """List the runs, newest first."""
    from backend.spec.archive import summary
    from backend.spec.places import all_runs

    summaries = [summary(run) for run in all_runs(runs_dir)]
    if as_json:
        print(json.dumps([run.to_dict() for run in summaries], ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("run", "state", "step", "reward", "model", box=None)
    for run in summaries:
        reward = "–" if run.reward is None else f"{run.reward:.3g}"
        table.add_row(run.name, run.state, f"{run.step or 0}/{run.iterations or '–'}", reward, run.model)
    Console().print(table if summaries else "There are no runs yet.")
