"""Verbs that train nothing: check, runs, rewards, export."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from backend.cli.outcome import MISTAKE, tell, verb
from backend.spec.faults import Mistake

AsJson = Annotated[bool, typer.Option("--json", help="One line of JSON on stdout.")]
RunsDir = Annotated[Path | None, typer.Option("--runs-dir", help="Where run folders are.")]


@verb
def check(config: Annotated[Path, typer.Argument(help="The settings, a YAML file.")], as_json: AsJson = False) -> None:
    """Say every problem with settings, model, dataset, columns and rewards; loads no weights."""
    from backend.check import check as find
    from backend.spec.config import read

    try:
        faults = find(read(config))
    except Mistake as mistake:
        faults = mistake.faults
    if as_json:
        print(json.dumps([fault.to_dict() for fault in faults], ensure_ascii=False))
    else:
        tell(Mistake(faults))
    if faults:
        raise typer.Exit(MISTAKE)
    if not as_json:
        print("Nothing is wrong with these settings.")


@verb
def runs(runs_dir: RunsDir = None, as_json: AsJson = False) -> None:
    """List the runs, newest first."""
    from backend.spec.archive import summary
    from backend.spec.places import all_runs

    found = [summary(run) for run in all_runs(runs_dir)]
    if as_json:
        print(json.dumps([one.to_dict() for one in found], ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("run", "state", "step", "reward", "model", box=None)
    for one in found:
        reward = "–" if one.reward is None else f"{one.reward:.3g}"
        table.add_row(one.name, one.state, f"{one.step or 0}/{one.iterations or '–'}", reward, one.model)
    Console().print(table if found else "There are no runs yet.")


rewards = typer.Typer(help="List reward functions, or score completions with them.", no_args_is_help=True)


@rewards.command("list")
@verb
def list_rewards(
    file: Annotated[Path | None, typer.Option("--file", help="A reward file of your own.")] = None,
    as_json: AsJson = False,
) -> None:
    """Every reward function there is; a file's are read from its text, which is not run."""
    from dataclasses import asdict

    from backend.spec.catalog import builtin_rewards, locate_reward_file, rewards_in_file

    entries = builtin_rewards() + (rewards_in_file(locate_reward_file(file)) if file else [])
    if as_json:
        print(json.dumps([asdict(entry) for entry in entries], ensure_ascii=False, default=str))
        return
    for entry in entries:
        print(f"{entry.name}  ({entry.source})\n    {entry.scores}")


@rewards.command("score")
@verb
def score_rewards(
    config: Annotated[Path, typer.Argument(help="The settings, a YAML file.")],
    completions: Annotated[
        Path,
        typer.Option("--completions", help="Rows {prompt, completion, answer, type?}, or a run's completions.jsonl."),
    ],
    as_json: AsJson = False,
) -> None:
    """Score completions that are given, with the config's functions and weights."""
    from backend.cli.progress import figure
    from backend.rewards.resolve import resolve
    from backend.rewards.score import score
    from backend.rewards.table import read_groups
    from backend.spec.catalog import locate_reward_file
    from backend.spec.config import problems, read

    raw = read(config)
    settings = _reward_settings(raw, problems(raw))
    file = settings["reward_functions_file"]
    functions = resolve(settings["reward_functions"], locate_reward_file(file) if file else None)
    weights = settings["reward_weights"] or [1.0] * len(functions)
    groups = read_groups(completions)
    score(groups, functions, weights, settings["reward_timeout"])
    rows: list[dict[str, Any]] = [
        {"scores": one.scores, "reward": one.reward} for group in groups for one in group.completions
    ]
    if as_json:
        print(json.dumps({"rows": rows}, ensure_ascii=False))
        return
    for row in rows:
        print(f"{figure(row['reward'])}  " + "  ".join(f"{name} {figure(x)}" for name, x in row["scores"].items()))


def _reward_settings(raw: dict[str, Any], faults: list[Any]) -> dict[str, Any]:
    """The settings that scoring needs; what is wrong elsewhere in the file does not matter here."""
    from backend.spec.config import SETTINGS, parse

    wanted = [key for key in SETTINGS if key.startswith("reward_")]
    mine = [fault for fault in faults if fault.setting.startswith("reward")]  # a mistyped key among them
    if mine:
        raise Mistake(mine)
    from backend.spec.spelling import translate

    given = {key: value for key, value in translate(raw)[0].items() if key in wanted}
    return parse({"model": "-", "data": "-", **given}).model_dump()


@verb
def export(
    run: Annotated[str, typer.Argument(help="A run folder, or its name.")],
    to: Annotated[Literal["lmstudio", "folder", "hub"], typer.Option("--to", help="lmstudio, folder or hub.")],
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the model there (the run's name if left out).")
    ] = None,
    folder: Annotated[Path | None, typer.Option("--folder", help="Parent folder for --to folder.")] = None,
    quantize: Annotated[
        Literal[4, 6, 8] | None, typer.Option("--quantize", help="4, 6 or 8 bits; left out: full precision.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model of that name.")] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Put a finished run's model into LM Studio or a folder, loaded back to make sure."""
    from backend.export import export as put
    from backend.spec.places import find_run

    found = find_run(run, runs_dir)
    made = put(
        found, to, name or found.name, folder=folder, quantize=quantize, overwrite=overwrite,
        progress=lambda sentence: print(sentence, file=sys.stderr, flush=True),
    )  # fmt: skip
    print(made.path)
