"""How varied the prompts of a dataset are: what repeats, how they are worded, and whether one answer prevails.

Of texts alone, without a tokenizer, and of a sample where there are many rows: SAMPLE rows or MOST_WORDS words, drawn from all rows
without regard to their order. Ten thousand prompts take under a second.
"""

from __future__ import annotations

import math
import random
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from backend.config.setting_groups import PromptSettings
from backend.data.files import Row
from backend.data.problems import PromptFormat, messages_of
from backend.data.row_views import Rows
from backend.data.rows import shown_source
from backend.training.variety import distinct_ngrams
from backend.utils.errors import UserError
from backend.utils.text import quote

# Which texts nearly repeat an earlier one.

SHINGLE = 3
"""Words of a shingle."""
NEAR = 0.8
"""Similarity from which a text counts as nearly the same. One word changed in twenty takes three shingles of eighteen: 0.71; in forty, 0.85."""
SHARED_ROWS = 20
"""Wording is told apart from what the texts say only among more texts than this: see `near_repeats`."""
COMPARISONS = 50
"""Most earlier texts that one is compared with. Only texts that resemble many others, and none enough, have as many; theirs may be missed."""

Words = tuple[str, ...]


def near_repeats(texts: Sequence[Words]) -> int:
    """How many of these different texts are nearly the same as an earlier one.

    Shingles that more than half of all texts have, an instruction before every question, are left out of account: with them, short questions
    after a long instruction would all be nearly the same.
    """
    sets = [_shingles(words) for words in texts]
    texts_with = Counter(chain.from_iterable(sets))
    most = max(SHARED_ROWS, len(texts) // 2)
    common = {shingle for shingle, count in texts_with.items() if count > most}
    shared = {shingle for shingle, count in texts_with.items() if 1 < count <= most}
    first_with: defaultdict[int, list[int]] = defaultdict(list)
    """Shingle → the texts, none nearly the same as another, that have it among their rarest."""
    found = 0
    for number, shingles in enumerate(sets):
        own = sets[number] = shingles - common if common else shingles
        own_shared = own & shared
        tried = len(own) - math.ceil(NEAR * len(own)) + 1 - (len(own) - len(own_shared))
        if tried <= 0:
            continue
        rarest = sorted(own_shared, key=lambda shingle: (texts_with[shingle], shingle))[:tried]
        candidates = dict.fromkeys(other for shingle in rarest for other in first_with[shingle][:COMPARISONS])
        if any(_are_near(own, sets[other]) for other in islice(candidates, COMPARISONS)):
            found += 1
            continue
        for shingle in rarest:
            first_with[shingle].append(number)
    return found


def _shingles(words: Words) -> set[int]:
    """All runs of SHINGLE words as their hashes, of 64 bits, which take half the memory; of a shorter text, all of its words as one."""
    if len(words) < SHINGLE:
        return {hash(words)}
    return set(map(hash, zip(*(words[start:] for start in range(SHINGLE)), strict=False)))


def _are_near(one: set[int], other: set[int]) -> bool:
    shared = len(one & other)
    return shared >= NEAR * (len(one) + len(other) - shared)


# ── prompt variety ───────────────────────────────────────────────────────────────────────────────────────────────────

SAMPLE, MOST_WORDS = 10_000, 500_000
"""Rows that are read at most, and words after which no further row is read."""
DISTINCT_WORDS = 20_000
"""Words over which `distinct_1` and `distinct_2` are counted: both fall with the amount of text, so the amount is the same for all datasets
that have as much."""
OPENING = 3
"""Words of an opening."""
LONGEST, LONGEST_ANSWER = 100_000, 200
"""Characters of a prompt that are compared word by word, and of an answer."""

FEW = 100
"""Different prompts below which the verdict is that there are few."""
MANY_REPEATS, ONE_ANSWER, ONE_PATTERN, FEW_PHRASES = 0.1, 0.6, 0.5, 0.05
"""Shares from which the verdict names repeats, an answer and a pattern, and share of different word pairs below which it names phrases. Our
judgement: a tenth of repeats changes what a run weighs, and an answer that is right six times in ten is learned before the task is."""

_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W{_IDEOGRAPHS}]+|[^\w\s.,;:!?…\"'`´‘’“”„«»。、「」『』]")
"""Words and numbers; ideographs and kana one by one, as their languages put no space between words; and the signs of formulas, of which one
makes another question. Not the marks of sentences."""
_DIGIT = re.compile(r"\d")


@dataclass(frozen=True, slots=True)
class PromptVariety:
    """What is known of the prompts of a split. Shares are from 0 to 1."""

    total: int
    """Rows of the split."""
    rows: int
    """Rows that were looked at, without those that are no prompt."""
    repeated: int
    """Rows whose prompt an earlier row has, letter for letter."""
    nearly_repeated: int
    """Further rows whose prompt is that of an earlier one but for case, marks and spaces, or `near_repeats` says so."""
    distinct_1: float
    """Different words over all words, `distinct_ngrams` with n = 1."""
    distinct_2: float
    """Different pairs of words over all words."""
    pattern_share: float
    """Rows of the most frequent wording, numbers left out of account."""
    patterns: int
    """Different wordings, numbers left out of account."""
    opening: str
    """The most frequent first words."""
    opening_share: float
    answers: int
    """Different answers."""
    answer: str
    """The most frequent answer."""
    answer_share: float
    """Rows with that answer over those with one."""

    @property
    def different(self) -> int:
        """Prompts that repeat no other."""
        return self.rows - self.repeated - self.nearly_repeated

    @property
    def repeat_share(self) -> float:
        return 1 - self.different / self.rows if self.rows else 0.0

    def to_dict(self) -> dict[str, Any]:
        """{total, rows, repeated, level, verdict, figures [[name, value, help], …]}: what is shown of it."""
        level, sentence = verdict(self)
        known = {"total": self.total, "rows": self.rows, "repeated": self.repeated, "level": level, "verdict": sentence}
        return known | {"figures": figures(self) if self.rows else []}


def prompt_variety(rows: Rows, config: PromptSettings, source: str) -> PromptVariety:
    """The variety of a split's prompts; `source` names it. Rows that are no prompt are passed over: `check` names them."""
    drawn, texts, answers = random.Random(0), list[tuple[str, Words]](), list[str]()
    prompt_format, named, words = PromptFormat.of(config), shown_source(source), 0
    for index in drawn.sample(range(len(rows)), min(SAMPLE, len(rows))):
        try:
            text = _text(row := rows[index], prompt_format, f"row {index + 1} of {named}")
        except UserError:
            continue
        texts.append((text, words_of(text[:LONGEST])))
        answer = row.get(prompt_format.answer_column)
        answers.append("" if answer is None else quote(answer, LONGEST_ANSWER))
        words += len(texts[-1][1])
        if words > MOST_WORDS:
            break
    return _measured(len(rows), texts, answers)


def _text(row: Row, prompt_format: PromptFormat, where: str) -> str:
    """The prompt's messages but for system messages, which are mostly one for all rows."""
    chat = messages_of(row, prompt_format, where)
    return "\n".join(message["content"] for message in chat if message["role"] != "system")


def words_of(text: str) -> Words:
    return tuple(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def _measured(total: int, texts: Sequence[tuple[str, Words]], answers: Sequence[str]) -> PromptVariety:
    worded = list(dict.fromkeys(words for _, words in texts))
    repeated = len(texts) - len({text for text, _ in texts})
    masked = {word: "#" if _DIGIT.search(word) else word for words in worded for word in words}
    patterns = Counter(tuple(map(masked.__getitem__, words)) for _, words in texts)
    openings = Counter(words[:OPENING] for _, words in texts)
    spread = Counter(answer for answer in answers if answer)
    sample, rows = _first_words(texts), max(1, len(texts))
    (_, alike), (opening, opened), (answer, same) = map(_commonest, (patterns, openings, spread))
    return PromptVariety(
        total=total,
        rows=len(texts),
        repeated=repeated,
        nearly_repeated=len(texts) - len(worded) - repeated + near_repeats(worded),
        distinct_1=distinct_ngrams(sample, 1),
        distinct_2=distinct_ngrams(sample, 2),
        pattern_share=alike / rows,
        patterns=len(patterns),
        opening=" ".join(opening),
        opening_share=opened / rows,
        answers=len(spread),
        answer=answer,
        answer_share=same / max(1, spread.total()),
    )


def _commonest(counts: Counter[Any]) -> tuple[Any, int]:
    """The most frequent value, the first of them where several are, and how often it occurs; ("", 0) of none."""
    return next(iter(counts.most_common(1)), ("", 0))


def _first_words(texts: Sequence[tuple[str, Words]]) -> list[Words]:
    """The prompts up to DISTINCT_WORDS words, the last one cut there."""
    taken: list[Words] = []
    left = DISTINCT_WORDS
    for _, words in texts:
        if left <= 0:
            break
        taken.append(words[:left])
        left -= len(words)
    return taken


def verdict(variety: PromptVariety) -> tuple[str, str]:
    """("good", "note" or "poor", a sentence with what to do). A note is on what may be meant, as one kind of task."""
    of = variety
    if not of.rows:
        return "good", ""
    if of.repeat_share >= MANY_REPEATS:
        return "poor", (f"{of.repeat_share:.0%} of the prompts repeat another, exactly or nearly, so a run sees some questions more often than others. "
                        f"Leave them out, or put others in their place.")  # fmt: skip
    if of.different < FEW:
        return "poor", (f"There {'is one prompt' if of.different == 1 else f'are {of.different} different prompts'}: a model learns so few by "
                        f"heart. Add more, some hundreds at least.")  # fmt: skip
    if of.answers and of.answer_share >= ONE_ANSWER:
        return "poor", (f"{of.answer_share:.0%} of the answers are {quote(of.answer, 24)}: a model that always says so is right that often. "
                        f"Add rows with other answers.")  # fmt: skip
    if of.pattern_share >= ONE_PATTERN:
        return "note", (f"{of.pattern_share:.0%} of the prompts have one wording with other numbers: the model learns this task. "
                        f"Mix in others if it should learn more.")  # fmt: skip
    if of.distinct_2 < FEW_PHRASES:
        return "note", (f"The prompts say the same things again: of their word pairs {of.distinct_2:.0%} are different. "
                        f"Add prompts on other subjects.")  # fmt: skip
    return (
        "good",
        f"The prompts are varied: {of.different:,} different ones, and neither a wording nor an answer prevails.",
    )


def figures(variety: PromptVariety) -> list[tuple[str, str, str]]:
    """(name, value, help) of what there is to see, a line each."""
    of = variety
    return [
        ("Near repeats", _count(of.nearly_repeated, of.rows), "Rows whose prompt is an earlier one's but for a few words, case or marks."),
        ("Distinct-1", f"{of.distinct_1:.0%}", f"Different words over all words, in {DISTINCT_WORDS:,} words of prompts."),
        ("Wordings", f"{of.patterns:,}", "Different prompts, where numbers do not count."),
        ("Distinct-2", f"{of.distinct_2:.0%}", f"Different pairs of words over all words, in {DISTINCT_WORDS:,} words of prompts."),
        ("Top wording", _share(of.pattern_share), "Rows of the most frequent wording, where numbers do not count."),
        ("Answers", f"{of.answers:,}", "Different answers."),
        ("Top opening", _quoted(of.opening_share, of.opening), f"The most frequent first {OPENING} words, and how many rows begin with them."),
        ("Top answer", _quoted(of.answer_share, of.answer), "The most frequent answer, and how many of the answered rows have it."),
    ]  # fmt: skip


def _count(part: int, whole: int) -> str:
    return f"{part:,} ({_share(part / whole)})" if part else "0"


def _share(share: float) -> str:
    """In percent; what is above 0 stays above it."""
    return "under 1%" if 0 < share < 0.01 else f"{share:.0%}"


def _quoted(share: float, text: str) -> str:
    return f"{_share(share)} “{quote(text, 40)}”" if text else "–"
