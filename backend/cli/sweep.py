"""The verb `sweep`: train many configurations and seeds on one base model, and stop weak ones early."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from backend.cli.common import AllowCode, AsJson, RunsDir, ignore_sighup, logging_to, tell, tell_error, tell_json, verb
from backend.cli.display import new_console, new_table
from backend.cli.training import restart
from backend.config.config import parse
from backend.data.rows import Splits, read_splits
from backend.rewards.allowed_code import allow_named, require_allowed
from backend.runs.run_folder import hold_lock, inherited_lock
from backend.runs.sweep import RANKS, SweepPlan, load_sweep, text_of
from backend.runs.sweep_results import (
    MEMBER_STATES,
    SweepFolder,
    SweepResults,
    find_sweep,
    fresh_results,
    make_runs,
    make_sweep,
    read_results,
    settings_of_runs,
    write_results,
)
from backend.trainer.control import handlers_restored
from backend.trainer.machine import relax_gpu_timeout
from backend.utils.errors import UserError

if TYPE_CHECKING:
    from backend.runs.run_sweep import SweepInputs

NOT_HELD_OUT = (
    "The data has no held-out rows, or Eval is 0: configurations are ranked by {}. "
    "To rank by held-out reward, set validation_split: 0.1 and Eval in the base."
)


@verb
@ignore_sighup
def sweep(
    file: Annotated[str, typer.Argument(help="The sweep, a YAML file; with --resume its folder or name.")],
    runs_dir: RunsDir = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the sweep, in place of the file's.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a sweep that was stopped.")] = False,
    plan_only: Annotated[bool, typer.Option("--plan", help="Say what would be trained, and stop.")] = False,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Train a grid or a random search of settings, with several seeds."""
    if resume:
        if name or plan_only:
            raise UserError("resume", "--name and --plan go with a new sweep; one that is resumed is as it is.")
        return resume_sweep(file, runs_dir, allow_code=allow_code, as_json=as_json)
    plan = load_sweep(file)
    plan = replace(plan, name=name) if name else plan
    if plan.origin:
        tell_error(plan.origin)
    if plan_only:
        with suppress(UserError):  # what is wrong with the data is said when the sweep starts
            plan = _ranked(plan, [read_splits(parse(plan.base), head=True)])
        return _tell_plan(plan, as_json)
    plan, inputs = _checked(plan)
    for raw in plan.every_settings():
        allow_named(raw)
    folder = make_sweep(plan, runs_dir)
    make_runs(plan, folder)
    _train(plan, folder, inputs, hold_lock(folder), as_json)


def resume_sweep(name: str, runs_dir: Path | None, *, allow_code: bool = False, as_json: bool = False) -> None:
    """Continue a sweep, or start one that the window has prepared. Errors are recorded in its folder for the window."""
    folder = find_sweep(name, runs_dir)
    if folder is None:
        raise UserError("sweep", f"There is no sweep {name}: neither a sweep's folder nor the name of one.")
    plan, results = load_sweep(folder.plan), read_results(folder)
    if results is not None and results.state == "finished":
        if as_json:
            return tell_json(results.to_dict())
        return tell(f"The sweep {folder.name} has finished; there is nothing to resume.")
    if (lock := inherited_lock(folder)) is None:
        lock = hold_lock(folder)  # before anything is written: another process may train the sweep
        folder.control.unlink(missing_ok=True)  # for a process that is no more
    try:
        for raw in settings_of_runs(folder):
            require_allowed(raw, allow=allow_code)
        plan, inputs = _checked(plan)
        make_runs(plan, folder)
    except UserError as error:
        results = results or fresh_results(plan)
        results.state, results.sentence = "failed", " ".join(problem.sentence for problem in error.faults)
        write_results(folder, results)
        os.close(lock)
        raise
    _train(plan, folder, inputs, lock, as_json)


def _checked(plan: SweepPlan) -> tuple[SweepPlan, SweepInputs]:
    base = parse(plan.base)
    relax_gpu_timeout(base)  # before the imports below, which import mlx
    from backend.distributed.machine_check import require_one_machine

    require_one_machine(base, "A sweep")
    from backend.runs.run_sweep import SweepInputs

    inputs = SweepInputs()
    return _ranked(plan, inputs.check(plan)), inputs


def _ranked(plan: SweepPlan, data: Sequence[Splits]) -> SweepPlan:
    evaluates = all(each.steps_per_eval and each.val_batches for each in map(parse, plan.every_settings()))
    if plan.rank_by == "training" or (evaluates and all(splits.valid for splits in data)):
        return plan
    tell_error(NOT_HELD_OUT.format(RANKS["training"].format(plan.metric)))
    return replace(plan, rank_by="training")


def _train(plan: SweepPlan, folder: SweepFolder, inputs: SweepInputs, lock: int, as_json: bool) -> None:
    from backend.engine import cpu_setup
    from backend.runs.run_sweep import Sweep
    from backend.trainer.trainer import RESTART

    with handlers_restored() as afterwards:
        with logging_to(folder):
            out = sys.stderr if as_json else sys.stdout
            tell(folder.path, file=out, flush=True)
            tell(cpu_setup.load_openblas(), file=sys.stderr, flush=True)
            command = shlex.join(sys.argv)
            trained = Sweep(plan, folder, inputs, command=command, echo=_lines(out), may_restart=True)
            ending = trained.run(lock)
        afterwards.process_ends = ending.exit_code != 0 and ending.kind != RESTART
        if ending.kind == RESTART:
            restart("sweep", str(folder.path), "--resume", *(["--json"] if as_json else []))
    results = trained.results
    if as_json:
        tell_json(results.to_dict())
    else:
        varied = list(results.configurations[0].settings)
        headers = [results.measure.partition(" over ")[0], "± sd", "seeds", "step", "completions", "state"]
        table = new_table("", *varied, *headers, right=slice(1 + len(varied), -1))
        for each in results.ranked:
            value = "–" if each.value is None else f"{each.value:.4g}"
            sd = "–" if each.sd is None else f"{each.sd:.2g}"
            cells = [str(each.number), *(text_of(each.settings[key]) for key in varied), value, sd]
            state = MEMBER_STATES.get(each.state, each.state)
            cells += [str(len(each.runs)), str(each.step), f"{each.completions:,}", state]
            table.add_row(*cells, style="bold" if results.winner is each else None)
        new_console().print(table)
    tell(ending.sentence, file=sys.stderr if ending.exit_code or as_json else sys.stdout)
    if ending.exit_code:
        raise typer.Exit(ending.exit_code)


def _lines(out: TextIO) -> Callable[[SweepResults], None]:
    told: set[str] = set()

    def echo(results: SweepResults) -> None:
        lines = list(results.notes)
        for run in (run for each in results.configurations for run in each.runs):
            if run.state not in ("waiting", "training"):
                value = "–" if run.value is None else f"{run.value:.4g}"
                state = MEMBER_STATES.get(run.state, run.state)
                lines.append(f"{run.run}  {state} at step {run.step}  {results.measure} {value}")
        for rung in results.rungs:
            kept = f"{len(rung.kept)} of {len(results.configurations)} configurations continue"
            lines.append(f"step {rung.step}  {kept}: {', '.join(map(str, rung.kept))}")
        for line in dict.fromkeys(line for line in lines if line not in told):
            tell(line, file=out, flush=True)
        told.update(lines)

    return echo


def _tell_plan(plan: SweepPlan, as_json: bool) -> None:
    runs, length, rungs = len(plan.members()), plan.steps, plan.rungs()
    steps = None if length is None else plan.total_steps(length)
    if as_json:
        settings = [asdict(each) for each in plan.configurations]
        about = {"name": plan.name, "seeds": plan.seeds, "runs": runs, "steps": length, "steps_together": steps}
        about |= {"rank_by": plan.rank_by, "rungs": [asdict(rung) for rung in rungs], "configurations": settings}
        return tell_json(about)
    each = length or "as many as their epochs or stages have"
    configurations, seeds = len(plan.configurations), len(plan.seeds)
    tell(f"Configurations: {configurations}, seeds: {seeds}, runs: {runs}, steps of a run: {each}.")
    tell(f"Ranked by {RANKS[plan.rank_by].format(plan.metric)}.")
    for rung in rungs:
        tell(f"After step {rung.step}, {rung.keep} of them continue.")
    if steps is not None and length is not None:
        saved = f", {steps / (runs * length):.0%} of the {runs * length:,} without halving" if rungs else ""
        tell(f"At most {steps:,} steps together{saved}.")
    for group in plan.groups():
        if len(group) > 1:
            tell(f"{len(group)} runs share one base model in memory.")
    for each in plan.configurations:
        tell(f"{each.number}  {each.label}")
