"""Verbs that train nothing: check, runs, rewards, export."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from backend.cli.outcome import MISTAKE, tell, verb
from backend.spec.faults import Fault, Mistake

AsJson = Annotated[bool, typer.Option("--json", help="One line of JSON on stdout.")]
ADVANTAGES = ("max_completion_length", "scale_rewards", "multi_objective_aggregation", "advantage_baseline")
"""Settings that scoring needs beside those of the rewards."""
RunsDir = Annotated[Path | None, typer.Option("--runs-dir", help="Where run folders are.")]


@verb
def check(config: Annotated[Path, typer.Argument(help="The settings, a YAML file.")], as_json: AsJson = False) -> None:
    """Say every problem with settings, model, dataset, columns and rewards; loads no weights."""
    from backend.run.preflight import check as find
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

    from backend.spec.rewards.catalog import builtin_rewards, locate_reward_file, rewards_in_file

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
    """Score completions that are given, with the config's functions and weights; the verdict goes to stderr."""
    from backend.rewards.completion_lines import line_of, read_groups, together
    from backend.spec.config import problems, read

    raw = read(config)
    lines = [line_of(group) for group in together(read_groups(completions))]
    _tell_scored(_scored(_reward_settings(raw, problems(raw)), lines), as_json)


@rewards.command("sample")
@verb
def sample_rewards(
    config: Annotated[Path, typer.Argument(help="The settings, a YAML file.")],
    count: Annotated[int, typer.Option("-n", help="Prompts, taken at random by the seed.", min=1)] = 8,
    out: Annotated[Path | None, typer.Option("--out", help="Keep the completions here, for rewards score.")] = None,
    as_json: AsJson = False,
) -> None:
    """Sample completions from the model as a run begins with it, and score them; the verdict goes to stderr."""
    from backend.rewards.completion_lines import line_of
    from backend.run.trial_sampling import Pick, TrialSampler
    from backend.spec.config import load

    settings = load(config)
    groups = TrialSampler().sample(settings, Pick("random", count), settings.group_size, settings.seed, _tell_phase())
    lines = [line_of(group) for group in groups]
    if out is not None:
        out.write_text("".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines), "utf-8")
    _tell_scored(_scored(settings.model_dump(), lines), as_json, lines)


@rewards.command("cases")
@verb
def rerun_cases(
    file: Annotated[Path, typer.Argument(help="A reward file; its cases are kept beside it in NAME.cases.jsonl.")],
    as_json: AsJson = False,
) -> None:
    """Score the cases kept with a reward file again; exit code 2 where one does not get what it should."""
    from backend.rewards.cases import cases_file, read_cases, rerun
    from backend.rewards.sandbox.client import SandboxClient
    from backend.spec.config import SETTINGS
    from backend.spec.rewards.catalog import locate_reward_file

    path = locate_reward_file(file).resolve()
    cases = read_cases(path)
    if not cases:
        raise Mistake("cases", f"No cases are kept in {cases_file(path)}.")
    scorer = SandboxClient()
    try:
        found = rerun(scorer, path, cases, float(SETTINGS["reward_timeout"].default))
    finally:
        scorer.close()
    if as_json:
        rows = [{"passed": one.passed, "expected": one.case["expected"], "scores": one.given} for one in found]
        print(json.dumps({"rows": rows}, ensure_ascii=False))
    failed = [(number, sentence) for number, one in enumerate(found, 1) for sentence in one.failures]
    for number, sentence in failed:
        print(f"case {number}: {sentence}", file=sys.stderr)
    if not as_json:
        print(f"{sum(one.passed for one in found)} of {len(found)} cases pass.")
    if failed:
        raise typer.Exit(MISTAKE)


def _scored(settings: dict[str, Any], lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What the functions gave, with its verdict. Raises Mistake where one of them fails: a run would stop there."""
    from backend.rewards.sandbox.client import SandboxClient
    from backend.rewards.trial_scoring import Rules, score_lines

    scorer = SandboxClient()
    try:
        found = score_lines(scorer, lines, Rules.of(settings))
    finally:
        scorer.close()
    broken = [one["error"]["sentence"] for one in found["functions"] if one["error"]]
    if broken:
        raise Mistake([Fault("reward_functions", sentence) for sentence in broken])
    return found


def _tell_scored(found: dict[str, Any], as_json: bool, lines: list[dict[str, Any]] | None = None) -> None:
    """A line a completion on stdout, the verdict on stderr. `lines` tells the texts as well, for what was sampled."""
    from backend.cli.progress import figure

    texts = [one["text"] for line in lines or () for one in line["completions"]]
    scored = [one for group in found["scored"] for one in group]
    rows: list[dict[str, Any]] = [{"scores": one["rewards"], "reward": one["reward"]} for one in scored]
    for row, one, text in zip(rows, scored, texts, strict=False):
        row |= {"advantage": one["advantage"], "completion": text}
    for finding in found["findings"]:
        print(f"{finding['sentence']} {finding['advice']}".rstrip(), file=sys.stderr)
    if as_json:
        print(json.dumps({"rows": rows}, ensure_ascii=False))
        return
    for row in rows:
        shown = "  ".join(f"{name} {figure(x)}" for name, x in row["scores"].items())
        text = " ".join(row.get("completion", "").split())
        print(f"{figure(row['reward'])}  {shown}{f'  {text[:60]}' if text else ''}")


def _tell_phase() -> Any:
    """Says each phase of sampling once, on stderr."""
    said: set[str] = set()

    def tell(told: dict[str, Any]) -> None:
        if told["phase"] not in said:
            said.add(told["phase"])
            print(f"{told['phase'][0].upper()}{told['phase'][1:]}…", file=sys.stderr, flush=True)

    return tell


def _reward_settings(raw: dict[str, Any], faults: list[Any]) -> dict[str, Any]:
    """The settings that scoring needs; what is wrong elsewhere in the file does not matter here."""
    from backend.spec.config import SETTINGS, parse

    wanted = [*(key for key in SETTINGS if key.startswith("reward_")), *ADVANTAGES]
    mine = [
        fault for fault in faults if fault.setting.startswith("reward") or fault.setting in ADVANTAGES
    ]  # a mistyped key among them
    if mine:
        raise Mistake(mine)
    from backend.spec.aliases import translate

    given = {key: value for key, value in translate(raw)[0].items() if key in wanted}
    return parse({"model": "-", "data": "-", **given}).model_dump()


@verb
def export(
    run: Annotated[str, typer.Argument(help="A run folder, or its name.")],
    to: Annotated[
        Literal["lmstudio", "folder", "hub"],
        typer.Option("--to", metavar="[lmstudio|folder]", help="lmstudio or folder."),
    ],
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
    from backend.models.export import export as put
    from backend.spec.places import find_run

    found = find_run(run, runs_dir)
    made = put(
        found, to, name or found.name, folder=folder, quantize=quantize, overwrite=overwrite,
        progress=lambda sentence: print(sentence, file=sys.stderr, flush=True),
    )  # fmt: skip
    print(made.path)
