"""Regression tests of a reward file: completions with their expected scores. `my_rewards.py` has its cases in
`my_rewards.cases.jsonl`, one per line: {prompt, answer, type, columns, completion, tokens, expected: {function: score
or null}, calls: {function: its entry, if more than the name}}."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.config.config import Config
from backend.rewards.bench import RewardBench, json_lines
from backend.rewards.catalogue import RewardCall, builtin_rewards, computes_names, find_call, rewards_in_file
from backend.runs.completion_rows import token_ids
from backend.utils.disk import save_as, writing
from backend.utils.errors import UserError
from backend.utils.files import read_text

TOLERANCE = 1e-6  # absolute or relative tolerance of scores
_SETTING = "cases"
MOST_BYTES = 2**28

Case = dict[str, Any]
Expected = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Scores of a case, a message for each that differs, and the tracebacks of functions that failed."""

    case: Case
    scores: Mapping[str, float | None]
    failures: tuple[str, ...]
    tracebacks: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.failures


def cases_file(reward_file: Path) -> Path:
    return reward_file.with_name(f"{reward_file.stem}.cases.jsonl")


def read_cases(reward_file: Path) -> list[Case]:
    """Cases of a reward file or rubric in file order; [] without any. Raises UserError on `cases`."""
    path = cases_file(reward_file)
    return cases_in(path) if path.exists() else []


def cases_in(path: Path) -> list[Case]:
    """The cases of a file in its order. Raises UserError on `cases`."""
    cases: list[Case] = []
    text = read_text(path, _SETTING, MOST_BYTES)
    for _, where, case in json_lines(text, path.name, _SETTING):
        expected = case.get("expected") if isinstance(case, dict) else None
        scores = expected.values() if isinstance(expected, dict) else ()
        are_scores = all(score is None or (isinstance(score, int | float) and math.isfinite(score)) for score in scores)
        if not expected or not scores or not are_scores or not isinstance(case.get("completion"), str):
            raise UserError(_SETTING, f"{where} needs a text under completion, and function: score under expected.")
        cases.append(case)
    return cases


def write_cases(reward_file: Path, cases: Sequence[Case]) -> None:
    """Replace the file, or delete it if there are no cases. Raises DiskError."""
    path = cases_file(reward_file)
    if cases:
        save_as(path, "".join(json.dumps(case, ensure_ascii=False, default=str) + "\n" for case in cases))
        return
    with writing(path):
        path.unlink(missing_ok=True)


def new_case(
    line: Mapping[str, Any], completion: str, expected: Expected, calls: Mapping[str, str] | None = None
) -> Case:
    """A case of one completion of the group `line` (see `backend.rewards.bench.line_of`)."""
    keys = ("prompt", "answer", "type", "columns", "messages")
    about = {key: line[key] for key in keys if line.get(key) not in (None, [], {})}
    sampled = next((row for row in line.get("completions") or () if row.get("text") == completion), {})
    tokens = token_ids(sampled.get("tokens"))
    entries = {name: entry for name, entry in (calls or {}).items() if name in expected and entry != name}
    case = {**about, "completion": completion, "tokens": tokens, "expected": dict(expected), "calls": entries}
    return {key: value for key, value in case.items() if value or key not in ("tokens", "calls")}


def is_same(a: Case, b: Case) -> bool:
    return all(a.get(key) == b.get(key) for key in ("prompt", "answer", "completion"))


def rerun(
    bench: RewardBench, file: Path, cases: Sequence[Case], timeout_s: float, poll: Callable[[], None] = lambda: None
) -> list[CaseResult]:
    """Score every case with its functions. Raises UserError if the file cannot be loaded."""
    known = [function.name for function in (*builtin_rewards(), *rewards_in_file(file))]
    available: dict[str, None] = {}
    for case in cases:
        for name in case["expected"]:
            entry = (case.get("calls") or {}).get(name, name)
            call = RewardCall(entry) if entry in known else find_call(entry)
            # A function may be gone; then only its own case fails.
            if call and (call.file or call.function in known or computes_names(file)):
                available[entry] = None
    scores: list[dict[str, float | None]] = [{} for _ in cases]
    errors: dict[str, Mapping[str, Any]] = {}
    if available:
        scoring = Config(reward_functions=list(available), reward_functions_file=str(file), reward_timeout=timeout_s)
        left_out = ("expected", "calls", "tokens", "completion")
        lines = [
            {key: value for key, value in case.items() if key not in left_out}
            | {"completions": [{"text": case["completion"], "tokens": case.get("tokens") or []}]}
            for case in cases
        ]
        for result in bench.score(scoring, lines, poll):
            if result.error:
                errors[result.name] = result.error
            for given, score in zip(scores, result.given, strict=False):
                given[result.name] = score
    return [check(case, given, errors) for case, given in zip(cases, scores, strict=True)]


def check(
    case: Case, scores: Mapping[str, float | None], errors: Mapping[str, Mapping[str, Any]] | None = None
) -> CaseResult:
    """Compare with the expected scores; a missing score fails. `errors`: why functions gave none."""

    def text(score: float | None) -> str:
        return "no opinion" if score is None else f"{score:.6g}"

    failures: list[str] = []
    failed = {name: error for name, error in (errors or {}).items() if name in case["expected"]}
    for name, expected in case["expected"].items():
        score = scores.get(name, math.nan)
        is_equal = expected is score
        if expected is not None and score is not None:
            is_equal = math.isclose(expected, score, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        if not is_equal:
            given = f"gave {text(score)}" if name in scores else "gave no score"
            reason = f" {failed[name]['sentence']}" if name in failed else ""
            failures.append(f"{name} {given}; {text(expected)} is expected.{reason}")
    return CaseResult(case, scores, tuple(failures), tuple(error["traceback"] for error in failed.values()))
