"""The files of an evaluation, what passes, and the sentence about the result."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.runs.run_folder import RunFolder
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
from tests.support.made_up_evaluations import evaluated_row, evaluation

ENTRIES = ["r1_int", "accuracy_reward(name=right)", "mine.py::brevity"]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    made, rows = evaluation(), [evaluated_row(0, 0.0, 1.0), evaluated_row(3, 1.0, 1.0)]
    path = write_evaluation(run.evaluations, made, rows)
    assert read_evaluation(path) == made and list(read_rows(path)) == rows
    assert evaluations_of(run) == [path]
    assert sorted(file.name for file in run.evaluations.iterdir()) == ["test-step-32.json", "test-step-32.jsonl"]
    assert (
        free_name(run.evaluations, "test-step-32") == "test-step-32-2"
        and free_name(run.evaluations, "a/b c") == "a-b-c"
    )


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


@pytest.mark.parametrize(
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
