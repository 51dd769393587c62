"""The verbs about machines: `where`, `machines`, `bench` and `serve`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from backend.cli.common import STOPPED, USER_ERROR, AsJson, tell, tell_error, tell_json, verb
from backend.trainer.memory.estimate import format_bytes
from backend.utils.disk_faults import gigabytes
from backend.utils.errors import UserError
from backend.utils.files import is_folder

if TYPE_CHECKING:
    from backend.distributed.machine_report import MachineReport


@verb
def where(
    remove: Annotated[str, typer.Option(metavar="<settings|kernels>", help="List these, with --yes delete them.")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="With --remove: delete, and do not only list.")] = False,
    as_json: AsJson = False,
) -> None:
    """List every folder that GRPO Studio writes to, with sizes; --remove deletes after a confirmation."""
    from backend.utils import stored

    if yes and not remove:
        raise UserError("yes", "--yes goes with --remove settings or --remove kernels.")
    if remove:
        files = stored.remove(remove) if yes else stored.removable_files(remove)
        if as_json:
            tell_json({"deleted": yes, "files": [str(path) for path in files]})
            return
        for path in files:
            tell(path)
        done = "Deleted." if yes else f"Would be deleted by: where --remove {remove} --yes"
        tell(done if files else "There is nothing to delete.")
        return
    rows = stored.stored_places()
    if as_json:
        tell_json([row.to_dict() for row in rows])
        return
    for row in rows:
        size = f"{row.bytes / 1e6:,.1f} MB in {row.files:,} files" if row.files else "nothing yet"
        shared = ", shared with other programs" if row.is_shared else ""
        tell(f"{row.title}: {size}{shared}\n    {row.path}\n    {row.remedy}")


@verb
def serve() -> None:
    """Answer the window's requests, as JSON lines on stdin and stdout, until stdin closes."""
    from backend.serve.loop import run

    run()


COLUMNS = (
    *("rank", "machine", "chip", "memory", "free", "for a run", "disk free"),
    *("system", "Python", "mlx", "mlx-lm", "GRPO Studio", "model"),
)
LEVEL_WORDS = {"refuse": "Refused", "warn": "Warning", "info": "Note"}


@verb
def machines(
    file: Annotated[Path, typer.Argument(help="The hosts file, as mlx.launch takes it.")],
    model: Annotated[str, typer.Option("--model", metavar="M", help="Look for this model on every machine.")] = "",
    reward_file: Annotated[str, typer.Option("--reward-file", metavar="F", help="Look for this file.")] = "",
    backend: Annotated[str, typer.Option(metavar="B", help="Measure over ring, mpi, jaccl or nccl.")] = "auto",
    copy: Annotated[bool, typer.Option("--copy", help="Copy the model (up to 8 GB) to machines that lack it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check the machines of a hosts file: access, versions, memory, disk, model, and network speed.

    Exits with 2 if a run could not start. Leaves no process running. Runs that name the file may use it afterwards.
    """
    from backend.distributed.hosts_file import WANTED, allow_hosts, read_hosts
    from backend.distributed.machine_check import CheckProgress, Wanted, check_machines

    if backend not in WANTED:
        raise UserError("backend", f"--backend must be one of {', '.join(WANTED)}.")
    if copy and not model:
        raise UserError("copy", "--copy needs --model, the model to copy.")
    hosts, told = read_hosts(file), set[tuple[int, int]]()
    allow_hosts(str(file))

    def reached(rank: int, stage: str, share: float | None) -> None:
        tenths = int(10 * share) if share is not None else 0
        if stage == "copying" and (rank, tenths) not in told:  # copies take minutes, everything else seconds
            told.add((rank, tenths))
            tell_error(f"copying to {hosts.label(rank)}: {10 * tenths} %")

    report = check_machines(hosts, file.name, Wanted(backend, model, reward_file, copy), CheckProgress(reached))
    if as_json:
        tell_json(report.to_dict())
    else:
        _print(report, bool(model))
    if report.refusals:
        raise typer.Exit(USER_ERROR)


def _print(report: MachineReport, with_model: bool) -> None:
    from rich.table import Table

    from backend.cli.display import new_console, print_line

    # Wide enough for every column in a file.
    console = new_console() if sys.stdout.isatty() else new_console(width=200)
    columns = COLUMNS if with_model else COLUMNS[:-1]
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[3:7]:
        column.justify = "right"
    for machine in report.machines:
        facts = machine.facts
        if facts is None:
            table.add_row(str(machine.rank), machine.label, "not reached")
            continue
        cells = [
            str(machine.rank),
            facts.machine or machine.label,
            facts.chip,
            *map(format_bytes, [facts.memory, facts.memory_free, facts.memory_usable]),
            "–" if facts.disk_free is None else gigabytes(facts.disk_free),
            *(facts.system, facts.python, facts.mlx, facts.mlx_lm, facts.grpo_studio),
            f"yes ({gigabytes(facts.model_bytes)})" if facts.model else "no",
        ]
        table.add_row(*cells[: len(columns)])
    console.print(table, highlight=False)
    for line in [report.link_sentence(), *(f"{LEVEL_WORDS[each.level]}: {each.sentence}" for each in report.findings)]:
        if line:
            print_line(console, line)
    if not report.findings:
        console.print("Nothing is wrong with these machines.")


bench = typer.Typer(help="Measure speed and memory on this machine.", no_args_is_help=True)


@bench.command("device")
@verb
def bench_device(
    minutes: Annotated[float | None, typer.Option(min=0.05, help="At most; 10, or 1 with --quick.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models, a minute.")] = False,
    out: Annotated[Path, typer.Option("--out", help="The folder for the file.")] = Path(),
) -> None:
    """Benchmark sampling, learning, memory and precision on random models of Qwen3's sizes; writes one JSON file."""
    if not is_folder(out):
        raise UserError("out", f"There is no folder {out}.")
    from backend.bench import report
    from backend.bench.device import DeviceBench, scale_for
    from backend.cli.display import new_console, print_line
    from backend.engine import cpu_setup

    cpu_setup.load_openblas()
    from backend.engine.device import on_gpu
    from backend.trainer.machine import KeepAwake

    if not on_gpu() and not quick:
        tell("MLX computes on a CPU here, so the models are small.")
    bench = DeviceBench(scale_for(on_gpu(), quick), minutes or (1.0 if quick else 10.0), out)
    console, awake = new_console(), KeepAwake(tell)
    interrupted = False
    awake.start()
    try:
        with console.status("") as status:
            for task, outcome in bench.run():
                status.update(f"{task.model_name}: {task.measure} …")
                if outcome is not None:
                    print_line(console, report.line(outcome))
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
def bench_report(files: Annotated[list[Path], typer.Argument(help="Files that bench device wrote.")]) -> None:
    """Print benchmark files as Markdown tables, one section per file."""
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
