"""Regression tests of a reward file: completions with their expected scores.

`my_rewards.py` has its cases in `my_rewards.cases.jsonl`, one per line: {prompt, answer, type, columns, completion,
tokens, expected: {function: score or null}, calls: {function: its entry, if more than the name}}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.rewards.bench import BenchSettings, RewardBench
from backend.rewards.catalogue import builtin_rewards, computes_names, reward_call, rewards_in_file
from backend.runs.completion_rows import token_ids
from backend.utils import documents
from backend.utils.disk_faults import writing
from backend.utils.errors import UserError
from backend.utils.files import read_text
from backend.utils.whole_file import save_as

TOLERANCE = 1e-6
"""Absolute or relative tolerance of scores."""
_SETTING = "cases"
MOST_BYTES = 2**28
"""Maximum bytes of a cases file."""

Case = dict[str, Any]
Expected = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Scores of a case, and a message for each that differs."""

    case: Case
    scores: Mapping[str, float | None]
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures


def cases_file(reward_file: Path) -> Path:
    """Path of a reward file's cases."""
    return reward_file.with_name(f"{reward_file.stem}.cases.jsonl")


def read_cases(reward_file: Path) -> list[Case]:
    """Cases in file order; [] without a file. Raises UserError on `cases`."""
    path = cases_file(reward_file)
    if not path.exists():
        return []
    lines = read_text(path, _SETTING, MOST_BYTES).split("\n")
    return [_case(line, f"Line {number} of {path.name}") for number, line in enumerate(lines, 1) if line.strip()]


def _case(line: str, where: str) -> Case:
    try:
        case = documents.parse_loose_json(line)
    except documents.BrokenJson as error:
        raise UserError(_SETTING, f"{where} is not JSON that can be read: {error.why}.") from None
    if (
        not isinstance(case, dict)
        or not isinstance(case.get("completion"), str)
        or not _is_expected(case.get("expected"))
    ):
        raise UserError(_SETTING, f"{where} needs a text under completion, and function: score under expected.")
    return case


def _is_expected(value: Any) -> bool:
    if not isinstance(value, dict) or not value:
        return False
    return all(score is None or (isinstance(score, int | float) and math.isfinite(score)) for score in value.values())


def write_cases(reward_file: Path, cases: Sequence[Case]) -> None:
    """Replace the file, or delete it if there are no cases. Raises DiskError."""
    path = cases_file(reward_file)
    if cases:
        return save_as(path, "".join(json.dumps(case, ensure_ascii=False, default=str) + "\n" for case in cases))
    with writing(path):
        path.unlink(missing_ok=True)
    return None


def new_case(
    line: Mapping[str, Any], completion: str, expected: Expected, calls: Mapping[str, str] | None = None
) -> Case:
    """A case of one completion of the group `line` (see `backend.rewards.completion_lines.line_of`)."""
    keys = ("prompt", "answer", "type", "columns", "messages")
    about = {key: line[key] for key in keys if line.get(key) not in (None, [], {})}
    sampled = next((row for row in line.get("completions") or () if row.get("text") == completion), {})
    tokens = token_ids(sampled.get("tokens"))
    entries = {name: entry for name, entry in (calls or {}).items() if name in expected and entry != name}
    return {
        **about,
        "completion": completion,
        **({"tokens": tokens} if tokens else {}),
        "expected": dict(expected),
        **({"calls": entries} if entries else {}),
    }


def is_same(a: Case, b: Case) -> bool:
    """True if two cases have the same prompt and completion."""
    return all(a.get(key) == b.get(key) for key in ("prompt", "answer", "completion"))


def rerun(
    bench: RewardBench, file: Path, cases: Sequence[Case], timeout_s: float, poll: Callable[[], None] = lambda: None
) -> list[CaseResult]:
    """Score every case with its functions. Raises UserError if the file cannot be loaded."""
    entries = {name: (case.get("calls") or {}).get(name, name) for case in cases for name in case["expected"]}
    available = [entry for entry in entries.values() if _may_exist(entry, file)]
    if not available:
        return [check(case, {}) for case in cases]
    results = bench.score(
        BenchSettings(available, file=file, timeout_s=timeout_s), [_line(case) for case in cases], poll
    )
    counted = [result for result in results if result.error is None]
    return [check(case, {result.name: result.scores[i] for result in counted}) for i, case in enumerate(cases)]


def _may_exist(entry: str, file: Path) -> bool:
    """False if the function is gone, so that only its own case fails."""
    names = [function.name for function in (*builtin_rewards(), *rewards_in_file(file))]
    try:
        call = reward_call(entry, names)
    except UserError:
        return False
    return bool(call.file) or computes_names(file) or call.function in names


def _line(case: Case) -> dict[str, Any]:
    completion = {"text": case["completion"], "tokens": case.get("tokens") or []}
    group = {key: value for key, value in case.items() if key not in ("expected", "calls", "tokens", "completion")}
    return {**group, "completions": [completion]}


def check(case: Case, scores: Mapping[str, float | None]) -> CaseResult:
    """Compare with the expected scores; a missing score fails."""
    failures = [_failure(name, expected, scores) for name, expected in case["expected"].items()]
    return CaseResult(case, scores, tuple(sentence for sentence in failures if sentence))


def _failure(name: str, expected: float | None, scores: Mapping[str, float | None]) -> str:
    if name not in scores:
        return f"{name} gave no score; {_score_text(expected)} is expected."
    score = scores[name]
    if expected is None or score is None:
        is_equal = expected is score
    else:
        is_equal = math.isclose(expected, score, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return "" if is_equal else f"{name} gave {_score_text(score)}; {_score_text(expected)} is expected."


def _score_text(score: float | None) -> str:
    return "no opinion" if score is None else f"{score:.6g}"
