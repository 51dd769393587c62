"""Draws by pass rate: the chance of a signal, the posterior, and which rows come."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest

from backend.data.pass_rates import PassRates
from backend.data.prompts import PromptStream
from backend.data.signal import signal_chance
from backend.types import Completion, Group, Problem

SIZE = 8


def made(rows: int, uniform_share: float = 0.2) -> PassRates:
    return PassRates(rows, seed=3, group_size=SIZE, uniform_share=uniform_share, solved_from=1.0)


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


def test_restored_pass_rates_draw_as_the_first_ones() -> None:
    true = np.linspace(0, 1, 60)
    whole, first = made(60), made(60)
    rows = stepped(whole, true, 20)
    assert stepped(first, true, 20) == rows
    graded = [
        group(row, rewards) for row, rewards in enumerate(np.random.default_rng(1).uniform(-1, 0.9, (40, 4)).tolist())
    ]
    for rates in (whole, first):
        finish(rates, *graded[:20])
    again = made(60)
    again.restore(first.arrays())
    for rates in (whole, again):
        finish(rates, *graded[20:])
    assert all((array == again.arrays()[name]).all() for name, array in whole.arrays().items())
    assert list(islice(again.order(8, 160), 30)) == list(islice(whole.order(8, 160), 30))
    with pytest.raises(ValueError, match="not enough values"):  # of an earlier version
        again.restore(first.arrays() | {"course": np.zeros(3, np.float32)})
    assert (again.passes_N == whole.passes_N).all(), "a refused state changes nothing"
    with pytest.raises(ValueError, match="of 60 rows, not of 61"):
        made(61).restore(first.arrays())


@pytest.mark.parametrize(("rows", "fitting", "count"), [(40, 40, 8), (40, 3, 8), (1, 1, 4), (500, 2, 2)])
def test_a_stream_takes_rows_that_fit(rows: int, fitting: int, count: int) -> None:
    problems: Any = [Problem(n, "", [], [], "") if n < fitting else None for n in range(rows)]
    stream = PromptStream(problems, 0, pass_rates=made(rows))
    for step in range(1, 5):
        taken = [problem.index for problem in stream.take(count)]
        assert len(taken) == count and set(taken) <= set(range(fitting)) and stream.cursor == step * count
        assert len(set(taken)) == min(count, fitting)
    assert stream.epoch == 4 * count / rows
    stream.go_on_with(problems[:1], are_same_rows=False)
    assert stream.take(2)[0].index == 0 and stream.first == 4 * count
