"""The verbs about machines and this program: `where`, `machines`, `bench`, `serve` and `--selftest`."""

import os
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from backend.cli.common import BUG, FINISHED, STOPPED, USER_ERROR, AsJson, tell, tell_error, tell_json, verb
from backend.runs.run_record import file_sizes
from backend.trainer.memory.estimate import format_bytes
from backend.utils import places
from backend.utils.disk import gigabytes
from backend.utils.errors import UserError
from backend.utils.file_lock import is_held
from backend.utils.files import is_folder
from backend.utils.hub_cache import hub_cache
from backend.utils.text import quote

PREFERENCE_FILES = (
    *("prefs.ini*", "draft*.yaml", "draft-*.lock", "trusted.json", "runs-cache.jsonl", "native-crash-*.txt"),
    "chats/*.jsonl",
)  # files in the folder of preferences, which may hold the runs as well: only these are ever deleted there


@verb
def where(
    remove: Annotated[str, typer.Option(metavar="<settings|kernels>", help="List these, with --yes delete them.")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="With --remove: delete, and do not only list.")] = False,
    as_json: AsJson = False,
) -> None:
    """List every folder that GRPO Studio writes to, with sizes; --remove lists what it deletes with --yes."""
    if yes and not remove:
        raise UserError("yes", "--yes goes with --remove settings or --remove kernels.")
    if remove not in ("", "settings", "kernels"):
        raise UserError("remove", f"{quote(remove, 40)} cannot be removed by a command; settings and kernels can.")
    preferences = places.preferences_folder()
    settings = sorted(path for pattern in PREFERENCE_FILES for path in preferences.glob(pattern) if path.is_file())
    kernels = Path(tempfile.gettempdir()) / "mlx"  # what mlx compiles for a CPU, for every program that uses it
    if remove:
        files = settings if remove == "settings" else [kernels] * kernels.is_dir()
        if any(is_held(file) for file in files if file.suffix == ".lock"):
            sentence = "A window of GRPO Studio is open, and would write its preferences again; close it first."
            raise UserError("remove", sentence)
        for path in files if yes else ():
            try:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            except OSError as error:
                raise UserError("remove", f"{path} cannot be deleted: {error.strerror}.") from None
        if as_json:
            return tell_json({"deleted": yes, "files": [str(path) for path in files]})
        for path in files:
            tell(path)
        done = "Deleted." if yes else f"Would be deleted by: where --remove {remove} --yes"
        return tell(done if files else "There is nothing to delete.")
    by_hand = "Delete the folder by hand."
    keep_runs = "Move runs to the trash on the Runs page, or delete the folder by hand: they hold what was trained."
    rows = [
        ("runs", "runs", places.runs_folder(), keep_runs),
        ("settings", "preferences, stored forms", preferences, "where --remove settings deletes it."),
        ("lm-studio", "models in LM Studio", places.lm_studio_models() / "grpo-studio", "Delete models in LM Studio."),
        ("kernels", "kernels compiled by mlx", kernels, "where --remove kernels deletes it."),
        ("hub", "Hugging Face cache", hub_cache(), "Other programs use it too; hf cache deletes from it."),
    ]
    if sys.platform == "darwin":
        rows[-1:-1] = [
            ("environments", "Python packages of the light app", preferences / "environments", by_hand),
            ("logs", "logs of the light app", Path.home() / "Library" / "Logs" / "GRPO Studio", by_hand),
        ]
    stored: list[dict[str, Any]] = []
    for key, title, path, remedy in rows:
        if key == "settings":  # a window may have deleted some meanwhile
            sizes = [file.lstat().st_size for file in settings if os.path.lexists(file)]
        else:
            sizes = [size for _, size in file_sizes(path)]
        about = {"key": key, "title": title, "path": str(path), "bytes": sum(sizes), "files": len(sizes)}
        stored.append(about | {"is_shared": key in ("kernels", "hub"), "remedy": remedy})
    if as_json:
        return tell_json(stored)
    for row in stored:
        files = "1 file" if row["files"] == 1 else f"{row['files']:,} files"
        size = f"{gigabytes(row['bytes'])} in {files}" if row["files"] else "nothing yet"
        shared = ", shared with other programs" if row["is_shared"] else ""
        tell(f"{row['title']}: {size}{shared}\n    {row['path']}\n    {row['remedy']}")


@verb
def serve() -> None:
    """Answer the window's requests, as JSON lines on stdin and stdout, until stdin closes."""
    from backend.serve.questions import run

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
    backend: Annotated[str, typer.Option(metavar="B", help="The connection: ring, mpi, jaccl or nccl.")] = "auto",
    copy: Annotated[bool, typer.Option("--copy", help="Copy the model (up to 8 GB) to machines that lack it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check the machines of a hosts file: access, versions, memory, disk and model.

    Exits with 2 if a run could not start. Leaves no process running. Runs that name the file may use it afterwards.
    """
    from backend.cli.display import new_console, new_table, print_line
    from backend.distributed.hosts_file import WANTED, allow_hosts, read_hosts
    from backend.distributed.machine_check import check_machines

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

    wanted = {"backend": backend, "model": model, "reward_file": reward_file, "copies": copy}
    report = check_machines(hosts, file.name, **wanted, reached=reached)
    if as_json:
        tell_json(asdict(report))
    else:
        columns = COLUMNS if model else COLUMNS[:-1]
        table = new_table(*columns, right=slice(3, 7), pad_edge=False)
        for machine in report.machines:
            cells = [str(machine.rank), machine.label, "not reached"]
            if (facts := machine.facts) is not None:
                memory = map(format_bytes, [facts.memory, facts.memory_free, facts.memory_usable])
                disk = "–" if facts.disk_free is None else gigabytes(facts.disk_free)
                cells[1:] = [facts.machine or machine.label, facts.chip, *memory, disk]
                cells += [facts.system, facts.python, facts.mlx, facts.mlx_lm, facts.grpo_studio]
                cells += [f"yes ({gigabytes(facts.model_bytes)})" if facts.model else "no"]
            table.add_row(*cells[: len(columns)])
        # Wide enough for every column in a file.
        console = new_console() if sys.stdout.isatty() else new_console(width=200)
        console.print(table, highlight=False)
        for finding in report.findings:
            print_line(console, f"{LEVEL_WORDS[finding.level]}: {finding.sentence}")
        if not report.findings:
            console.print("Nothing is wrong with these machines.")
    if report.refusals:
        raise typer.Exit(USER_ERROR)


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
    console, awake, code = new_console(), KeepAwake(), FINISHED
    awake.start()
    try:
        with console.status("") as status:
            for task, outcome in bench.run():
                status.update(f"{task.model_name}: {task.measure} …")
                if outcome is not None:
                    print_line(console, report.line(outcome))
    except KeyboardInterrupt:
        code = STOPPED
    finally:
        awake.stop()
    file = report.read(bench.path)
    for table in report.tables(file):
        table.show()
    tell(f"{report.provenance(file)}\n\nWritten: {bench.path}.")
    holds = "it holds the chip, versions and these numbers, nothing of yours"
    tell(f"Please attach it to an issue of the project: {holds}.")
    raise typer.Exit(code)


@bench.command("report")
@verb
def bench_report(files: Annotated[list[Path], typer.Argument(help="Files that bench device wrote.")]) -> None:
    """Print benchmark files as Markdown tables, one section per file."""
    from backend.bench import report

    tell(report.markdown([report.read(path) for path in files]))


@verb
def self_test(is_requested: bool, report_file: Path | None, subcommand: str | None) -> int:
    """Returns 0 if all checks pass, else 1. Raises UserError for conflicting options or an unwritable report."""
    if not is_requested:
        raise UserError("report", "--report belongs to --selftest; give both, or a verb (--help lists them).")
    if subcommand:
        raise UserError("selftest", f"--selftest stands alone; leave out {subcommand}.")
    if report_file is not None and (report_file.suffix == ".txt" or not report_file.parent.is_dir()):
        sentence = f"The report cannot be {report_file}: name a .json file, beside which its text goes, in a folder."
        raise UserError("report", sentence)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is asked of the network, before anything imports its client
    from backend.selftest import CHECKS, CheckResult, Workbench, run_checks, summary, write_report

    results: list[CheckResult] = []
    with tempfile.TemporaryDirectory(prefix="grpo-studio-selftest-") as folder:
        for result in run_checks(CHECKS, Workbench(Path(folder))):
            tell(result.line(), flush=True)
            results.append(result)
    tell(summary(results))
    if report_file is not None:
        written = f"Written: {report_file}, and as text {write_report(results, report_file)}."
        tell(f"{written} Neither names you or your files; send them with your question.")
    return BUG if any(result.state == "failed" for result in results) else FINISHED
