"""The verb `machines`: whether the machines of a hosts file can train one run together, and how fast they exchange numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from backend.cli.exit_codes import MISTAKE, verb
from backend.cli.options import AsJson
from backend.cli.output import tell, tell_json
from backend.trainer.memory.estimate import format_bytes
from backend.utils.disk_faults import gigabytes
from backend.utils.errors import UserError

if TYPE_CHECKING:
    from backend.distributed.machine_report import CheckedMachine, MachineReport

COLUMNS = (
    "rank", "machine", "chip", "memory", "free", "for a run", "disk free", "system", "Python", "mlx", "mlx-lm", "GRPO Studio", "model",
)  # fmt: skip
LEVEL_WORDS = {"refuse": "Refused", "warn": "Warning", "info": "Note"}


@verb
def machines(
    file: Annotated[Path, typer.Argument(help="The hosts file, as mlx.launch takes it.")],
    model: Annotated[str, typer.Option("--model", metavar="M", help="Look for this model on every machine.")] = "",
    reward_file: Annotated[str, typer.Option("--reward-file", metavar="F", help="Look for this file.")] = "",
    backend: Annotated[
        str, typer.Option("--backend", metavar="B", help="Measure over ring, mpi, jaccl or nccl, not what suits them.")
    ] = "auto",
    copy: Annotated[bool, typer.Option("--copy", help="Copy the model (up to 8 GB) to machines that lack it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check every machine of a hosts file: reachable, versions, memory, disk, the model, and the speed of their connection.

    Ends with 2 where something would keep a run from starting. Leaves no process on any machine. Runs that name the file may use it afterwards.
    """
    from backend.distributed.allowed_hosts import allow_hosts
    from backend.distributed.backend_choice import WANTED
    from backend.distributed.check.machine_check import CheckProgress, Wanted, check_machines
    from backend.distributed.hosts_file import read_hosts

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
            tell(f"copying to {hosts.label(rank)}: {10 * tenths} %", file=sys.stderr)

    report = check_machines(hosts, file.name, Wanted(backend, model, reward_file, copy), CheckProgress(reached))
    if as_json:
        tell_json(report.to_dict())
    else:
        _print(report, bool(model))
    if report.refusals:
        raise typer.Exit(MISTAKE)


def _print(report: MachineReport, with_model: bool) -> None:
    from rich.table import Table

    from backend.cli.consoles import new_console

    # Wide enough for every column where the output is no terminal, so that none is cut in a file.
    console = new_console() if sys.stdout.isatty() else new_console(width=200)
    columns = COLUMNS if with_model else COLUMNS[:-1]
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[3:7]:
        column.justify = "right"
    for machine in report.machines:
        table.add_row(*_cells(machine)[: len(columns)])
    console.print(table, highlight=False)
    for line in filter(
        None, [report.link_sentence(), *(f"{LEVEL_WORDS[found.level]}: {found.sentence}" for found in report.findings)]
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if not report.findings:
        console.print("Nothing is wrong with these machines.")


def _cells(machine: CheckedMachine) -> list[str]:
    if (facts := machine.facts) is None:
        return [str(machine.rank), machine.label, "not reached", *[""] * (len(COLUMNS) - 3)]
    model = f"yes ({gigabytes(facts.model_bytes)})" if facts.model else "no"
    sizes = [facts.memory, facts.memory_free, facts.memory_usable]
    return [
        str(machine.rank), facts.machine or machine.label, facts.chip, *map(format_bytes, sizes),
        "–" if facts.disk_free is None else gigabytes(facts.disk_free),
        facts.system, facts.python, facts.mlx, facts.mlx_lm, facts.grpo_studio, model,
    ]  # fmt: skip
