"""The verbs `bench device` and `bench report`: measure this machine, and show what was measured on this one and others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from backend.cli.exit_codes import STOPPED, verb
from backend.cli.output import tell
from backend.utils.errors import UserError

bench = typer.Typer(help="Measure speed and memory on this machine.", no_args_is_help=True)

MINUTES, QUICK_MINUTES = 10.0, 1.0


@bench.command("device")
@verb
def bench_device(
    minutes: Annotated[
        float | None, typer.Option(min=0.05, help="The most minutes it may take; 10, or 1 with --quick.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models, a minute.")] = False,
    out: Annotated[Path, typer.Option("--out", help="The folder for the file.")] = Path(),
) -> None:
    """Sampling, learning, memory and precision on random models of Qwen3's sizes; downloads nothing. Writes one JSON file."""
    if not out.is_dir():
        raise UserError("out", f"There is no folder {out}.")
    from backend.bench import about, command, plan, report

    device = about.this_machine()
    scale = plan.scale_for(device.computes_on, quick)
    if device.computes_on == "cpu" and not quick:
        tell("MLX computes on a CPU here, so the models are small.")
    result, path = command.bench_device(minutes or (QUICK_MINUTES if quick else MINUTES), scale, device, out)
    for table in report.tables(result):
        table.show()
    tell(f"{report.provenance(result)}\n\nWritten: {path}. {command.SEND}")
    if result.ended == "interrupted":
        raise typer.Exit(STOPPED)


@bench.command("report")
@verb
def bench_report(
    files: Annotated[list[Path], typer.Argument(help="Files that bench device wrote.")],
) -> None:
    """The tables of such files as Markdown, a section for each."""
    from backend.bench import report, schema

    read = []
    for path in files:
        try:
            read.append(schema.read(path))
        except OSError as error:
            raise UserError("files", f"{path} cannot be read: {error.strerror}.") from None
        except ValueError:
            raise UserError("files", f"{path} is not a file that bench device of this version wrote.") from None
    tell(report.markdown(read))
