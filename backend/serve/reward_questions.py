"""Questions of the reward bench: sample the model, score completions, bring back a run's, keep and rerun cases.

A person's code runs in a process apart, and only with contents that the window says were agreed to (`trusted`: SHA-256
by path). The model and the scoring process stay warm between questions.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backend.rewards.cases import cases_file, is_same, new_case, read_cases, rerun, write_cases
from backend.rewards.completion_lines import group_of, groups_in, line_of, read_groups, together
from backend.rewards.sandbox.client import SandboxClient
from backend.rewards.trial_scoring import Rules, score_lines
from backend.serve.call import QuestionCall
from backend.spec.completions import GroupRow, ScoringRow, parse_group_row
from backend.spec.config import DEFAULT_REWARDS, keys_used_by, parse, problems
from backend.spec.faults import Mistake
from backend.spec.rewards.catalog import locate_reward_file
from backend.spec.rewards.user_code import code_files, read_code

_scorer = SandboxClient()
atexit.register(_scorer.close)

_FOR_SCORING = keys_used_by("rewards", "scoring")
_NOT_FOR_SAMPLING = (*keys_used_by("rewards"), "stages")
"""Settings that have nothing to do with what is asked; what is wrong with them is said elsewhere."""


# ── scoring ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def score(asked: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{"settings", "groups": lines of `backend.rewards.completion_lines`, "trusted"} → what `backend.rewards.trial_scoring.score_lines` gives,
    and with a reward file that has cases: "cases". Tells {"scoring": function's name}. A file that cannot be loaded is
    answered as {"failed": {"sentence", "file", "line", "frames"}}."""
    rules = _rules(asked["settings"])
    _hold_to(asked.get("trusted") or {}, rules)
    try:
        found = score_lines(_scorer, asked["groups"], rules, call.check, lambda name: call.tell({"scoring": name}))
        return {**found, **_checked_cases(rules, call)}
    except Mistake as mistake:
        if not hasattr(mistake, "blame"):
            raise
        return {"failed": mistake.blame.to_dict()}  # type: ignore[attr-defined]


def _rules(raw: Mapping[str, Any]) -> Rules:
    """Raises Mistake for what is wrong with the settings that scoring needs; the others do not matter here."""
    given = {key: value for key, value in raw.items() if key in _FOR_SCORING}
    wrong = [fault for fault in problems({"model": "-", "data": "-", **given}) if fault.setting in _FOR_SCORING]
    if wrong:
        raise Mistake(wrong)
    return Rules.of(parse({"model": "-", "data": "-", **given}).model_dump())


def _hold_to(trusted: Mapping[str, str], rules: Rules) -> None:
    """Refuse to run code of which these very contents were not agreed to."""
    for path in code_files({"reward_functions": list(rules.names), "reward_functions_file": str(rules.file or "")}):
        if trusted.get(str(path)) != read_code(path).fingerprint:
            sentence = f"{path.name} has not been allowed to run as it is now."
            raise Mistake("reward_functions_file", sentence)


# ── where completions come from ──────────────────────────────────────────────────────────────────────────────────────


def sample(asked: dict[str, Any], call: QuestionCall) -> list[dict[str, Any]]:
    """{"settings", "how", "count", "numbers", "group_size", "seed"} → lines of groups. Tells {"phase", "done", "of"}.
    To be called on the model's thread."""
    from backend.run.trial_sampling import Pick

    raw = {key: value for key, value in asked["settings"].items() if key not in _NOT_FOR_SAMPLING}
    config = parse({**raw, "reward_functions": list(DEFAULT_REWARDS)})
    pick = Pick(asked.get("how", "random"), int(asked.get("count", 8)), tuple(asked.get("numbers") or ()))
    groups = _tryout().sample(config, pick, int(asked["group_size"]), int(asked["seed"]), call.tell, call.check)
    return [{**line_of(group), "row": group.problem.index + 1} for group in groups]


_kept: dict[str, Any] = {}


def _tryout() -> Any:
    """The model's keeper, made when it is first asked for: scoring does not wait for the engine's import."""
    from backend.run.trial_sampling import TrialSampler

    return _kept.setdefault("tryout", TrialSampler())


def run_completions(asked: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{"run": folder, "step": a step or None for the newest} → {"steps": all that have completions, "step", "groups"}."""
    path = Path(asked["run"]) / "completions.jsonl"
    by_step: dict[int, list[GroupRow]] = {}
    for row in _rows_of(path, call):
        by_step.setdefault(row["step"], []).append(row)
    if not by_step:
        raise Mistake("run", f"The run {path.parent.name} has no completions yet.")
    wanted = asked.get("step")
    step = max((each for each in by_step if wanted is None or each <= wanted), default=min(by_step))
    lines = [_line(row, place, f"Group {place + 1} of step {step}") for place, row in enumerate(by_step[step])]
    return {"steps": sorted(by_step), "step": step, "groups": lines}


def _rows_of(path: Path, call: QuestionCall) -> Iterator[GroupRow]:
    """Rows of completions.jsonl as they were written, the unfinished last line left out."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file):
                if number % 500 == 0:
                    call.check()
                row = parse_group_row(line)
                if row is not None:
                    yield row
    except OSError:
        raise Mistake("run", f"The run {path.parent.name} has no completions yet.") from None


def _line(row: GroupRow, place: int, where: str) -> dict[str, Any]:
    """A row of a run as one to be scored, without columns; `tokens` stays the count where there are no ids."""
    line: dict[str, Any] = {**line_of(group_of(row, place, where))}
    for completion, written in zip(line["completions"], row["completions"], strict=True):
        completion["tokens"] = completion["tokens"] or written.get("tokens")
    del line["columns"]
    return line


def read_completions(asked: dict[str, Any], call: QuestionCall) -> list[ScoringRow]:
    """{"path"} or {"text"}, rows {prompt, completion, answer, type?} → lines of groups; rows of one prompt that follow
    one another are one group. Raises Mistake on `completions` naming the line."""
    if "path" in asked:
        groups = read_groups(Path(asked["path"]))
    elif asked["text"].lstrip().startswith("{"):
        groups = groups_in(asked["text"], "what was pasted")
    else:  # plain text is one completion
        groups = [group_of({"completion": asked["text"]}, 0, "What was pasted")]
    return [line_of(group) for group in together(groups)]


# ── cases ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def reward_cases(asked: dict[str, Any], call: QuestionCall) -> dict[str, Any]:
    """{"file", "do": list | keep | drop, "group"?, "completion"?, "expected"?, "place"?} → {"path", "cases"}.

    keep: one completion of a group with its scores; a case about the same completion is replaced. drop: the case at
    `place`, from 0.
    """
    file = locate_reward_file(asked["file"]).resolve()
    cases = read_cases(file)
    if asked.get("do") == "keep":
        case = new_case(asked["group"], asked["completion"], asked["expected"], asked.get("calls") or {})
        cases = [each for each in cases if not is_same(each, case)] + [case]
        write_cases(file, cases)
    elif asked.get("do") == "drop":
        del cases[int(asked["place"])]
        write_cases(file, cases)
    return {"path": str(cases_file(file)), "cases": cases}


def _checked_cases(rules: Rules, call: QuestionCall) -> dict[str, Any]:
    """The cases beside the reward file, scored anew; nothing where there are none."""
    cases = read_cases(rules.file) if rules.file else []
    if not cases or rules.file is None:
        return {}
    return {"cases": [asdict(one) for one in rerun(_scorer, rules.file, cases, rules.timeout_s, call.check)]}
