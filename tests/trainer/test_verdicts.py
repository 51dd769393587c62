"""Verdicts: every rule recognises its case, states it in one sentence, and reports nothing for healthy scores."""

from __future__ import annotations

from backend.rewards.findings import Sample, Scores, verdicts

TAGGED = "<think>so</think><answer>4</answer>"


def sample(*functions: Scores, sizes=(4, 4), texts=None, **about) -> Sample:
    count = sum(sizes)
    known = [function for function in functions if function.given]
    rewards = [
        sum(function.weight * function.given[i] for function in known if function.given[i] is not None)
        if known
        else None
        for i in range(count)
    ]
    return Sample(sizes, texts or [f"{TAGGED}{i}" for i in range(count)], rewards, functions, **about)


def function_scores(given, name="f", weight=1.0, **about) -> Scores:
    return Scores(name, about.pop("label", name.capitalize()), weight, given, **about)


def sentences_of(scored: Sample) -> list[str]:
    return [finding.sentence for finding in verdicts(scored)]


MIXED = [0.0, 1.0, 0.5, 0.0, 1.0, 1.0, 0.0, 0.5]


def test_a_good_sample_is_reported_as_good() -> None:
    assert sentences_of(sample(function_scores(MIXED))) == [
        "There is something to learn from: within 2 of 2 prompts the completions score differently."
    ]


def test_groups_without_signal_are_counted() -> None:
    assert sentences_of(sample(function_scores([1.0] * 4 + [0.0] * 4)))[0] == (
        "Within each of the 2 prompts all completions score the same: no signal."
    )
    assert sentences_of(sample(function_scores([1.0] * 4 + MIXED[:4])))[0] == (
        "Within 1 of 2 prompts all completions score the same, and teach nothing."
    )
    assert "all completions score the same" not in " ".join(
        sentences_of(sample(function_scores([1.0] * 2 + MIXED[:6]), sizes=(2, 3, 3)))
    )


def test_no_signal_comes_with_its_likely_reason() -> None:
    """A weighted sum that is constant although its parts vary is easily overlooked (trl#3857)."""
    advice = {
        finding.code: finding.advice
        for finding in verdicts(sample(function_scores(MIXED, "a"), function_scores(MIXED, "b", -1.0)))
    }
    assert advice["no_signal"] == "A and B differ, but weighted they cancel out: change a weight."
    alike = verdicts(sample(function_scores([0.5] * 4), sizes=(4,), texts=["same"] * 4))
    assert alike[0].advice == "They are the same text throughout: raise the temperature."
    full = verdicts(sample(function_scores([1.0] * 4), sizes=(4,)))
    assert full[0].advice == "Every function gives all it can: take harder prompts."


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
