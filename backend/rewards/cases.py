"""Regression cases of a reward file: completions kept beside it with the scores that they should go on getting.

`my_rewards.py` has its cases in `my_rewards.cases.jsonl`, a line each: {prompt, answer, type, columns, completion, tokens,
expected: {function: score or null}, calls: {function: its entry, where that says more than the name}}. The file belongs to
the person, who may write it by hand.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.rewards.sandbox.client import SandboxClient, SandboxTask
from backend.spec.completions import token_ids
from backend.spec.faults import Mistake
from backend.spec.rewards.catalog import builtin_rewards, computes_names, reward_call, rewards_in_file

TOLERANCE = 1e-6
"""Scores that differ by less, absolutely or as a share, are the same."""
_SETTING = "cases"

Case = dict[str, Any]
Expected = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Checked:
    """A case after it was scored: per function what was expected and what it gave; `failures` are the sentences."""

    case: Case
    given: Mapping[str, float | None]
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures


def cases_file(reward_file: Path) -> Path:
    """Where the cases of a reward file are kept."""
    return reward_file.with_name(f"{reward_file.stem}.cases.jsonl")


def read_cases(reward_file: Path) -> list[Case]:
    """The cases in the order in which they were kept; none where there is no file. Raises Mistake on `cases`."""
    path = cases_file(reward_file)
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise Mistake(
            _SETTING, f"{path.name} cannot be read: {getattr(error, 'strerror', 'it is no UTF-8 text')}."
        ) from None
    return [_case(line, f"Line {number} of {path.name}") for number, line in enumerate(lines, 1) if line.strip()]


def _case(line: str, where: str) -> Case:
    try:
        case = json.loads(line)
    except json.JSONDecodeError as error:
        raise Mistake(_SETTING, f"{where} is not JSON: {error.msg}.") from None
    if (
        not isinstance(case, dict)
        or not isinstance(case.get("completion"), str)
        or not _is_expected(case.get("expected"))
    ):
        raise Mistake(_SETTING, f"{where} needs a text under completion, and function: score under expected.")
    return case


def _is_expected(told: Any) -> bool:
    if not isinstance(told, dict) or not told:
        return False
    return all(score is None or (isinstance(score, int | float) and math.isfinite(score)) for score in told.values())


def write_cases(reward_file: Path, cases: Sequence[Case]) -> None:
    """Write them all, whole or not at all; no case, no file. Raises Mistake on `cases`."""
    path = cases_file(reward_file)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if not cases:
            path.unlink(missing_ok=True)
            return
        text = "".join(json.dumps(case, ensure_ascii=False, default=str) + "\n" for case in cases)
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise Mistake(_SETTING, f"{path} cannot be written: {error.strerror}.") from None


def new_case(
    line: Mapping[str, Any], completion: str, expected: Expected, calls: Mapping[str, str] | None = None
) -> Case:
    """A case of one completion; `line` is its group, as `backend.rewards.completion_lines.line_of` writes it."""
    wanted = ("prompt", "answer", "type", "columns", "messages")
    about = {key: line[key] for key in wanted if line.get(key) not in (None, [], {})}
    told = next((one for one in line.get("completions") or () if one.get("text") == completion), {})
    ids = {"tokens": found} if (found := token_ids(told.get("tokens"))) else {}
    entries = {name: entry for name, entry in (calls or {}).items() if name in expected and entry != name}
    return {
        **about,
        "completion": completion,
        **ids,
        "expected": dict(expected),
        **({"calls": entries} if entries else {}),
    }


def is_same(one: Case, other: Case) -> bool:
    """Whether two cases are about the same completion of the same prompt."""
    return all(one.get(key) == other.get(key) for key in ("prompt", "answer", "completion"))


def rerun(
    scorer: SandboxClient, file: Path, cases: Sequence[Case], timeout_s: float, poll: Callable[[], None] = lambda: None
) -> list[Checked]:
    """Score every case with the functions it names. Raises Mistake where the file cannot be loaded."""
    calls = _calls(cases)
    known = [entry for entry in calls.values() if _is_there(entry, file)]
    if not known:
        return [check(case, {}) for case in cases]
    outcomes = scorer.score(SandboxTask(known, [_line(case) for case in cases], file, timeout_s), poll)
    sound = [one for one in outcomes if one.error is None]
    return [check(case, {one.name: one.scores[place] for one in sound}) for place, case in enumerate(cases)]


def _calls(cases: Sequence[Case]) -> dict[str, str]:
    """Every function that some case expects something of, by name, as its entry."""
    return {name: (case.get("calls") or {}).get(name, name) for case in cases for name in case["expected"]}


def _is_there(entry: str, file: Path) -> bool:
    """Whether the function can be had still; where only running the file can tell, it is taken to be there."""
    known = [*builtin_rewards(), *rewards_in_file(file)]
    try:
        call = reward_call(entry, [one.name for one in known])
    except Mistake:
        return False
    return bool(call.file) or computes_names(file) or call.function in {one.name for one in known}


def _line(case: Case) -> dict[str, Any]:
    told = {"text": case["completion"], "tokens": case.get("tokens") or []}
    kept = {key: value for key, value in case.items() if key not in ("expected", "calls", "tokens", "completion")}
    return {**kept, "completions": [told]}


def check(case: Case, given: Mapping[str, float | None]) -> Checked:
    """Compare what functions gave with what is expected; a function that gave nothing has failed."""
    failures = [_failure(name, wanted, given) for name, wanted in case["expected"].items()]
    return Checked(case, given, tuple(sentence for sentence in failures if sentence))


def _failure(name: str, wanted: float | None, given: Mapping[str, float | None]) -> str:
    if name not in given:
        return f"{name} gave no score; {_shown(wanted)} is expected."
    got = given[name]
    if wanted is None or got is None:
        alike = wanted is got
    else:
        alike = math.isclose(wanted, got, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return "" if alike else f"{name} gave {_shown(got)}; {_shown(wanted)} is expected."


def _shown(score: float | None) -> str:
    return "no opinion" if score is None else f"{score:.6g}"
