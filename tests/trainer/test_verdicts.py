"""Verdicts: every rule recognises its case, states it in one sentence, and reports nothing for healthy scores."""

from __future__ import annotations

from typing import Any

import pytest

from backend.rewards.findings import Sample, Scores, verdicts

TAGGED = "<think>so</think><answer>4</answer>"


def sample(*functions: Scores, sizes=(4, 4), texts=None, **about) -> Sample:
    count = sum(sizes)
    rows = [[(each.weight, each.given[i]) for each in functions if each.given] for i in range(count)]
    rewards = [sum(weight * x for weight, x in row if x is not None) if row else None for row in rows]
    return Sample(sizes, texts or [f"{TAGGED}{i}" for i in range(count)], rewards, functions, **about)


def function_scores(given, name="f", weight=1.0, **about) -> Scores:
    return Scores(name, about.pop("label", name.capitalize()), weight, given, **about)


def sentences_of(scored: Sample) -> list[str]:
    return [finding.sentence for finding in verdicts(scored)]


MIXED = [0.0, 1.0, 0.5, 0.0, 1.0, 1.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("functions", "about", "advice"),
    [
        # A weighted sum that is constant although its parts vary is easily overlooked (trl#3857).
        ([(MIXED, "a"), (MIXED, "b", -1.0)], {}, "A and B differ, but weighted they cancel out: change a weight."),
        ([([0.5] * 4,)], {"sizes": (4,), "texts": ["same"] * 4}, "They are the same text throughout: raise the temper"),
        ([([1.0] * 4,)], {"sizes": (4,)}, "Every function gives all it can: take harder prompts."),
    ],
)
def test_no_signal_comes_with_its_likely_reason(functions: Any, about: dict[str, Any], advice: str) -> None:
    found = verdicts(sample(*(function_scores(*each) for each in functions), **about))
    assert next(finding.advice for finding in found if finding.code == "no_signal").startswith(advice)


@pytest.mark.parametrize(
    ("given", "group_size", "share", "has_advice"),
    [
        ([1.0, 0.0, 1.0, 0.0] * 2, 8, 93, False),
        ([1.0] * 4 + [0.0] * 4, 8, 61, True),  # one prompt always solved, one never
        ([1.0] * 4 + [0.0] * 4, 2, 24, True),
    ],
)
def test_the_signal_expected_over_the_dataset(
    given: list[float], group_size: int, share: int, has_advice: bool
) -> None:
    found = {each.code: each for each in verdicts(sample(function_scores(given), group_size=group_size))}
    expected = f"Over the whole dataset about {share}% of the groups of {group_size} would have a signal."
    assert found["expected_signal"].sentence == expected and bool(found["expected_signal"].advice) == has_advice
    assert "expected_signal" not in {each.code for each in verdicts(sample(function_scores(given)))}


def test_a_function_that_never_fires_names_the_missing_text() -> None:
    silent = function_scores([0.0] * 8, "r1_accuracy_reward_func", label="Accuracy", looks_for=("<answer>",))
    assert "Accuracy never fires: the model writes no <answer>." in sentences_of(
        sample(silent, function_scores(MIXED), texts=["plain"] * 8)
    )
    assert "Accuracy never fires: 8 of 8 completions have <answer>, and none is what it wants." in sentences_of(
        sample(silent, function_scores(MIXED))
    )
    empty = verdicts(sample(silent, function_scores(MIXED), answers=["", ""]))
    assert empty[0].advice == "The dataset's answers are empty: choose the Answer column on Train."
