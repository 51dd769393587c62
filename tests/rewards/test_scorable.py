"""Which functions score an answer to a prompt without an expected answer."""

from __future__ import annotations

from backend.rewards.catalogue import scorable

NAMES = ["r1_accuracy", "r1_int", "accuracy_reward(name=right)", "mine.py::brevity", "jaccard"]


def test_functions_that_compare_are_left_out_without_an_answer():
    chosen = scorable(NAMES, [1.0, 2.0, 3.0, 4.0, 5.0], has_answer=False)
    assert chosen.names == ["r1_int", "mine.py::brevity"] and chosen.weights == [2.0, 4.0]
    assert chosen.left_out == ["r1_accuracy_reward_func", "right", "jaccard"]


def test_with_an_answer_all_of_them_score():
    assert scorable(NAMES, [], has_answer=True) == (NAMES, [1.0] * 5, [])
