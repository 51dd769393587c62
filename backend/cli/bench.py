"""The verbs `bench device` and `bench report`: measure this machine, and show what was measured on this one and others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from backend.cli.exit_codes import STOPPED, verb
from backend.cli.output import tell
from backend.utils.errors import UserError

bench = typer.Typer(help="Measure speed and memory on this machine.", no_args_is_help=True)


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
    try:
        if not out.is_dir():
            raise UserError("out", f"There is no folder {out}.")
    except OSError as error:
        raise UserError("out", f"{error.strerror}.") from None
    from rich.console import Console

    from backend.bench import report
    from backend.bench.device import DeviceBench, scale_for
    from backend.engine.cpu import blas

    blas.prepare()
    from backend.engine.device import on_gpu
    from backend.trainer.machine import KeepAwake

    if not on_gpu() and not quick:
        tell("MLX computes on a CPU here, so the models are small.")
    bench = DeviceBench(scale_for(on_gpu(), quick), minutes or (1.0 if quick else 10.0), out)
    console, awake = Console(), KeepAwake(tell)
    interrupted = False
    awake.start()
    try:
        with console.status("") as status:
            for task, outcome in bench.run():
                status.update(f"{task.model_name}: {task.measure} …")
                if outcome is not None:
                    console.print(report.line(outcome), highlight=False, markup=False, soft_wrap=True)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        awake.stop()
    file = report.read(bench.path)
    for table in report.tables(file):
        table.show()
    tell(f"{report.provenance(file)}\n\nWritten: {bench.path}.")
    tell(
        "Please attach it to an issue of the project: it holds the chip, versions and these numbers, nothing of yours."
    )
    if interrupted:
        raise typer.Exit(STOPPED)


@bench.command("report")
@verb
def bench_report(
    files: Annotated[list[Path], typer.Argument(help="Files that bench device wrote.")],
) -> None:
    """The tables of such files as Markdown, a section for each."""
    from backend.bench import report

    read = []
    for path in files:
        try:
            read.append(report.read(path))
        except OSError as error:
            raise UserError("files", f"{path} cannot be read: {error.strerror}.") from None
        except ValueError:
            raise UserError("files", f"{path} was not written by bench device.") from None
    tell(report.markdown(read))
