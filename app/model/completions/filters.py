"""Which completions to show: the filters by name, and how each is worked out from the columns of facts.

`session.completions_requested` names a filter by its key in FILTERS.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.model.completions.facts import BEST, CUT_OFF, IDENTICAL, WORST, CompletionFacts
from backend.spec.rewards.catalog import COMPARING_REWARDS
from backend.spec.rewards.code_tests import CODE_TESTS

ALL, SCORE, WELL_FORMED_WRONG = "all", "score", "well_formed_wrong"


@dataclass(frozen=True, slots=True)
class Filter:
    """One filter: its label in the menu, and a sentence that says what it leaves. `flag` is that of the facts, 0 where more is needed."""

    label: str
    sentence: str
    flag: int = 0


FILTERS: dict[str, Filter] = {
    ALL: Filter("All completions", "Every completion."),
    "best": Filter("Best of each group", "The highest reward of each group whose rewards differ.", BEST),
    "worst": Filter("Worst of each group", "The lowest reward of each group whose rewards differ.", WORST),
    "cut_off": Filter("Cut off", "Those that ran into the length limit.", CUT_OFF),
    "identical": Filter(
        "Identical in the group", "Those whose text another completion of the group has too.", IDENTICAL
    ),
    WELL_FORMED_WRONG: Filter(
        "Well-formed but wrong",
        "At least three quarters of the highest format scores, and none of the score for the right answer.",
    ),
    SCORE: Filter("Score above or below…", "Those whose score lies above or below a value."),
}


@dataclass(frozen=True, slots=True)
class Query:
    """What to show. `measure` (reward, advantage, tokens, score:<function> or logged:<name>), `is_above` and `limit` belong to the filter SCORE;
    `prompt` is a prompt's hash as the facts have it, None for every prompt."""

    filter: str = ALL
    measure: str = "reward"
    is_above: bool = True
    limit: float = 0.0
    prompt: int | None = None


def select(facts: CompletionFacts, query: Query, largest: dict[str, float] | None = None) -> np.ndarray:
    """Numbers of the completions that the query leaves, ascending. `largest` are the functions' largest scores over the run, where
    `facts` is a part of it."""
    keep = _kept(facts, query, facts.largest if largest is None else largest)
    if query.prompt is not None:
        keep = keep & (facts.per_completion("prompt") == query.prompt)
    return np.flatnonzero(keep)


def _kept(facts: CompletionFacts, query: Query, largest: dict[str, float]) -> np.ndarray:
    flag = FILTERS[query.filter].flag
    if flag:
        return (facts.column("flags") & flag) > 0
    if query.filter == WELL_FORMED_WRONG:
        return _well_formed_wrong(facts, largest)
    if query.filter == SCORE:
        values = facts.column(query.measure)
        return values > query.limit if query.is_above else values < query.limit  # NaN is neither
    return np.ones(len(facts), bool)


def _well_formed_wrong(facts: CompletionFacts, largest: dict[str, float]) -> np.ndarray:
    right, form = answer_rewards(facts.rewards), format_rewards(facts.rewards)
    if not right or not form:
        return np.zeros(len(facts), bool)
    shares = [facts.column(f"score:{name}") / (largest.get(name) or 1.0) for name in form]
    answers = [facts.column(f"score:{name}") for name in right]
    # Not the mean over those that scored: a function without an opinion must not make a completion well-formed.
    return (np.mean(shares, axis=0) >= 0.75) & (np.max(answers, axis=0) <= 0)


def answer_rewards(names: Sequence[str]) -> list[str]:
    """The functions that compare with the right answer: ours by the catalogue, a user's own by what they are called."""
    by_name = re.compile(r"accura|correct|exact_match|right_answer", re.IGNORECASE)
    judging = (*COMPARING_REWARDS, CODE_TESTS)
    return [name for name in names if name.split("(")[0] in judging or by_name.search(name)]


def format_rewards(names: Sequence[str]) -> list[str]:
    """The functions that look at the form of a completion, by what they are called."""
    by_name = re.compile(r"format|xml|tag|valid_json|structure", re.IGNORECASE)
    return [name for name in names if by_name.search(name) and name not in answer_rewards(names)]


def why_empty(query: Query, rewards: Sequence[str]) -> str:
    """Why a filter cannot find anything in a run with these functions; "" where it can."""
    if query.filter != WELL_FORMED_WRONG:
        return ""
    if not answer_rewards(rewards):
        return "None of the reward functions is known to compare with the right answer."
    return "" if format_rewards(rewards) else "None of the reward functions is known to look at the form."


def sort(facts: CompletionFacts, numbers: np.ndarray, key: str, *, descending: bool) -> np.ndarray:
    """These completions by a column: one of the facts, or `step`. Those without a value come last, equal ones stay in order."""
    values = facts.per_completion("step") if key == "step" else facts.column(key)
    chosen = values[numbers].astype(np.float64)
    order = np.argsort(-chosen if descending else chosen, kind="stable")  # NaN sorts last either way
    return numbers[order]
