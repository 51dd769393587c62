"""Supervised fine-tuning: losses in place of rewards, resumed to the last bit, checkpoints by the lowest loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backend.runs.checkpoint import newest
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import all_checkpoints, best_of
from backend.sampling.chat import find_source, load_sides
from tests.support import small_run
from tests.support.small_run import settings_for


def labelled(folder: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run on eight labelled rows, evaluated on four chats."""
    data = folder / "labelled"
    data.mkdir(exist_ok=True)
    rows = [{"prompt": f"What is {n} plus {n}?", "completion": str(2 * n), "answer": str(2 * n)} for n in range(8)]
    chats = [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]}
        for row in rows[:4]
    ]
    for name, split in (("train", rows), ("valid", chats)):
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in split))
    own = {"train_mode": "sft", "data": str(data), "reward_functions": [], "reward_weights": [], "steps_per_eval": 2}
    short = {"iters": 6, "batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 3e-3, "save_every": 2}
    return settings_for(folder) | own | short | changes


def test_a_resumed_run_equals_the_whole_one(inputs: Path, tmp_path: Path) -> None:
    whole, resumed = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "resumed")
    raw = labelled(inputs, dropout=0.1)
    assert small_run.train_here(raw, whole).kind == "finished"
    small_run.train_with_stops(raw, resumed, 1, 4)
    small_run.assert_same_run(resumed, whole)
    steps, evaluations = small_run.events(whole, "step"), small_run.events(whole, "eval")
    assert whole.completions.read_text() == ""
    assert not any(name.startswith("reward") for event in (*steps, *evaluations) for name in event["metrics"])
    losses = [event["metrics"]["loss"] for event in evaluations]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    assert steps[-1]["metrics"]["epoch"] == 3 and steps[0]["metrics"]["entropy"] > 0


def test_the_best_checkpoint_has_the_lowest_loss(inputs: Path, run: RunFolder) -> None:
    """At a rate at which the loss rises after the first steps, the run ends early."""
    raw = labelled(inputs, learning_rate=1.0, early_stopping_patience=2, load_best_at_end=True, iters=30)
    ending = small_run.train_here(raw, run)
    assert ending.reason == "early_stopping" and "Held-out loss has not fallen" in ending.sentence
    losses = {event["step"]: event["metrics"]["loss"] for event in small_run.events(run, "eval")}
    last, best = newest(run), best_of(all_checkpoints(run))
    assert last is not None and last.state.best_score == min(losses.values())
    assert best is None or best.state.score_metric == "eval/loss"


def test_reward_functions_score_the_evaluation(inputs: Path, run: RunFolder) -> None:
    raw = labelled(inputs, reward_functions=["r1_int"], iters=2, num_generations_eval=2)
    assert small_run.train_here(raw, run).kind == "finished"
    for event in small_run.events(run, "eval"):
        assert event["metrics"]["loss"] > 0 and event["metrics"]["reward"] is not None
    assert not any(name.startswith("reward") for event in small_run.events(run, "step") for name in event["metrics"])
    assert run.completions.read_text() == ""
    sides = load_sides(find_source("run", runs_dir=run.path.parent))
    assert sorted(sides.sides) == ["base", "tuned"]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")
