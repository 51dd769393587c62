"""A sweep on the terminal: what it would train, and its results as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from backend.cli.consoles import new_console
from backend.spec.sweeps.sweep import SweepPlan, text_of, training_steps
from backend.spec.sweeps.sweep_results import SweepResults


def plan_lines(plan: SweepPlan) -> list[str]:
    """How many runs there are, how long, and what halving saves."""
    configurations, seeds = len(plan.configurations), len(plan.seeds)
    lines = [
        f"{configurations} configurations × {seeds} seeds: {configurations * seeds} runs of {plan.steps or 'as many'} steps."
    ]
    if plan.steps is not None:
        steps = training_steps(configurations, seeds, plan.steps, plan.rungs())
        whole = configurations * seeds * plan.steps
        lines += [f"After step {rung.step}, {rung.keep} configurations go on." for rung in plan.rungs()]
        lines += [f"At most {steps:,} steps together, {steps / whole:.0%} of the {whole:,} without halving."]
    for group in plan.groups():
        if len(group) > 1:
            lines.append(f"{len(group)} runs share one base model in memory.")
    return lines + [f"{each.number}  {each.label}" for each in plan.configurations]


def print_results(results: SweepResults, console: Console | None = None) -> None:
    """A line for each configuration, best first."""
    varied = list(results.configurations[0].settings)
    table = Table("", *varied, f"held-out {results.metric}", "± sd", "seeds", "step", "completions", "state", box=None)
    for column in table.columns[1 + len(varied) : -1]:
        column.justify = "right"
    winner = results.winner
    for each in results.ranked:
        value = "–" if each.value is None else f"{each.value:.4g}"
        sd = "–" if each.sd is None else f"{each.sd:.2g}"
        cells = [value, sd, str(len(each.runs)), str(each.step), f"{each.completions:,}", each.state]
        style = "bold" if winner is not None and each.number == winner.number else None
        table.add_row(str(each.number), *(text_of(each.settings[key]) for key in varied), *cells, style=style)
    (console or new_console()).print(table)
