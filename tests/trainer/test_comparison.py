"""Evaluating a run: the base is the base, both sides get the same numbers, every completion is scored once, and
mistakes are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backend.config.config import load
from backend.runs.checkpoint import arrays_of
from backend.runs.run_folder import RunFolder
from backend.trainer.evaluation import comparison
from backend.trainer.evaluation.comparison import EvaluatedModel, EvaluationChoices, evaluate_model, find_evaluated
from backend.trainer.evaluation.evaluation_rows import DecodingName, EvaluatedRow, Evaluation
from tests.support import small_run

COUNTED = '''
from backend.rewards import register_reward_function
@register_reward_function("low_half")
def low_half(prompts, completions, answer, types=None, completion_ids=None):
    """Share of the low half of the vocabulary; None for the prompt of zero."""
    with open("{calls}", "a") as calls:
        calls.write(f"{{len(completions)}}\\n")
    return [None if "is 0" in p else sum(t < 160 for t in ids) / len(ids) for p, ids in zip(prompts, completion_ids)]
'''


def raw_settings(folder: Path, **changes: Any) -> dict[str, Any]:
    (folder / "counted.py").write_text(COUNTED.format(calls=folder / "calls.txt"))
    for split, rows in (("train", 8), ("test", 6)):
        small_run.write_rows(folder / "data" / f"{split}.jsonl", rows)
    settings = {"data": str(folder / "data"), "reward_functions": ["low_half"], "reward_weights": [2.0], "iters": 2}
    settings |= {"learning_rate": 0.05, "reward_functions_file": str(folder / "counted.py"), "save_every": 1}
    return small_run.settings_for(folder, **settings | changes)


@pytest.fixture(scope="module", params=["lora", pytest.param("dora", marks=pytest.mark.proof), "full"])
def run(request: Any, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp(request.param)
    run = RunFolder(folder / "run")
    raw = raw_settings(folder, train_type=request.param, beta=0.1)  # a reference, which no evaluation loads
    assert small_run.train_here(raw, run).kind == "finished"
    return run


def evaluate(evaluated: EvaluatedModel, **choices: Any) -> tuple[Evaluation, list[EvaluatedRow]]:
    return evaluate_model(evaluated, EvaluationChoices(**{"completions": 3} | choices), "x")


def texts(rows: list[EvaluatedRow], decoding: DecodingName, side: str) -> list[str]:
    return [completion["text"] for row in rows for completion in (row[decoding] or {})[side]]  # pyright: ignore


def test_base_and_tuned_answer_the_test_split(run: RunFolder) -> None:
    calls = run.path.parent / "calls.txt"
    calls.unlink(missing_ok=True)
    evaluation, rows = evaluate(find_evaluated(str(run.path), None))
    assert [row["index"] for row in rows] == list(range(6)) and evaluation.data.rows == 6
    assert evaluation.subject.step == 2 and evaluation.subject.config_sha256
    greedy, drawn = evaluation.decodings
    assert (greedy.name, greedy.completions, drawn.name, drawn.completions) == ("greedy", 1, "sampled", 3)
    assert greedy.better + greedy.worse + greedy.unchanged == 5, "the prompt of zero has no score"
    assert texts(rows, "greedy", "base") != texts(rows, "greedy", "tuned"), "the learning rate is large enough"
    # Both sides, one greedy and three sampled completions of six prompts, all at once each time.
    assert sorted(map(int, calls.read_text().split())) == [6, 6, 18, 18]
    for decoding in evaluation.decodings:
        assert decoding.difference is not None
        for side in ("base", "tuned"):
            scores = [
                [item["rewards"]["low_half"] for item in (row[decoding.name] or {})[side]]  # pyright: ignore
                for row in rows
                if row["prompt"] != "What is 0 plus 0?"
            ]
            by_hand = sum(sum(of) / len(of) for of in scores) / 5
            figures = decoding.sides[side].figures
            assert figures.rewards["low_half"].value == pytest.approx(by_hand)
            assert figures.reward.value == pytest.approx(2 * by_hand), "the weight is 2"
        after, before = (decoding.sides[side].figures.reward.value for side in ("tuned", "base"))
        assert decoding.difference.reward.value == pytest.approx((after or 0) - (before or 0))
    assert not greedy.sides["base"].figures.pass_at and "--pass" in evaluation.notes[0]


def test_the_base_is_the_model_itself(run: RunFolder) -> None:
    """The run's base side writes what the model's folder writes by itself, token for token."""
    evaluated = find_evaluated(str(run.path), None)
    _, of_run = evaluate(evaluated, base_only=True, decodings=("sampled",), limit=4)
    model = find_evaluated(evaluated.config.model, load(run.config))
    evaluation, of_model = evaluate(model, decodings=("sampled",), limit=4)
    assert texts(of_run, "sampled", "base") == texts(of_model, "sampled", "model")
    assert list(evaluation.headline.sides) == ["model"] and evaluation.headline.difference is None
    assert evaluation.subject.run is None and evaluation.subject.step is None


def test_the_tuned_side_is_the_trained_weights(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated = find_evaluated(str(run.path), None)
    policies: list[Any] = []
    load_policy = comparison.load_policy
    monkeypatch.setattr(comparison, "load_policy", lambda *more: policies.append(load_policy(*more)) or policies[-1])
    evaluate(evaluated, decodings=("greedy",), limit=2)
    assert evaluated.checkpoint is not None and len(policies) == 1, "one model is loaded for both sides"
    saved, now = arrays_of(evaluated.checkpoint, "weights"), policies[0].trainable()
    assert saved.keys() == now.keys() and all((saved[name] == now[name]).all().item() for name in saved)


def test_a_request_to_stop_is_heard_between_decoding_steps(run: RunFolder) -> None:
    class Enough(Exception): ...

    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 4:  # the first two are before and after loading
            raise Enough

    with pytest.raises(Enough):
        evaluate_model(find_evaluated(str(run.path), None), EvaluationChoices(), "x", check=check)
