"""Facts of every completion in columns of numbers, and filters over them."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from backend.rewards.catalogue import CODE_TESTS, COMPARING_REWARDS
from backend.runs.completion_rows import listed_completions, logged_of, policy_tokens, prompt_key, scores_of

CUT_OFF, IDENTICAL, BEST, WORST = 1, 2, 4, 8
"""Flags; BEST and WORST only in a group whose rewards differ."""
ROW_COLUMNS = {"step": "q", "offset": "q", "prompt": "q"}
COLUMNS = {"row": "i", "place": "i", "reward": "f", "advantage": "f", "tokens": "f", "flags": "B"}
"""Column → type code. `place` is the number in its row, `prompt` a hash of the row's prompt."""


class CompletionFacts:
    """Columns by name: COLUMNS, ROW_COLUMNS by row, `score:<function>`, `logged:<name>`."""

    def __init__(self) -> None:
        self.rows = 0
        self.largest: dict[str, float] = {}  # function → its largest score by magnitude
        self.logged: dict[str, bool] = {}  # name that a function logged → some were numbers
        self._arrays = {name: array(code) for name, code in (ROW_COLUMNS | COLUMNS).items()}
        self._views: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._arrays["row"])

    @property
    def rewards(self) -> list[str]:
        return [name.removeprefix("score:") for name in self._arrays if name.startswith("score:")]

    def column(self, name: str) -> np.ndarray:
        """A column as an array; NaN throughout for a function without scores."""
        values = self._arrays.get(name)
        if values is None:
            return np.full(len(self), np.nan, np.float32)
        if name not in self._views or len(self._views[name]) != len(values):
            # Copied: an array that lends its memory to a view cannot grow.
            self._views[name] = np.array(np.frombuffer(values, dtype=values.typecode))
        return self._views[name]

    def per_completion(self, name: str) -> np.ndarray:
        return self.column(name)[self.column("row")]

    def append(self, row: Mapping[str, Any], offset: int) -> None:
        """Add a row of completions.jsonl, of any shape."""
        completions = listed_completions(row)
        count = len(completions)
        self._arrays["step"].append(step if isinstance(step := row.get("step"), int) else 0)
        self._arrays["offset"].append(offset)
        self._arrays["prompt"].append(hash(prompt_key(row)))
        rewards = [_number(completion.get("reward")) for completion in completions]
        self._arrays["row"].extend([self.rows] * count)
        self._arrays["place"].extend(range(count))
        self._arrays["reward"].extend(rewards)
        self._arrays["advantage"].extend([_number(completion.get("advantage")) for completion in completions])
        self._arrays["tokens"].extend([_number(policy_tokens(completion)) for completion in completions])
        texts = [completion.get("text") for completion in completions]
        times = Counter(text for text in texts if isinstance(text, str))
        known = [reward for reward in rewards if reward == reward]
        low, high = min(known, default=0.0), max(known, default=0.0)
        self._arrays["flags"].extend(
            CUT_OFF * (completion.get("stop") == "length")
            | IDENTICAL * (isinstance(text, str) and times[text] > 1)
            | (low < high) * (BEST * (reward == high) | WORST * (reward == low))
            for completion, text, reward in zip(completions, texts, rewards, strict=True)
        )
        scores = self._append_columns("score:", [scores_of(completion) for completion in completions])
        for name, numbers in scores.items():
            self.largest[name] = max(self.largest.get(name, 0.0), *(abs(x) for x in numbers if x == x), 0.0)
        logged = [logged_of(completion) for completion in completions]
        if self.logged or any(logged):  # rarely, and a large file has millions of rows
            for name, numbers in self._append_columns("logged:", logged).items():
                self.logged[name] = self.logged.get(name, False) or any(x == x for x in numbers)
        self.rows += 1

    def _append_columns(self, prefix: str, values: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
        before = len(self) - len(values)
        numbers: dict[str, list[float]] = {}
        for name in dict.fromkeys(name for each in values for name in each):
            column = self._arrays.setdefault(f"{prefix}{name}", array("f"))
            column.extend([np.nan] * (before - len(column)))
            numbers[name] = [_number(each.get(name)) for each in values]
            column.extend(numbers[name])
        for name, column in self._arrays.items():
            if name.startswith(prefix):  # of which this row has no values
                column.extend([np.nan] * (len(self) - len(column)))
        return numbers


def _number(value: Any) -> float:
    if type(value) is float:  # nearly always: a large file has tens of millions
        return value
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else np.nan


ALL, SCORE, WELL_FORMED_WRONG = "all", "score", "well_formed_wrong"


@dataclass(frozen=True, slots=True)
class Filter:
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
    """A filter; the next three are for SCORE."""

    filter: str = ALL
    measure: str = "reward"  # advantage, tokens, score:<function>, logged:<name>
    is_above: bool = True
    limit: float = 0.0
    prompt: int | None = None  # hash of a prompt, None for every prompt
    right: str = ""  # the function that tells a right completion, if known


def select(facts: CompletionFacts, query: Query, largest: dict[str, float] | None = None) -> np.ndarray:
    """Numbers of the completions that the query leaves, ascending. `largest`: largest scores over the whole run."""
    flag = FILTERS[query.filter].flag
    if flag:
        keep = (facts.column("flags") & flag) > 0
    elif query.filter == WELL_FORMED_WRONG:
        right, form = answer_rewards(facts.rewards), format_rewards(facts.rewards)
        if query.right:
            right, form = [query.right], [name for name in form if name != query.right]
        if not right or not form:
            return np.zeros(0, np.int64)
        most = facts.largest if largest is None else largest
        shares = [facts.column(f"score:{name}") / (most.get(name) or 1.0) for name in form]
        answers = [facts.column(f"score:{name}") for name in right]
        # Not the mean over those that scored: a function without an opinion must not make a completion well-formed.
        keep = (np.mean(shares, axis=0) >= 0.75) & (np.max(answers, axis=0) <= 0)
    elif query.filter == SCORE:
        values = facts.column(query.measure)
        keep = values > query.limit if query.is_above else values < query.limit  # NaN is neither
    else:
        keep = np.ones(len(facts), bool)
    if query.prompt is not None:
        keep = keep & (facts.per_completion("prompt") == query.prompt)
    return np.flatnonzero(keep)


def answer_rewards(names: Sequence[str]) -> list[str]:
    """Functions that compare with the right answer: by the catalogue, or by their name."""
    by_name = re.compile(r"accura|correct|exact_match|right_answer", re.IGNORECASE)
    judging = (*COMPARING_REWARDS, CODE_TESTS)
    return [name for name in names if name.split("(")[0] in judging or by_name.search(name)]


def format_rewards(names: Sequence[str]) -> list[str]:
    """Functions that look at the form of a completion, by their name."""
    by_name = re.compile(r"format|xml|tag|valid_json|structure", re.IGNORECASE)
    return [name for name in names if by_name.search(name) and name not in answer_rewards(names)]


def why_empty(query: Query, rewards: Sequence[str]) -> str:
    """Why a filter cannot find anything in a run with these functions, or ""."""
    if query.filter != WELL_FORMED_WRONG:
        return ""
    if not (query.right or answer_rewards(rewards)):
        return "None of the reward functions is known to compare with the right answer."
    return "" if format_rewards(rewards) else "None of the reward functions is known to look at the form."


def sort(facts: CompletionFacts, numbers: np.ndarray, key: str, *, descending: bool) -> np.ndarray:
    """These completions by a column of the facts, or `step`."""
    values = facts.per_completion("step") if key == "step" else facts.column(key)
    chosen = values[numbers].astype(np.float64)
    order = np.argsort(-chosen if descending else chosen, kind="stable")  # NaN sorts last either way
    return numbers[order]
