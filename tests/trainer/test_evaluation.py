"""Evaluations on disk and in a sentence; intervals over prompts, paired differences and pass@k."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from backend.runs.run_folder import RunFolder
from backend.trainer.evaluation.comparison import Column, estimates, pass_at_k
from backend.trainer.evaluation.evaluation_rows import (
    FULL_SCORES,
    Evaluation,
    MeanWithInterval,
    PassRule,
    evaluations_of,
    free_name,
    read_evaluation,
    read_pass_rule,
    read_rows,
    write_evaluation,
)
from backend.utils.errors import UserError
from tests.support.cases import cases
from tests.support.made_up_evaluations import evaluated_row, evaluation
from tests.support.paired_rewards import CASES, covers

ENTRIES = ["r1_int", "accuracy_reward(name=right)", "mine.py::brevity"]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    made, rows = evaluation(), [evaluated_row(0, 0.0, 1.0), evaluated_row(3, 1.0, 1.0)]
    path = write_evaluation(run.evaluations, made, rows)
    assert read_evaluation(path) == made and list(read_rows(path)) == rows
    assert evaluations_of(run) == [path]
    assert sorted(file.name for file in run.evaluations.iterdir()) == ["test-step-32.json", "test-step-32.jsonl"]
    names = [free_name(run.evaluations, name) for name in ("test-step-32", "a/b c")]
    assert names == ["test-step-32-2", "a-b-c"]


def test_an_evaluation_that_cannot_be_finished_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, replace = RunFolder(tmp_path), Path.replace

    def fail_on_json(self: Path, target: Path) -> Path:
        if target.suffix == ".json":
            raise OSError(28, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail_on_json)
    with pytest.raises(UserError, match="the disk is full"):
        write_evaluation(run.evaluations, evaluation(), [evaluated_row(0, 0.0, 1.0)])
    assert evaluations_of(run) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"name": "x", "decodings": []}'])
def test_a_file_that_is_no_evaluation_is_told_in_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=r"x\.json is no evaluation"):
        read_evaluation(tmp_path / "x.json")


@cases(
    ("text", "name", "at_least"),
    [
        ("right", "right", 1.0),
        ("right>=0.5", "right", 0.5),
        ("r1_int >= .5", "r1_int_reward_func", 0.5),
        ("reward>=1.5", "reward", 1.5),
        ("brevity>=3", "brevity", 3.0),
    ],
)
def test_the_user_says_what_passes(text: str, name: str, at_least: float) -> None:
    assert read_pass_rule(text, ENTRIES) == PassRule(reward=name, at_least=at_least, chosen_by="user")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("brevity", "From what score on"),
        ("right>=x", "x is not a number"),
        ("rihgt>=1", "Did you mean right"),
        (">=1", "No reward"),
    ],
)
def test_a_rule_that_cannot_be_read_is_told_in_a_sentence(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_pass_rule(text, ENTRIES)


def test_full_scores_are_what_the_functions_give_for_a_right_answer() -> None:
    from backend.rewards.registry import REWARD_REGISTRY

    text = "<think>2 + 2</think><answer>4</answer>"
    for name, full in FULL_SCORES.items():
        answer, said = ("B", text.replace("4", "B")) if name == "multiple_choice" else ("4", text)
        scores = REWARD_REGISTRY[name](prompts=["?"], completions=[said], answer=[answer], types=[None])
        assert list(scores) == [full], name


def sentence(low: float | None, value: float, high: float | None) -> str:
    made = evaluation()
    first = made.headline
    assert first.difference is not None
    change = first.difference.model_copy(update={"reward": MeanWithInterval(value=value, low=low, high=high)})
    return Evaluation.sentence(made, first.model_copy(update={"difference": change}))


def test_the_sentence_says_how_sure_a_difference_is() -> None:
    start = "The mean reward on 2 rows of the test split went from 0.5 to 1"
    assert sentence(0.1, 0.5, 0.9) == f"{start}: better by 0.5 (95 % interval 0.1 to 0.9)."
    assert sentence(-0.9, -0.5, -0.1) == f"{start}: worse by 0.5 (95 % interval 0.1 to 0.9)."
    assert "which may be chance" in sentence(-0.1, 0.5, 0.9) and "−0.1 to 0.9" in sentence(-0.1, 0.5, 0.9)
    assert sentence(None, 0.5, None) == f"{start}."
    made = evaluation()
    nothing = {"reward": MeanWithInterval(value=None, low=None, high=None)}
    unscored = {
        name: side.model_copy(update={"figures": side.figures.model_copy(update=nothing)})
        for name, side in made.headline.sides.items()
    }
    said = made.sentence(made.headline.model_copy(update={"sides": unscored}))
    assert said == "No completion of 2 rows of the test split has a reward: every function returned None."


def one(values: list[float | None], low: float, high: float) -> MeanWithInterval:
    return estimates([Column.of(values, low, high)])[0]


@pytest.mark.parametrize("completions", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_k_subsets_with_a_pass(completions: int) -> None:
    for passed in range(completions + 1):
        passes = [index < passed for index in range(completions)]
        for k in range(1, completions + 1):
            subsets = [any(chosen) for chosen in combinations(passes, k)]
            assert pass_at_k(completions, passed, k) == pytest.approx(np.mean(subsets), abs=1e-12)


def test_the_mean_is_that_of_the_prompts_and_lies_within_its_interval() -> None:
    values: list[float | None] = [0.0, 1.0, 1.0, 0.0, 1.0] * 20
    mean = one(values, 0, 1)
    assert mean.value == pytest.approx(0.6)
    assert mean.low is not None and mean.high is not None
    # The normal interval, 0.6 ± 1.96 √(0.24 / 100), is about right for a hundred prompts.
    assert mean.low == pytest.approx(0.504, abs=0.02) and mean.high == pytest.approx(0.696, abs=0.02)
    ones = one([1.0] * 30, 0, 1)
    assert ones.high == ones.value == 1.0 and ones.low is not None and 0.85 < ones.low < 1


def test_a_difference_is_paired() -> None:
    """Prompts differ far more than the sides do: only a paired difference can tell."""
    rng = np.random.default_rng(3)
    base = rng.normal(0, 10, 200)
    tuned = base + rng.normal(0.5, 0.2, 200)
    low, high = float(min(base.min(), tuned.min())), float(max(base.max(), tuned.max()))
    before, after = Column(base, low, high), Column(tuned, low, high)
    change, mean_before, mean_after = estimates([Column.difference(after, before), before, after])
    assert change.value == pytest.approx(0.5, abs=0.05) and change.excludes_zero
    assert mean_before.high is not None and mean_after.low is not None and mean_before.high > mean_after.low


@pytest.mark.parametrize("case", ["pass 0.30 to 0.50", "one prompt in ten changes", "mostly zero"])
def test_the_interval_covers_the_true_difference(case: str) -> None:
    """A quick look, at the smallest size: the plain percentile interval covers 66 of 100 of the second case."""
    assert covers(CASES[case], prompts=30, cases=200, resamples=400, seed=5) >= 0.93
