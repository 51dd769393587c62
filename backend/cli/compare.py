"""The verb `compare`: the settings in which runs differ, and what each has reached."""

from __future__ import annotations

from typing import Annotated

import typer

from backend.cli.exit_codes import verb
from backend.cli.options import AsJson, ExistingRunsDir
from backend.cli.output import tell, tell_json
from backend.utils.errors import UserError


@verb
def compare(
    names: Annotated[list[str], typer.Argument(metavar="RUN RUN …", help="Run folders, or names in the runs folder.")],
    runs_dir: ExistingRunsDir = None,
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Both tables in Markdown.")] = False,
) -> None:
    """Show the settings in which runs differ, and their results."""
    from backend.runs import run_comparison
    from backend.runs.run_folder import find_run

    if len(names) < 2:
        raise UserError("run", "Name at least two runs to compare.")
    settings, results = run_comparison.compare([find_run(name, runs_dir) for name in names])
    if as_json:
        tell_json({"settings": settings, "results": [one.to_dict() for one in results]})
        return
    tables = [
        run_comparison.settings_table([one.title for one in results], settings),
        run_comparison.results_table(results),
    ]
    if markdown:
        tell("\n".join(map(run_comparison.as_markdown, tables)), end="")
        return
    from rich.table import Table

    from backend.cli.consoles import new_console

    console = new_console()
    for rows in tables:
        if len(rows) > 1:
            table = Table(*rows[0], box=None)
            for row in rows[1:]:
                table.add_row(*row)
            console.print(table, end="\n\n")
        else:
            console.print("Their settings are the same.\n")
