"""Draws by pass rate: the chance of a signal, the posterior, and which rows come."""

import random
import time
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend.data import prompt_variety
from backend.data import prompt_variety as near
from backend.data.pass_rates import PassRates
from backend.data.prompt_variety import PromptVariety, figures, verdict, words_of
from backend.data.prompts import PromptStream
from backend.data.signal import signal_chance
from backend.types import Completion, Group, Problem
from tests.data.test_rows import settings
from tests.support.cases import cases

SIZE = 8


def made(rows: int, uniform_share: float = 0.2) -> PassRates:
    return PassRates([30] * rows, seed=3, group_size=SIZE, uniform_share=uniform_share, solved_from=1.0)


def group(row: int, rewards: list[float | None]) -> Group:
    completions = [Completion([], [], "", "eos", reward=reward) for reward in rewards]
    return Group(Problem(row, "", [], [], ""), completions)


def finish(rates: PassRates, *groups: Group) -> dict[str, float]:
    metrics = rates.observe(groups)
    rates.finish_step()
    return metrics


@pytest.mark.parametrize(("alpha", "beta", "size"), [(1, 1, 8), (2.5, 0.7, 8), (0.1, 40.0, 2), (900.0, 3.0, 64)])
def test_the_chance_of_a_signal_is_the_mean_over_the_posterior(alpha: float, beta: float, size: int) -> None:
    rate = np.random.default_rng(0).beta(alpha, beta, 400_000)
    assert signal_chance(alpha, beta, size) == pytest.approx(np.mean(1 - rate**size - (1 - rate) ** size), abs=2e-3)


@pytest.mark.parametrize(
    ("rewards", "passes"),
    [
        ([1.0, 2.0, 0.0, 0.0], 2.0),  # solved is solved, however much a reward exceeds it
        ([0.0, 0.25, 0.5, 0.5], 2.5),  # without a solution, the share of the range
        ([0.0, 1.0, 0.5, None], 1.5),  # no opinion counts as nothing
        ([0.5, 0.5, 0.5, 0.5], 0.0),  # one reward has no range
        ([None] * 4, None),
    ],
)
def test_a_group_is_counted_once_its_step_is_finished(rewards: list[float | None], passes: float | None) -> None:
    rates = made(3)
    rates.passes_N[1], rates.failures_N[1] = 4, 2
    rates.observe([group(1, rewards)])
    assert rates.passes_N[1] == 4, "a step that is stopped counts nothing"
    rates.finish_step()
    if passes is None:
        assert (rates.passes_N[1], rates.failures_N[1]) == (4, 2)
    else:
        known = sum(reward is not None for reward in rewards)
        assert (rates.passes_N[1], rates.failures_N[1]) == (2 + passes, 1 + known - passes)
    assert not rates.passes_N[[0, 2]].any()


def test_metrics_compare_what_was_expected_with_what_came() -> None:
    rates = made(4)
    assert finish(rates, group(0, [1.0] * SIZE), group(1, [0.0, 1.0] * 4)) == {
        "curriculum/pass_rate": pytest.approx(0.5),
        "curriculum/expected_signal": pytest.approx(signal_chance(1, 1, SIZE)),
        "curriculum/signal": 0.5,
    }
    again = finish(rates, group(0, [1.0] * SIZE))
    assert again["curriculum/pass_rate"] > 0.8 and again["curriculum/expected_signal"] < 0.6


def stepped(rates: PassRates, true: np.ndarray, steps: int, count: int = 8) -> list[list[int]]:
    """The rows of each step, whose completions pass at the rates `true`."""
    chance, drawn = np.random.default_rng(5), list[list[int]]()
    for step in range(steps):
        drawn.append(list(islice(rates.order(count, step * count), count)))
        finish(rates, *(group(row, (chance.random(SIZE) < true[row]).astype(float).tolist()) for row in drawn[-1]))
    return drawn


def test_rows_that_are_always_or_never_solved_come_seldom_and_are_not_forgotten() -> None:
    true = np.repeat([0.0, 1.0, 0.5], [120, 120, 80])
    drawn = stepped(made(320), true, 80)
    late = np.concatenate(drawn[40:])
    assert np.mean(true[late] == 0.5) > 0.6, "uniformly it would be a quarter"
    assert len(set(late[true[late] != 0.5])) > 40
    assert all(len(set(step)) == 8 for step in drawn), "a prompt comes once in a step"
    assert np.bincount(np.concatenate(drawn)).max() <= 12, "few rows again and again teach little else"
    uniformly = np.concatenate(stepped(made(320, uniform_share=1.0), true, 80))
    assert 0.18 < np.mean(true[uniformly] == 0.5) < 0.32


@pytest.mark.parametrize("solved", [0.1, 0.5])
def test_the_expected_signal_is_the_one_that_comes_where_most_rows_are_always_or_never_solved(solved: float) -> None:
    rates, generator = made(3000), np.random.default_rng(2)
    true = np.where(generator.random(3000) < 0.12, 0.5, generator.random(3000) < solved)
    course = list[dict[str, float]]()
    for step in range(60):
        rows = list(islice(rates.order(8, step * 8), 8))
        drawn = (generator.random((8, SIZE)) < true[rows][:, None]).astype(float).tolist()
        course.append(finish(rates, *map(group, rows, drawn)))
    expected, came = (
        np.mean([step[f"curriculum/{name}"] for step in course[10:]]) for name in ("expected_signal", "signal")
    )
    assert expected == pytest.approx(came, abs=0.12)
    assert came > 0.4, "uniformly it would be an eighth"


def test_rows_never_sampled_are_thought_of_as_others_of_their_length() -> None:
    row = np.arange(3000)
    true, is_short = np.where(row % 24 < 3, 0.5, 0.0), row % 24 < 6
    informed = PassRates(np.where(is_short, 80, 90).tolist(), 3, SIZE, uniform_share=0.0, solved_from=1.0)
    shares = [np.mean(is_short[np.unique(stepped(rates, true, 60))]) for rates in (informed, made(3000, 0.0))]
    assert shares[0] > 0.5 and shares[1] < 0.45, "a quarter of the rows are short"


def test_restored_pass_rates_draw_as_the_first_ones() -> None:
    true = np.linspace(0, 1, 60)
    lengths = list(range(60))
    whole, first, again = (PassRates(lengths, 3, SIZE, uniform_share=0.2, solved_from=1.0) for _ in range(3))
    rows = stepped(whole, true, 20)
    assert stepped(first, true, 20) == rows
    graded = [
        group(row, rewards) for row, rewards in enumerate(np.random.default_rng(1).uniform(-1, 0.9, (40, 4)).tolist())
    ]
    for rates in (whole, first):
        finish(rates, *graded[:20])
    again.restore(first.arrays())
    for rates in (whole, again):
        finish(rates, *graded[20:])
    assert all((array == again.arrays()[name]).all() for name, array in whole.arrays().items())
    assert list(islice(again.order(8, 160), 30)) == list(islice(whole.order(8, 160), 30))
    with pytest.raises(KeyError, match="priors"):  # of an earlier version
        again.restore({name: array for name, array in first.arrays().items() if name != "priors"})
    assert (again.passes_N == whole.passes_N).all(), "a refused state changes nothing"
    with pytest.raises(ValueError, match="of 60 rows, not of 61"):
        made(61).restore(first.arrays())


class Prompts(list[Any]):
    characters = property(lambda self: [30] * len(self))


@pytest.mark.parametrize(("rows", "fitting", "count"), [(40, 40, 8), (40, 3, 8), (1, 1, 4), (500, 2, 2)])
def test_a_stream_takes_rows_that_fit(rows: int, fitting: int, count: int) -> None:
    problems: Any = Prompts([Problem(n, "", [], [], "") if n < fitting else None for n in range(rows)])
    stream = PromptStream(problems, 0, pass_rates=made(rows))
    for step in range(1, 5):
        taken = [problem.index for problem in stream.take(count)]
        assert len(taken) == count and set(taken) <= set(range(fitting)) and stream.cursor == step * count
        assert len(set(taken)) == min(count, fitting)
    assert stream.epoch == 4 * count / rows
    alone: Any = Prompts(problems[:1])
    stream.go_on_with(alone, are_same_rows=False)
    assert stream.take(2)[0].index == 0 and stream.first == 4 * count


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
    same = variety(["one", "two"] * 500)
    assert verdict(same)[1].startswith("97% of 60 sampled prompts repeat another"), "of all it would be 99.8%"
    monkeypatch.setattr(prompt_variety, "MOST_WORDS", 300)
    assert 9 <= variety([text() for _ in range(1000)]).rows <= 11
    huge = variety(["word " * 3_000_000])
    assert huge.rows == 1 and huge.different == 1


@pytest.mark.alone
def test_five_thousand_prompts_take_half_a_second() -> None:
    prompts = [text(45) for _ in range(5_000)]
    began = time.process_time()
    of = variety(prompts)
    assert of.rows == 5_000 and time.process_time() - began < 1.25, "0.3 s where the machine is idle"
