"""The share of a run's completions that are right, by one of its reward functions; and the largest reward possible."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from app.state.run import Run, reward_entries
from backend.config.config import SETTINGS
from backend.rewards.catalogue import RewardCall, find_call
from backend.runs.completion_rows import listed_completions, scores_of
from backend.runs.run_folder import RunFolder, modified_at
from backend.runs.run_record import read_notes
from backend.trainer.evaluation.evaluation_rows import FULL_SCORES, default_pass_rule
from backend.utils.errors import UserError

FORM_SCORES = dict.fromkeys(  # other shipped functions → their largest score
    ("r1_int_reward_func", "r1_strict_format_reward_func", "r1_soft_format_reward_func", "r1_count_xml"), 0.5
) | dict.fromkeys(("think_format_reward", "valid_json", "regex_match", "keyword", "length_target"), 1.0)
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Correctness:
    """`reward`: name of the scores; `full`: the score of a right completion, where a wrong one has 0."""

    reward: str
    full: float

    @property
    def metric(self) -> str:
        return f"rewards/{self.reward}/mean"


def correctness_of(run: Run) -> Correctness | None:
    """The rule of evaluations, or the reward that the user has marked, if it gives a full score or nothing."""
    entries = entries_of(run)
    rule = default_pass_rule(entries)
    name = marked_reward(run) or (rule.reward if rule else "")
    if not name:
        return None
    full = next((score for call, score in _full_scores(entries) if call.name == name), None)
    full = full or _largest_score(run, name) or 1.0  # as long as all are 0 it does not matter
    means, stds = (run.series(f"rewards/{name}/{kind}")[1] for kind in ("mean", "std"))
    if len(means) == 0 or len(stds) != len(means):
        return None
    # Of all scores from 0 to `full` with one mean, those of two values scatter most.
    least = means * (full - means) * (1 - ROUNDING) - ROUNDING
    is_graded = np.isfinite(means) & np.isfinite(stds) & (stds**2 < least)
    return None if is_graded.any() or np.nanmin(means, initial=0.0) < 0 else Correctness(name, full)


def marked_reward(run: Run) -> str:
    return _marked_reward(run.folder, modified_at(run.folder.about))


@lru_cache
def _marked_reward(run: RunFolder, _written: float) -> str:
    with suppress(UserError):  # Runs shows what is wrong with the notes
        return read_notes(run).correctness
    return ""


def entries_of(run: Run) -> list[str]:
    return [entry for entry in reward_entries(run.config) if find_call(entry)]


def _largest_score(run: Run, name: str) -> float:
    steps, means = run.series(f"rewards/{name}/mean")
    logged = np.isin(steps, run.index.steps()) & np.isfinite(means)
    if not logged.any():
        return 0.0
    rows = run.index.rows(int(steps[logged][np.argmax(means[logged])]))
    scores = (scores_of(each).get(name) for row in rows for each in listed_completions(row))
    return max((float(score) for score in scores if isinstance(score, int | float)), default=0.0)


def largest_reward(run: Run) -> float | None:
    """The weighted sum of all functions' full scores; None where one is unknown or weights vary."""
    entries = entries_of(run)
    weights = run.config.get("reward_weights") or [1.0] * len(entries)
    if not isinstance(weights, list) or len(weights) != len(entries) or run.config.get("stages"):
        return None
    if len(run.reward_names) > len(entries):  # those of environments
        return None
    if any(SETTINGS["reward_weights"].label in mark.sentence for mark in run.data.marks if mark.kind == "change"):
        return None
    scores = [score for _, score in _full_scores(entries)]
    known = [weight * score for weight, score in zip(weights, scores, strict=True) if score and weight >= 0]
    return sum(known) if len(known) == len(scores) else None


def _full_scores(entries: Sequence[str]) -> list[tuple[RewardCall, float | None]]:
    calls = [call for entry in entries if (call := find_call(entry))]
    return [(call, None if call.file else (FULL_SCORES | FORM_SCORES).get(call.function)) for call in calls]
