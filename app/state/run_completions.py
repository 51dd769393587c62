"""completions.jsonl of a run: facts of every completion in columns of numbers, filters over them, full-text search."""

import json
import re
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
from PySide6.QtCore import QObject, QTimer, Signal

from backend.rewards.catalogue import CODE_TESTS, COMPARING_REWARDS
from backend.runs.completion_rows import (
    GroupRow,
    TokenData,
    conversation_text,
    listed_completions,
    logged_of,
    parse_group_row,
    policy_tokens,
    prompt_key,
    read_line,
    scores_of,
    without_token_data,
)
from backend.runs.events import Follower

CUT_OFF, IDENTICAL, BEST, WORST = 1, 2, 4, 8  # flags; BEST and WORST only in a group whose rewards differ
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

    def __len__(self) -> int:
        return len(self._arrays["row"])

    @property
    def rewards(self) -> list[str]:
        return [name.removeprefix("score:") for name in self._arrays if name.startswith("score:")]

    def column(self, name: str) -> np.ndarray:
        """A column as an array; NaN throughout for a function without scores."""
        values = self._arrays.get(name)
        # Copied: an array that lends its memory to a view cannot grow.
        return np.full(len(self), np.nan, np.float32) if values is None else np.array(values)

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
    """The numbers ordered by this column; by "" as they are."""
    if not key:
        return numbers
    values = facts.per_completion("step") if key == "step" else facts.column(key)
    chosen = values[numbers].astype(np.float64)
    order = np.argsort(-chosen if descending else chosen, kind="stable")  # NaN sorts last either way
    return numbers[order]


READ_BYTES = 128 << 10  # bytes that facts and search read at a time
MOST_HITS = 20_000  # matching completions after which a search ends
SLICE_S = 0.006
BEHIND_MS, PAINT_MS, CAUGHT_UP_MS = 2, 20, 500
"""Pauses before reading on: while there is more, while a page paints what is new, at the end of the file."""
GROWN_EVERY_S = 0.4
KEPT_ROWS = 64


class FactsReader:
    """Reads the facts of all rows, or of those with a text in a prompt, completion or logged text, in either case."""

    def __init__(self, path: Path, text: str = "") -> None:
        self.text = text
        self.facts = CompletionFacts()
        self.matches: list[int] = []  # numbers among `facts`, at most MOST_HITS
        self.is_done = False  # the end of the file, or MOST_HITS, was reached
        self.is_void = False  # the file was cut back
        self._lines = Follower(path, limit=READ_BYTES)
        is_call = not set(text).isdisjoint("→←✕(=")  # shown so, and written as JSON
        self._in_line = re.compile(b"" if is_call else b"".join(map(_spelled, text)), re.IGNORECASE)
        self._in_text = re.compile(re.escape(text), re.IGNORECASE)

    @property
    def share(self) -> float:
        return self._lines.share

    @property
    def is_cut_short(self) -> bool:
        return len(self.matches) >= MOST_HITS

    def advance(self, seconds: float) -> bool:
        """Read for about so long; True if there is more."""
        deadline = time.perf_counter() + seconds
        self.is_done = self.is_void or self.is_cut_short
        while not self.is_done and time.perf_counter() < deadline:
            placed = self._lines.lines()
            self.is_void = self._lines.restarted
            for offset, line in placed:
                if self._in_line.search(line) and not self.is_cut_short:
                    self._take(offset, line)
            self.is_done = not placed or self.is_void or self.is_cut_short
        return not self.is_done

    def _take(self, offset: int, line: bytes) -> None:
        row = parse_group_row(without_token_data(line))
        if row is None:
            return
        before = len(self.facts)
        if not self.text:
            self.facts.append(row, offset)
            return
        completions = listed_completions(row)
        if self._in_text.search(str(row.get("prompt"))):
            places = list(range(len(completions)))
        else:
            texts = [[conversation_text(each), *logged_of(each).values()] for each in completions]
            found = [any(isinstance(text, str) and self._in_text.search(text) for text in each) for each in texts]
            places = [place for place, is_found in enumerate(found) if is_found]
        if places:
            self.facts.append(row, offset)
            self.matches += [before + place for place in places]


def _spelled(letter: str) -> bytes:
    cases = {letter} if letter.isascii() else {case for case in (letter.lower(), letter.upper()) if len(case) == 1}
    forms = {json.dumps(case, ensure_ascii=ascii)[1:-1] for case in cases or {letter} for ascii in (True, False)}
    return b"(?:" + b"|".join(re.escape(form.encode(errors="replace")) for form in sorted(forms)) + b")"


class RunCompletions(QObject):
    """The completions of the run on show: `facts` of all read so far, and the `search`, or None."""

    grew = Signal()  # `facts` or `search` has more, now and then, and at the end
    voided = Signal()  # the file was cut back: everything shown of it is void

    def __init__(self, path: Path, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.path = path
        self.search: FactsReader | None = None
        self.row_at = lru_cache(KEPT_ROWS)(self._read_row)
        self._all = FactsReader(path)
        self._is_wanted = self._has_news = False
        self._last_grew = 0.0
        self._timer = QTimer(self)
        self._timer.timeout.connect(self.advance)

    def follow(self, wanted: bool) -> None:
        self._is_wanted = wanted
        if wanted and not self._timer.isActive():
            self._timer.start(BEHIND_MS)
        elif not wanted:
            self._timer.stop()

    def clear(self) -> None:
        self._all = FactsReader(self.path)
        self.row_at.cache_clear()
        if self.search is not None:
            self.search = FactsReader(self.path, self.search.text)
        self.voided.emit()

    @property
    def facts(self) -> CompletionFacts:
        return self._all.facts

    @property
    def shown(self) -> FactsReader:
        """The reader of what is asked for; `select` numbers refer to its facts."""
        return self.search if self.search is not None else self._all

    def find(self, text: str) -> None:
        """Search for a text; "" ends the search."""
        self.search = FactsReader(self.path, text) if text else None
        self._has_news, self._last_grew = True, 0.0
        if self._is_wanted:
            self._timer.start(0)

    def advance(self) -> None:
        """Read for about SLICE_S, a search first."""
        every_s = GROWN_EVERY_S * (1 + len(self.shown.facts) / 100_000)  # a page needs longer for more
        if self._has_news and time.monotonic() - self._last_grew > every_s:
            self._emit_grew()
            self._timer.setInterval(PAINT_MS)
            return
        was_complete, is_behind = self.shown.is_done, False
        for reader in dict.fromkeys((self.shown, self._all)):
            before = len(reader.facts), reader.is_done
            is_behind = reader.advance(SLICE_S)
            if reader.is_void:
                self.clear()
                return
            self._has_news = self._has_news or (len(reader.facts), reader.is_done) != before
            if is_behind:
                break
        if self._has_news and (not is_behind or self.shown.is_done != was_complete):
            self._emit_grew()
        self._timer.setInterval(BEHIND_MS if is_behind else CAUGHT_UP_MS)

    def _emit_grew(self) -> None:
        self._has_news, self._last_grew = False, time.monotonic()
        self.grew.emit()

    def select(self, query: Query) -> np.ndarray:
        """Numbers among the facts of `shown` of what the query and the search leave."""
        chosen = select(self.shown.facts, query, self.facts.largest or None)
        if self.search is None:
            return chosen
        return np.intersect1d(chosen, np.array(self.search.matches, np.int64), assume_unique=True)

    def _read_row(self, offset: int) -> GroupRow | None:
        return parse_group_row(without_token_data(read_line(self.path, offset)))

    def token_data(self, offset: int, place: int) -> TokenData | None:
        """The tokens of a completion, None if not recorded."""
        row = parse_group_row(read_line(self.path, offset))
        completions = (row or {}).get("completions") or []
        data = completions[place].get("token_data") if place < len(completions) else None
        has_texts = isinstance(data, dict) and isinstance(data.get("text"), list)
        return cast("TokenData", data) if has_texts else None
