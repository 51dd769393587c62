"""The verbs `rewards list`, `score`, `sample`, `cases` and `judge`. Only `sample` and reward models import mlx."""

import json
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from backend.cli.common import USER_ERROR, AsJson, tell, tell_error, tell_json, verb
from backend.cli.completions import Changes
from backend.cli.training import parse_changes, read_settings
from backend.config.config import SETTINGS, Config, keys_used_by, parse, problems, read
from backend.config.other_programs.translation import read_file
from backend.rewards.bench import (
    RewardBench,
    cases_file,
    cases_in,
    line_of,
    read_cases,
    read_groups,
    rerun,
    reward_file_of,
    score_groups,
)
from backend.rewards.catalogue import builtin_rewards, locate_reward_file, parse_reward_file, rewards_in_file
from backend.runs.saved_weights import with_adapter
from backend.types import Group
from backend.utils.disk import save_as
from backend.utils.errors import ConfigProblem, UserError
from backend.utils.text import quote

rewards = typer.Typer(help="List reward functions, or score completions with them.", no_args_is_help=True)


@rewards.command("list")
@verb
def list_rewards(
    file: Annotated[Path | None, typer.Option("--file", help="A reward file of your own.")] = None,
    as_json: AsJson = False,
) -> None:
    """List all reward functions; parses a reward file without running it."""
    entries = [*builtin_rewards(), *(rewards_in_file(locate_reward_file(file)) if file else ())]
    if as_json:
        return tell_json([asdict(entry) for entry in entries], default=str)
    for entry in entries:
        tell(f"{entry.name}  ({entry.source})\n    {entry.scores}")


@rewards.command("score")
@verb
def score_rewards(
    config: Annotated[Path, typer.Argument(help="The settings, a YAML file.")],
    completions: Annotated[Path, typer.Option(help="Rows {prompt, completion, answer, type?}, or completions.jsonl.")],
    changes: Changes = None,
    as_json: AsJson = False,
) -> None:
    """Score given completions with the config's reward functions and weights; prints the verdict on stderr."""
    settings = _scoring_settings(config, changes)
    groups = read_groups(completions)
    _print_scores(score_all(groups, settings, prints=not as_json), as_json, groups)


@rewards.command("sample")
@verb
def sample_rewards(
    config: Annotated[Path, typer.Argument(help="The settings, a YAML file.")],
    count: Annotated[int, typer.Option("-n", help="Prompts, taken at random by the seed.", min=1)] = 8,
    changes: Changes = None,
    out: Annotated[Path | None, typer.Option("--out", help="Keep the completions here, for rewards score.")] = None,
    as_json: AsJson = False,
) -> None:
    """Sample completions from the initial model and score them; prints the verdict on stderr."""
    from backend.rewards.scorer import begin_scorer
    from backend.tools.load import load_tools
    from backend.trainer.trial_sampling import Pick, TrialSampler

    settings = parse(with_adapter(read_settings(config, changes)[0]))
    if out is not None and not out.parent.is_dir():
        raise UserError("out", f"There is no folder {quote(out.parent)}.")
    phases = set[str]()

    def report(progress: dict[str, Any]) -> None:
        if (phase := progress["phase"]) not in phases:
            phases.add(phase)
            tell_error(f"{phase[0].upper()}{phase[1:]}…")

    with ExitStack() as stack:
        tools = None
        if settings.uses_tools:
            tools = load_tools(settings, stack.enter_context(closing(begin_scorer(settings))))
        pick = Pick("random", count)
        groups = TrialSampler().sample(settings, pick, settings.group_size, settings.seed, report, tools=tools)
    if out is not None:
        lines = (json.dumps(line_of(group), ensure_ascii=False, default=str) for group in groups)
        save_as(out, "".join(f"{line}\n" for line in lines))
    _print_scores(score_all(groups, settings, prints=not as_json), as_json, groups, is_sampled=True)


@rewards.command("cases")
@verb
def rerun_cases(
    file: Annotated[Path, typer.Argument(help="A reward file; its cases are kept beside it in NAME.cases.jsonl.")],
    as_json: AsJson = False,
) -> None:
    """Run the test cases of a reward file; exits with 2 if one fails."""
    path = locate_reward_file(file).resolve()
    parse_reward_file(path, "file")
    cases = read_cases(path)
    if not cases:
        raise UserError("cases", f"No cases are kept in {cases_file(path)}.")
    with closing(RewardBench()) as bench:
        results = rerun(bench, path, cases, float(SETTINGS["reward_timeout"].default))
    if as_json:
        rows = [{"passed": not r["failures"], "expected": r["case"]["expected"], "scores": r["given"]} for r in results]
        tell_json({"rows": rows})
    else:
        for trace in dict.fromkeys(filter(None, (trace for each in results for trace in each["tracebacks"]))):
            tell_error(trace.rstrip())
    failures = [f"case {number}: {why}" for number, each in enumerate(results, 1) for why in each["failures"]]
    for failure in failures:
        tell_error(failure)
    if not as_json:
        tell(f"{sum(not each['failures'] for each in results)} of {len(results)} cases pass.")
    if failures:
        raise typer.Exit(USER_ERROR)


@rewards.command("judge")
@verb
def examine_judges(
    config: Annotated[Path, typer.Argument(help="The settings, a YAML file.")],
    cases: Annotated[Path | None, typer.Option(help="Rows {prompt, completion, expected: {judge: score}}.")] = None,
    completions: Annotated[Path | None, typer.Option(help="Completions as of rewards score.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare judges and reward models with your scores and with themselves, and look for bias of place and length."""
    from backend.judges.agreement import examinations

    settings = _scoring_settings(config)
    groups = read_groups(completions) if completions else []
    own, file = cases_in(cases) if cases else (), reward_file_of(settings)
    found: list[dict[str, Any]] = []
    for each in examinations(settings.reward_functions, file, groups, own):
        tell_error(f"{each.name}: {each.calls} calls…")
        agreement = each.run()
        found.append(asdict(agreement))
        if not as_json:
            tell(f"{agreement.name}: {agreement.verdict}")
    if as_json:
        tell_json({"judges": found})


def _scoring_settings(config: Path, changes: Sequence[str] | None = None) -> Config:
    raw, changed, keys = read(config), parse_changes(changes or []), keys_used_by("rewards", "scoring")
    # Only the settings of rewards matter. A misspelt key is in no table: all that begin with "reward" count.
    if found := [each for each in problems(raw | changed) if each.setting in keys or each.setting.startswith("reward")]:
        raise UserError(found)
    used = {key: value for key, value in read_file(raw, changed).values.items() if key in keys}
    return parse({"model": "-", "data": "-", **used})


def score_all(groups: Sequence[Group], settings: Config, *, prints: bool = False) -> dict[str, Any]:
    """Score groups in the sandbox. Raises UserError if a function fails. `prints`: functions' output and tracebacks."""
    try:
        with closing(RewardBench()) as bench:
            scored = score_groups(bench, groups, settings)
        for printed in filter(None, [function["printed"] for function in scored["functions"]] if prints else ()):
            tell_error(printed.rstrip())
        if failed := [function["error"] for function in scored["functions"] if function["error"]]:
            raise UserError([ConfigProblem("reward_functions", each["sentence"], each["traceback"]) for each in failed])
    except UserError as error:
        if prints and error.traceback:  # a bench is where they are looked for
            tell_error(error.traceback.rstrip())
        raise
    return scored


def _print_scores(scored: dict[str, Any], as_json: bool, groups: Sequence[Group], *, is_sampled: bool = False) -> None:
    from backend.cli.display import format_number

    completions = [completion for group in groups for completion in group.completions]
    for finding in scored["findings"]:
        tell_error(f"{finding['sentence']} {finding['advice']}".rstrip())
    if as_json:
        rows = [{"scores": each.scores, "reward": each.reward} for each in completions]
        for row, each in zip(rows, completions, strict=True) if is_sampled else ():
            row |= {"advantage": each.advantage, "completion": each.text}
        return tell_json({"rows": rows})
    for each in completions:
        scores = "  ".join(f"{name} {format_number(score)}" for name, score in each.scores.items())
        text = " ".join(each.text.split()) if is_sampled else ""
        tell(f"{format_number(each.reward)}  {scores}{f'  {text[:60]}' if text else ''}")
