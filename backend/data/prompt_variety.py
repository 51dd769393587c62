"""Variety of a dataset's prompts, on a random sample of SAMPLE rows or MOST_WORDS words."""

import math
import random
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any
from zlib import crc32

from backend.config.setting import PromptSettings
from backend.data.files import Rows
from backend.data.images import with_paths
from backend.data.problems import PromptFormat, messages_of
from backend.data.rows import row_name
from backend.training.variety import distinct_ngrams
from backend.types import content_text, image_paths
from backend.utils.errors import UserError
from backend.utils.text import quote

SHINGLE = 3  # words per shingle
NEAR = 0.8  # Jaccard similarity of near repeats: changing one word in twenty gives 0.71, in forty 0.85
SHARED_ROWS = 20  # with more texts, shingles common to over half of them are ignored
COMPARISONS = 50  # maximum comparisons per text; near repeats may be missed beyond it

SAMPLE, MOST_WORDS = 10_000, 500_000  # maximum rows and words to read
DISTINCT_WORDS = 20_000  # words for `distinct_1` and `distinct_2`, which depend on text length
OPENING = 3  # words of an opening
LONGEST, LONGEST_ANSWER = 100_000, 200  # characters of a prompt and of an answer to compare
FEW = 100  # fewer different prompts give the verdict "few"
MANY_REPEATS, ONE_ANSWER, ONE_PATTERN, FEW_PHRASES = 0.1, 0.6, 0.5, 0.05  # of the verdict, chosen by judgement

_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W{_IDEOGRAPHS}]+|[^\w\s.,;:!?…\"'`´‘’“”„«»。、「」『』]")
"""Words and numbers, single ideographs and kana, and formula signs."""
_DIGIT = re.compile(r"\d")

Words = tuple[str, ...]


def near_repeats(texts: Sequence[Words]) -> int:
    """Count the texts that nearly repeat an earlier one. Prefix filtering: two sets of Jaccard similarity NEAR share
    one of the rarest shingles of either. Very common shingles are ignored."""
    sets = [_shingles(words) for words in texts]
    texts_with = Counter(chain.from_iterable(sets))
    most = max(SHARED_ROWS, len(texts) // 2)
    common = {shingle for shingle, count in texts_with.items() if count > most}
    shared = {shingle for shingle, count in texts_with.items() if 1 < count <= most}
    first_with: defaultdict[int, list[int]] = defaultdict(list)  # rare shingle → texts that have it, no near repeats
    found = 0
    for number, shingles in enumerate(sets):
        own = sets[number] = shingles - common if common else shingles
        own_shared = own & shared
        tried = len(own) - math.ceil(NEAR * len(own)) + 1 - (len(own) - len(own_shared))
        if tried <= 0:
            continue
        rarest = sorted(own_shared, key=lambda shingle: (texts_with[shingle], shingle))[:tried]
        candidates = dict.fromkeys(other for shingle in rarest for other in first_with[shingle][:COMPARISONS])
        others = (sets[other] for other in islice(candidates, COMPARISONS))
        if any(len(own & other) >= NEAR * len(own | other) for other in others):
            found += 1
            continue
        for shingle in rarest:
            first_with[shingle].append(number)
    return found


def _shingles(words: Words) -> set[int]:
    """Runs of SHINGLE words as 64-bit hashes; a shorter text is one shingle."""
    return set(map(hash, zip(*(words[start:] for start in range(SHINGLE)), strict=False))) or {hash(words)}


@dataclass(frozen=True, slots=True)
class PromptVariety:
    """Shares are from 0 to 1."""

    total: int  # rows of the split
    rows: int  # sampled rows with a prompt
    repeated: int  # exact repeats of an earlier prompt
    nearly_repeated: int  # further repeats up to case, punctuation and spaces, or by `near_repeats`
    distinct_1: float  # different words over all words
    distinct_2: float  # different word pairs over all pairs
    patterns: int  # different wordings, ignoring numbers
    pattern_share: float
    opening: str
    opening_share: float
    answers: int
    answer: str
    answer_share: float  # of the rows with an answer

    @property
    def different(self) -> int:
        """Prompts that repeat no other."""
        return self.rows - self.repeated - self.nearly_repeated

    def to_dict(self) -> dict[str, Any]:
        """{total, rows, repeated, answers, level, verdict, figures [[name, value, help], …]}."""
        level, sentence = verdict(self)
        known = {"total": self.total, "rows": self.rows, "repeated": self.repeated, "answers": self.answers}
        return known | {"level": level, "verdict": sentence, "figures": figures(self) if self.rows else []}


def prompt_variety(rows: Rows, config: PromptSettings, source: str) -> PromptVariety:
    """Variety of a split's prompts; `source` names it. Skips invalid rows."""
    texts, answers, read = list[tuple[str, Words]](), Counter[str](), 0
    prompt_format = PromptFormat.of(config)
    for index in random.Random(0).sample(range(len(rows)), min(SAMPLE, len(rows))):
        try:
            where = row_name(index, source)
            chat = messages_of(row := with_paths(rows[index], source, where), prompt_format, where)
        except UserError:
            continue
        text = "\n".join(content_text(message["content"]) for message in chat if message["role"] != "system")
        text += "".join(f"\n{crc32(path.encode())}" for path in image_paths(chat))
        if not text:  # an environment writes it
            continue
        texts.append((text, words_of(text[:LONGEST])))
        if (answer := row.get(prompt_format.answer_column)) is not None and (shown := quote(answer, LONGEST_ANSWER)):
            answers[shown] += 1
        read += len(texts[-1][1])
        if read > MOST_WORDS:
            break
    worded = list(dict.fromkeys(words for _, words in texts))
    repeated = len(texts) - len({text for text, _ in texts})
    masked = {word: "#" if _DIGIT.search(word) else word for words in worded for word in words}
    patterns = Counter(tuple(map(masked.__getitem__, words)) for _, words in texts)
    openings = Counter(" ".join(words[:OPENING]) for _, words in texts)
    opening, opened = next(iter(openings.most_common(1)), ("", 0))
    answer, same = next(iter(answers.most_common(1)), ("", 0))
    sample: list[Words] = []  # the first DISTINCT_WORDS words
    left = DISTINCT_WORDS
    for _, words in texts:
        sample.append(words[:left])
        left = max(0, left - len(words))
    return PromptVariety(
        total=len(rows),
        rows=len(texts),
        repeated=repeated,
        nearly_repeated=len(texts) - len(worded) - repeated + near_repeats(worded),
        distinct_1=distinct_ngrams(sample, 1),
        distinct_2=distinct_ngrams(sample, 2),
        patterns=len(patterns),
        pattern_share=max(patterns.values(), default=0) / max(1, len(texts)),
        opening=opening,
        opening_share=opened / max(1, len(texts)),
        answers=len(answers),
        answer=answer,
        answer_share=same / max(1, answers.total()),
    )


def words_of(text: str) -> Words:
    return tuple(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def verdict(of: PromptVariety) -> tuple[str, str]:
    """("good", "note" or "poor", a message with advice). A note may be intended."""
    if not of.rows:
        return "good", ""
    repeats = 1 - of.different / of.rows
    there = "There is one prompt" if of.different == 1 else f"There are {of.different} different prompts"
    if repeats >= MANY_REPEATS:
        sees = "exactly or nearly, so a run sees some questions more often than others"
        advice = "Leave them out, or put others in their place."
        of_all = "of the prompts" if of.rows == of.total else f"of {of.rows:,} sampled prompts"
        return "poor", f"{repeats:.0%} {of_all} repeat another, {sees}. {advice}"
    if of.different < FEW:
        return "poor", f"{there}: a model learns so few by heart. Add more, some hundreds at least."
    if of.answers and of.answer_share >= ONE_ANSWER:
        right = "a model that always says so is right that often. Add rows with other answers."
        return "poor", f"{of.answer_share:.0%} of the answers are {quote(of.answer, 24)}: {right}"
    if of.pattern_share >= ONE_PATTERN:
        task = "the model learns this task. Mix in others if it should learn more."
        return "note", f"{of.pattern_share:.0%} of the prompts have one wording with other numbers: {task}"
    if of.distinct_2 < FEW_PHRASES:
        pairs = f"of their word pairs {of.distinct_2:.0%} are different. Add prompts on other subjects."
        return "note", f"The prompts say the same things again: {pairs}"
    varied = f"{of.different:,} different ones, and neither a wording nor an answer prevails."
    return "good", f"The prompts are varied: {varied}"


def figures(of: PromptVariety) -> list[tuple[str, str, str]]:
    """(name, value, help) of each figure."""

    def share(part: float, text: str | None = None) -> str:
        """Percentage, with the text that it is of; never rounds a positive share to 0."""
        percent = "under 1%" if 0 < part < 0.01 else f"{part:.0%}"
        return percent if text is None else f"{percent} “{quote(text, 40)}”" if text else "–"

    words = f"in {DISTINCT_WORDS:,} words of prompts"
    near = f"{of.nearly_repeated:,} ({share(of.nearly_repeated / of.rows)})" if of.nearly_repeated else "0"
    opening = f"The most frequent first {OPENING} words, and how many rows begin with them."
    answer = "The most frequent answer, and how many of the answered rows have it."
    return [
        ("Near repeats", near, "Rows whose prompt is an earlier one's but for a few words, case or marks."),
        ("Distinct-1", f"{of.distinct_1:.0%}", f"Different words over all words, {words}."),
        ("Wordings", f"{of.patterns:,}", "Different prompts, where numbers do not count."),
        ("Distinct-2", f"{of.distinct_2:.0%}", f"Different pairs of words over all words, {words}."),
        ("Top wording", share(of.pattern_share), "Rows of the most frequent wording, where numbers do not count."),
        ("Answers", f"{of.answers:,}", "Different answers."),
        ("Top opening", share(of.opening_share, of.opening), opening),
        ("Top answer", share(of.answer_share, of.answer), answer),
    ]
