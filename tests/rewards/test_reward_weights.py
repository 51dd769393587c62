"""Reward weights follow their schedule exactly, also after a resume."""

from __future__ import annotations

import json
import random

import pytest

from backend.rewards.weights import WeightSchedule
from tests.support.cases import cases
from tests.support.scoring import make_group


def adaptive(weights=(2.0, 1.0), names=("a", "b"), **about) -> WeightSchedule:
    return WeightSchedule("adaptive", list(weights), names=list(names), **about)


def graded(**scores: list[float | None]):
    group = make_group(*("" for _ in next(iter(scores.values()))))
    for index, completion in enumerate(group.completions):
        completion.scores = {name: values[index] for name, values in scores.items()}
    return [group]


def test_constant_weights_never_change() -> None:
    schedule = WeightSchedule("constant", [2, 0.5])
    schedule.observe(1, {"a": 0.0})
    assert schedule.at(1) == schedule.at(1000) == [2.0, 0.5]


def test_linear_weights_reach_their_final_value_at_the_last_step_and_keep_it() -> None:
    schedule = WeightSchedule("linear", [1.0, 0.0, 0.1], [0.0, 3.0, 0.1], steps=5)
    assert [schedule.at(step) for step in (1, 2, 3, 5)] == [
        [1.0, 0.0, 0.1],
        [0.75, 0.75, pytest.approx(0.1)],
        [0.5, 1.5, pytest.approx(0.1)],
        [0.0, 3.0, 0.1],
    ]
    assert schedule.at(0) == schedule.at(1) and schedule.at(6) == schedule.at(99) == schedule.at(5)
    shortest = WeightSchedule("linear", [1.0], [3.0], steps=2)
    assert [shortest.at(1), shortest.at(2)] == [[1.0], [3.0]]


def test_an_adaptive_weight_rises_where_a_function_struggles_and_falls_where_it_succeeds() -> None:
    schedule = adaptive(every=2, window=2)
    schedule.observe(1, {"a": 0.1, "b": 0.9})
    assert schedule.at(2) == [2.0, 1.0]  # not yet
    schedule.observe(2, {"a": 0.4, "b": 0.9})
    assert schedule.at(3) == [2.0 * 1.2, 1.0 * 0.9]
    schedule.observe(3, {"a": 0.3, "b": 0.8})
    schedule.observe(4, {"a": 0.3, "b": 0.8})
    assert schedule.at(5) == [2.0 * 1.2, 1.0 * 0.9]  # exactly 0.3 and 0.8 are neither


def test_adaptive_weights_stay_within_bounds_and_keep_their_sign() -> None:
    schedule = adaptive([2.0, -1.0, 0.0], "abc", every=1)
    for step in range(1, 100):
        schedule.observe(step, {"a": 0.0, "b": 0.0, "c": 0.0})
    assert schedule.at(100) == [20.0, -10.0, 0.0]
    for step in range(100, 300):
        schedule.observe(step, {"a": 1.0, "b": 1.0, "c": 1.0})
    assert schedule.at(300) == pytest.approx([0.2, -0.1, 0.0])


def test_success_is_a_score_above_the_middle_of_the_range_so_far() -> None:
    schedule = adaptive([1, 1, 1, 1], ["hit", "penalty", "mixed", "mute"], every=1)
    step = graded(hit=[2.0, 0.0, 1.0, None], penalty=[0, -0.1, -0.6, -1], mixed=[-1.0, 1.0, 0.0, 0.5], mute=[None] * 4)
    assert schedule.observe_scores(1, step) == {"hit": pytest.approx(1 / 3), "penalty": 0.5, "mixed": 0.5}
    # the range is that of the whole run: a step of equal scores is compared with earlier ones
    again = graded(hit=[0.0, 0.0], penalty=[0.0, 0.0], mixed=[1.0, 1.0], mute=[0.0, 0.0])
    assert schedule.observe_scores(2, again) == {"hit": 0.0, "penalty": 1.0, "mixed": 1.0}
    # and 0 is in it, returned or not
    assert adaptive([1], ["a"]).observe_scores(1, graded(a=[2.0, 1.25])) == {"a": 1.0}
    assert adaptive([1], ["a"]).observe_scores(1, graded(a=[-2.0, -0.75])) == {"a": 0.5}


def random_run(schedule: WeightSchedule, steps: range, seed: int) -> list[list[float]]:
    weights = []
    for step in steps:
        draw = random.Random(f"{seed} {step}")
        scores = {name: [draw.choice([None, -1.0, 0.0, 0.5, 2.0]) for _ in range(4)] for name in schedule.names}
        schedule.observe_scores(step, graded(**scores))
        weights.append(schedule.at(step + 1))
    return weights


@pytest.mark.parametrize("cut", [1, 7, 10, 23])
def test_a_restored_schedule_continues_exactly(cut: int) -> None:
    uninterrupted = random_run(adaptive(every=3, window=5), range(1, 40), 1)
    assert len({tuple(weights) for weights in uninterrupted}) > 3
    first = adaptive(every=3, window=5)
    before = random_run(first, range(1, cut + 1), 1)
    state = first.state()
    saved = json.loads(json.dumps(state))
    random_run(first, range(cut + 1, 40), 2)  # what happens later does not reach into what was saved
    second = adaptive(every=3, window=5)
    second.restore(saved)
    assert second.at(cut + 1) == before[-1]
    assert before + random_run(second, range(cut + 1, 40), 1) == uninterrupted
    assert state == saved != second.state()


def test_a_restored_schedule_refuses_steps_it_has_observed() -> None:
    first, second = adaptive(), adaptive()
    first.observe(7, {})
    second.restore(first.state())
    with pytest.raises(ValueError, match="the last one was 7"):
        second.observe(7, {})


def test_a_state_of_another_schedule_is_refused() -> None:
    saved = adaptive().state()
    for other in (
        adaptive(names=("a", "c")),
        adaptive(names=("b", "a")),
        WeightSchedule("constant", [1, 1], names=["a", "b"]),
    ):
        with pytest.raises(ValueError, match="another schedule or of other reward functions"):
            other.restore(saved)


@cases(
    ("arguments", "words"),
    [
        ({"kind": "constant", "weights": [float("nan")]}, "must be a finite number"),
        ({"kind": "linear", "weights": [1], "final": [float("inf")], "steps": 5}, "must be a finite number"),
        ({"kind": "linear", "weights": [1], "steps": 5}, "need final ones, one for each function"),
        ({"kind": "linear", "weights": [1], "final": [1, 2], "steps": 5}, "need final ones, one for each function"),
        ({"kind": "linear", "weights": [1], "final": [2], "steps": 1}, "at least 2 steps"),
        ({"kind": "adaptive", "weights": [1]}, "need the name of each function"),
        ({"kind": "adaptive", "weights": [1, 1], "names": ["a", "a"]}, "need the name of each function"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        WeightSchedule(**arguments)
