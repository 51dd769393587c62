"""Near repeats against every pair compared; each verdict from rows that deserve it; bounds on rows, words and time."""

from __future__ import annotations

import random
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from backend.data import prompt_variety
from backend.data import prompt_variety as near
from backend.data.prompt_variety import PromptVariety, figures, verdict, words_of
from tests.data.test_rows import settings
from tests.support.cases import cases

DRAWN = random.Random(5)
WORDS = ["".join(DRAWN.choices("abcdefghij", k=DRAWN.randint(2, 7))) for _ in range(900)]


def text(count: int = 30) -> str:
    return " ".join(DRAWN.choices(WORDS, k=count))


def variety(prompts: list[Any], answers: list[Any] | None = None) -> PromptVariety:
    rows = [{"prompt": prompt, "answer": n} for n, prompt in enumerate(prompts)]
    for row, answer in zip(rows, answers or [], strict=False):
        row["answer"] = answer
    return prompt_variety.prompt_variety(rows, settings(Path("x")), "x.jsonl")


def changed(prompt: str, count: int) -> str:
    """The prompt with so many words in other places replaced."""
    words = prompt.split()
    for place in DRAWN.sample(range(len(words)), count):
        words[place] = DRAWN.choice(WORDS)
    return " ".join(words)


def test_near_repeats_are_those_of_comparing_every_pair() -> None:
    first = [text(DRAWN.randint(1, 60)) for _ in range(120)]
    prompts = first + [changed(DRAWN.choice(first), DRAWN.randint(0, 1)) if n % 3 else text() for n in range(120)]
    texts = list(dict.fromkeys(words_of(prompt) for prompt in prompts if prompt.split()))
    sets = [near._shingles(words) for words in texts]
    pairs = combinations(range(len(sets)), 2)
    alike = {(i, j) for i, j in pairs if len(sets[i] & sets[j]) >= near.NEAR * len(sets[i] | sets[j])}
    kept: list[int] = []
    for number in range(len(sets)):
        if not any((other, number) in alike for other in kept):
            kept.append(number)
    assert 10 < len(texts) - len(kept) == near.near_repeats(texts)


@cases(
    ("one", "other", "is_same"),
    [
        ("How many are left?", "how  many are LEFT", True),
        ("2 + 2 =", "2 - 2 =", False),
        ("2*(3+4)", "2*3+4", False),
        ("小明有3个苹果。", "小明有3个苹果", True),
        ("ﬁve", "five", True),
    ],
)
def test_case_marks_and_spaces_are_no_difference_and_signs_are(one: str, other: str, is_same: bool) -> None:
    assert (words_of(one) == words_of(other)) == is_same


def test_counts_of_a_dataset_that_was_counted_by_hand() -> None:
    of = variety(
        ["What is 1 plus 2?", "What is 3 plus 4?", "what is 1 plus 2", "What is 1 plus 2?", "Name a city."],
        ["3", 7, "3", None, "Rome"],
    )
    assert (of.total, of.rows, of.repeated, of.nearly_repeated, of.different) == (5, 5, 1, 1, 3)
    assert (of.patterns, of.pattern_share, of.opening, of.opening_share) == (2, 0.8, "what is 1", 0.6)
    assert (of.answers, of.answer, of.answer_share) == (3, "3", 0.5)
    assert (of.distinct_1, of.distinct_2) == (10 / 23, 9 / 23)


@cases(
    ("prompts", "answers", "level", "says"),
    [
        ([text() for _ in range(300)], None, "good", "300 different ones"),
        ([text() for _ in range(180)] + ["again"] * 40, None, "poor", "18% of the prompts repeat another"),
        ([text() for _ in range(20)], None, "poor", "There are 20 different prompts"),
        (["alone"], None, "poor", "There is one prompt"),
        ([text() for _ in range(200)], ["Yes"] * 150 + ["No"] * 50, "poor", "75% of the answers are Yes"),
        ([f"What is {n} plus {n}?" for n in range(200)], None, "note", "100% of the prompts have one wording"),
        ([" ".join(DRAWN.sample(WORDS[:12], 9)) for _ in range(2500)], None, "note", "say the same things again"),
        ([{"no": "chat"}, 5, None], None, "good", ""),
    ],
)
def test_each_verdict(prompts: list[Any], answers: list[Any] | None, level: str, says: str) -> None:
    of = variety(prompts, answers)
    assert verdict(of)[0] == level and says in verdict(of)[1] and len(verdict(of)[1]) <= 200
    assert of.to_dict()["figures"] == (figures(of) if of.rows else [])


def test_a_large_dataset_is_drawn_from_all_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_variety, "SAMPLE", 60)
    of = variety([text() for n in range(1000)], ["early"] * 500 + ["late"] * 500)
    late = of.rows * (of.answer_share if of.answer == "late" else 1 - of.answer_share)
    assert (of.total, of.rows) == (1000, 60) and 20 <= late <= 40
    monkeypatch.setattr(prompt_variety, "MOST_WORDS", 300)
    assert 9 <= variety([text() for _ in range(1000)]).rows <= 11
    huge = variety(["word " * 3_000_000])
    assert huge.rows == 1 and huge.different == 1


@pytest.mark.alone
def test_ten_thousand_prompts_take_about_a_second() -> None:
    prompts = [text(45) for _ in range(10_000)]
    began = time.process_time()
    of = variety(prompts)
    assert of.rows == 10_000 and time.process_time() - began < 2.5, "0.6 s where the machine is idle"
