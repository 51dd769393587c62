"""Handlers for the reward bench: sample from the model, score completions, read a run's, keep and rerun cases.

A user's code runs confined, and only if the user has allowed its content. The model and the reward worker stay warm
between questions. Scoring imports no mlx.
"""

import atexit
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from backend.config.config import Config, keys_used_by, parse
from backend.rewards import bench
from backend.rewards.allowed_code import AllowedCode, AllowedServers
from backend.rewards.calls import RewardError
from backend.rewards.catalogue import DEFAULT_REWARDS, locate_reward_file
from backend.runs.completion_rows import CompletionIndex, ScoringRow
from backend.runs.run_folder import RunFolder
from backend.serve.questions import QuestionCall
from backend.tools.load import shown_tools
from backend.types import Group
from backend.utils.errors import UserError
from backend.utils.text import quote

_bench = bench.RewardBench()
atexit.register(_bench.close)

Settings = Mapping[str, Any]  # raw

_FOR_SCORING = keys_used_by("rewards", "scoring")
_NOT_FOR_SAMPLING = (*keys_used_by("rewards"), "stages")  # their faults are reported elsewhere


def score(call: QuestionCall, settings: Settings, groups: Sequence[Any], with_cases: bool = True) -> dict[str, Any]:
    """The result of `score_groups` for lines of groups, and "cases": that of `rerun` where the reward file has some;
    {"failed": `RewardError.place`} for a file that cannot be loaded. Reports {"scoring": name of a function}. Problems
    of settings that scoring does not use are reported elsewhere."""
    config = _scoring_settings(settings)
    file = bench.reward_file_of(config)
    named = {"reward_functions": config.reward_functions, "reward_functions_file": str(file or "")}
    _check_allowed(named | {"reward_network": config.reward_network})
    try:
        read, report = _groups_of(groups), lambda name: call.report({"scoring": name})
        scored = bench.score_groups(_bench, read, config, call.check, report)
        cases = bench.read_cases(file) if file and with_cases else []
        if cases and file:
            scored["cases"] = bench.rerun(_bench, file, cases, config.reward_timeout, call.check)
        return scored
    except RewardError as error:
        return {"failed": error.place}


def judge_agreement(
    call: QuestionCall, settings: Settings, groups: Sequence[Any], only_calls: bool = False
) -> dict[str, Any]:
    """{"calls": {name of a judge or reward model: calls}, "judges": [Agreement as a dict], one each; [] with
    `only_calls`}. The user's scores are the cases beside rubrics and the reward file. Reports {"phase": name, "done",
    "of"}."""
    from backend.judges.agreement import examinations

    config = _scoring_settings(settings)
    listed = examinations(config.reward_functions, bench.reward_file_of(config), _groups_of(groups))
    if listed and not only_calls:
        _check_allowed({"reward_functions": config.reward_functions})
    judges = [asdict(each.run(call.check, call.report)) for each in listed if not only_calls]
    return {"calls": {each.name: each.calls for each in listed}, "judges": judges}


def _scoring_settings(settings: Settings) -> Config:
    used = {key: value for key, value in settings.items() if key in _FOR_SCORING}
    return parse({"model": "-", "data": "-", **used})


def _groups_of(lines: Sequence[Any]) -> list[Group]:
    return [bench.group_of(line, index, f"Row {index + 1}") for index, line in enumerate(lines)]


def _check_allowed(settings: Settings) -> None:
    """Raise UserError for code, as it is now, or a server of these raw settings that was not allowed."""
    if code := AllowedCode().missing(settings):
        sentence = f"{code[0].code.path.name} has not been allowed to run as it is now."
        raise UserError("reward_functions_file", sentence)
    if servers := AllowedServers().missing(settings):
        setting = "reward_functions" if "reward_functions" in settings else "mcp_servers"
        raise UserError(setting, f"The {quote(next(iter(servers)), 60)} has not been allowed.")


def tools(call: QuestionCall, settings: Settings) -> dict[str, Any]:
    """{"shared", "by_environment"}: the schemas that the model reads. Raises UserError."""
    schemas, why_not = shown_tools(parse({"model": "-", "data": "-", **settings}))
    if why_not:
        raise UserError("tools_file", why_not)
    return asdict(schemas)


def sample(
    call: QuestionCall,
    settings: Settings,
    how: Any,
    count: int,
    group_size: int,
    seed: int,
    numbers: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """Lines of groups; reports {"phase", "done", "of"}. The environments of its tools stay for scoring."""
    from backend.trainer.trial_sampling import Pick

    raw = {key: value for key, value in settings.items() if key not in _NOT_FOR_SAMPLING}
    config = parse({**raw, "reward_functions": list(DEFAULT_REWARDS)})
    tools = nullcontext()
    if config.uses_tools:
        scoring = _scoring_settings(settings)
        named = {key: getattr(config, key) for key in keys_used_by("tools")}
        _check_allowed(named | {"reward_network": scoring.reward_network})
        tools = _bench.tools(config, scoring, call.check)
    pick = Pick(how, count, tuple(numbers))
    with tools as host:
        groups = _trial_sampler().sample(config, pick, group_size, seed, call.report, call.check, host)
    return [{**bench.line_of(group), "row": group.problem.index + 1} for group in groups]


@cache
def _trial_sampler() -> Any:
    from backend.trainer.trial_sampling import TrialSampler

    return TrialSampler()


def run_completions(call: QuestionCall, run: str, step: int | None = None) -> dict[str, Any]:
    """{"steps": that have completions, "step", "groups"}, in the form for scoring, without columns; `tokens` stays the
    count where there are no ids. `step` None is the newest."""
    folder = RunFolder(Path(run))
    index = CompletionIndex(folder.completions)
    while index.advance():
        call.check()
    if not (steps := sorted(index.steps())):
        raise UserError("run", f"The run {folder.name} has no completions yet.")
    step = max((each for each in steps if step is None or each <= step), default=steps[0])
    lines: list[dict[str, Any]] = []
    for number, row in enumerate(index.rows(step)):
        line: dict[str, Any] = {**bench.line_of(bench.group_of(row, number, f"Group {number + 1} of step {step}"))}
        for completion, written in zip(line["completions"], row["completions"], strict=True):
            completion["tokens"] = completion["tokens"] or written.get("tokens")
        del line["columns"]
        lines.append(line)
    return {"steps": steps, "step": step, "groups": lines}


def read_completions(call: QuestionCall, path: str = "", text: str = "") -> list[ScoringRow]:
    """Lines of groups, one for consecutive rows {prompt, completion, answer, type?} of one prompt in a file or a text.
    Raises UserError on `completions` naming the line."""
    if path:
        groups = bench.read_groups(Path(path))
    elif text.lstrip().startswith("{"):
        groups = bench.groups_in(text, "what was pasted")
    else:  # plain text is one completion
        groups = [bench.group_of({"completion": text}, 0, "What was pasted")]
    return [bench.line_of(group) for group in groups]


def reward_cases(call: QuestionCall, file: str, do: str = "list", place: int = 0, **kept: Any) -> dict[str, Any]:
    """{"path", "cases"} of a reward file. `do` keep: add `new_case(**kept)`, in place of a case about the same
    completion. drop: delete the case at index `place`."""
    path = locate_reward_file(file).resolve()
    cases = bench.read_cases(path)
    if do == "keep":
        case, about = bench.new_case(**kept), ("prompt", "answer", "completion")
        cases = [other for other in cases if any(other.get(key) != case.get(key) for key in about)] + [case]
        bench.write_cases(path, cases)
    elif do == "drop":
        del cases[place]
        bench.write_cases(path, cases)
    return {"path": str(bench.cases_file(path)), "cases": cases}


def judge_servers(call: QuestionCall) -> list[dict[str, Any]]:
    """The servers on this machine that could judge, {name, url, models}."""
    from backend.judges.server import find_servers

    return find_servers()


def judge_key(call: QuestionCall, url: str, key: str) -> None:
    """Keep the key of a server in the system's keychain; an empty one is deleted."""
    from backend.judges.server import save_key

    save_key(urlsplit(url).hostname or "", key)
