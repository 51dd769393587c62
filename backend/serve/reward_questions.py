"""Handlers for the reward bench: sample from the model, score completions, read a run's, keep and rerun cases.

A user's code runs confined, and only if the user has allowed its content. The model and the reward worker stay warm
between questions. Scoring imports no mlx.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
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
from backend.tools.load import shown_tools, uses_tools
from backend.types import Group
from backend.utils.errors import UserError
from backend.utils.text import quote

_bench = bench.RewardBench()
atexit.register(_bench.close)

_FOR_SCORING = keys_used_by("rewards", "scoring")
_NOT_FOR_SAMPLING = (*keys_used_by("rewards"), "stages")
"""Settings that do not affect sampling; their faults are reported elsewhere."""


def score(call: QuestionCall, **request: Any) -> dict[str, Any]:
    """{"settings", "groups": lines of `backend.rewards.bench`, "with_cases"?} → the result of `score_groups`, and
    "cases": [{"case", "given": scores, "failures"}] where the reward file has some.

    Reports {"scoring": name of a function}. A file that cannot be loaded is answered as {"failed": {"sentence",
    "file", "line", "frames", "traceback"}}. Problems of settings that scoring does not use are reported elsewhere.
    """
    config = _scoring_settings(request)
    file = bench.reward_file_of(config)
    named = {"reward_functions": config.reward_functions, "reward_functions_file": str(file or "")}
    _check_allowed(named | {"reward_network": config.reward_network})
    try:
        groups = _groups_of(request)
        scored = bench.score_groups(_bench, groups, config, call.check, lambda name: call.report({"scoring": name}))
        cases = bench.read_cases(file) if file and request.get("with_cases", True) else []
        if cases and file:
            results = bench.rerun(_bench, file, cases, config.reward_timeout, call.check)
            scored["cases"] = [{"case": r.case, "given": r.scores, "failures": r.failures} for r in results]
        return scored
    except RewardError as error:
        return {"failed": error.place}


def judge_agreement(call: QuestionCall, **request: Any) -> dict[str, Any]:
    """{"settings", "groups": lines of `backend.rewards.bench`, "only_calls"?} → {"calls": {name of a judge or reward
    model: calls}, "judges": [Agreement as a dict], one each; [] with "only_calls"}.

    The user's scores are the cases beside rubrics and the reward file. Reports {"phase": name, "done", "of"}.
    """
    from backend.judges.agreement import examinations

    config = _scoring_settings(request)
    listed = examinations(config.reward_functions, bench.reward_file_of(config), _groups_of(request))
    asked = [] if request.get("only_calls") else listed
    if asked:
        _check_allowed({"reward_functions": config.reward_functions})
    judges = [asdict(each.run(call.check, call.report)) for each in asked]
    return {"calls": {each.name: each.calls for each in listed}, "judges": judges}


def _scoring_settings(request: dict[str, Any]) -> Config:
    used = {key: value for key, value in request["settings"].items() if key in _FOR_SCORING}
    return parse({"model": "-", "data": "-", **used})


def _groups_of(request: dict[str, Any]) -> list[Group]:
    return [bench.group_of(line, index, f"Row {index + 1}") for index, line in enumerate(request["groups"])]


def _check_allowed(settings: Mapping[str, Any]) -> None:
    """Raise UserError for code, as it is now, or a server of these raw settings that was not allowed."""
    if code := AllowedCode().missing(settings):
        sentence = f"{code[0].code.path.name} has not been allowed to run as it is now."
        raise UserError("reward_functions_file", sentence)
    if servers := AllowedServers().missing(settings):
        setting = "reward_functions" if "reward_functions" in settings else "mcp_servers"
        raise UserError(setting, f"The {quote(next(iter(servers)), 60)} has not been allowed.")


def tools(call: QuestionCall, **request: Any) -> dict[str, Any]:
    """{"settings": of tools} → {"shared", "by_environment"}: the schemas that the model reads. Raises UserError."""
    schemas, why_not = shown_tools(parse({"model": "-", "data": "-", **request["settings"]}))
    if why_not:
        raise UserError("tools_file", why_not)
    return asdict(schemas)


def sample(call: QuestionCall, **request: Any) -> list[dict[str, Any]]:
    """{"settings", "how", "count", "numbers", "group_size", "seed"} → lines; reports {"phase", "done", "of"}. The
    environments of its tools stay for scoring."""
    from backend.trainer.trial_sampling import Pick

    raw = {key: value for key, value in request["settings"].items() if key not in _NOT_FOR_SAMPLING}
    config = parse({**raw, "reward_functions": list(DEFAULT_REWARDS)})
    pick = Pick(request.get("how", "random"), int(request.get("count", 8)), tuple(request.get("numbers") or ()))
    size, seed = int(request["group_size"]), int(request["seed"])
    tools = nullcontext()
    if uses_tools(config):
        scoring = _scoring_settings(request)
        named = {key: getattr(config, key) for key in keys_used_by("tools")}
        _check_allowed(named | {"reward_network": scoring.reward_network})
        tools = _bench.tools(config, scoring, call.check)
    with tools as host:
        groups = _trial_sampler().sample(config, pick, size, seed, call.report, call.check, host)
    return [{**bench.line_of(group), "row": group.problem.index + 1} for group in groups]


@cache
def _trial_sampler() -> Any:
    from backend.trainer.trial_sampling import TrialSampler

    return TrialSampler()


def run_completions(call: QuestionCall, **request: Any) -> dict[str, Any]:
    """{"run": folder, "step": number or None for the newest} → {"steps": that have completions, "step", "groups"}, in
    the form for scoring, without columns; `tokens` stays the count where there are no ids."""
    run = RunFolder(Path(request["run"]))
    index = CompletionIndex(run.completions)
    while index.advance():
        call.check()
    if not (steps := sorted(index.steps())):
        raise UserError("run", f"The run {run.name} has no completions yet.")
    last = request.get("step")
    step = max((step for step in steps if last is None or step <= last), default=steps[0])
    lines: list[dict[str, Any]] = []
    for number, row in enumerate(index.rows(step)):
        line: dict[str, Any] = {**bench.line_of(bench.group_of(row, number, f"Group {number + 1} of step {step}"))}
        for completion, written in zip(line["completions"], row["completions"], strict=True):
            completion["tokens"] = completion["tokens"] or written.get("tokens")
        del line["columns"]
        lines.append(line)
    return {"steps": steps, "step": step, "groups": lines}


def read_completions(call: QuestionCall, **request: Any) -> list[ScoringRow]:
    """{"path"} or {"text"}, rows {prompt, completion, answer, type?} → lines of groups, one for consecutive rows of one
    prompt. Raises UserError on `completions` naming the line.
    """
    if "path" in request:
        groups = bench.read_groups(Path(request["path"]))
    elif request["text"].lstrip().startswith("{"):
        groups = bench.groups_in(request["text"], "what was pasted")
    else:  # plain text is one completion
        groups = [bench.group_of({"completion": request["text"]}, 0, "What was pasted")]
    return [bench.line_of(group) for group in bench.merge_consecutive(groups)]


def reward_cases(call: QuestionCall, **request: Any) -> dict[str, Any]:
    """{"file", "do": list | keep | drop, "group"?, "completion"?, "expected"?, "place"?} → {"path", "cases"}. keep: add
    one completion with its scores, in place of a case about the same one. drop: delete the case at index `place`."""
    file = locate_reward_file(request["file"]).resolve()
    cases = bench.read_cases(file)
    if request.get("do") == "keep":
        case = bench.new_case(request["group"], request["completion"], request["expected"], request.get("calls") or {})
        about = ("prompt", "answer", "completion")
        cases = [other for other in cases if any(other.get(key) != case.get(key) for key in about)] + [case]
        bench.write_cases(file, cases)
    elif request.get("do") == "drop":
        del cases[int(request["place"])]
        bench.write_cases(file, cases)
    return {"path": str(bench.cases_file(file)), "cases": cases}


def judge_servers(call: QuestionCall, **request: Any) -> list[dict[str, Any]]:
    """{} → the servers on this machine that could judge, {name, url, models}."""
    from backend.judges.server import find_servers

    return [asdict(server) for server in find_servers()]


def judge_key(call: QuestionCall, **request: Any) -> None:
    """{url, key}: the key of a server, kept in the system's keychain; an empty one is deleted."""
    from backend.judges.server import save_key

    save_key(urlsplit(request["url"]).hostname or "", str(request["key"]))
