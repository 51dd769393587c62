"""Stages with settings and training rows of their own: what a stage changes, and that breaks, resumes and clones change
nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import all_checkpoints, best_of, find_checkpoint
from tests.support import small_run
from tests.support.small_run import arrays, assert_same_run, events, same, train_with_stops

OTHERS: dict[str, Any] = {"learning_rate": 3e-3, "temperature": 1.3, "top_k": 5, "beta": 0.05, "epsilon": 0.3}
OTHERS |= {"group_size": 3, "batch_size": 2, "max_completion_length": 3}
"""What the second stage has of its own, beside its rows."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    rows = [{"question": f"Name {n} birds.", "answer": str(n)} for n in range(5)]
    (folder / "birds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def raw(inputs: Path) -> dict[str, Any]:
    about = {"learning_rate": 1e-3, "save_every": 1, "keep_checkpoints": 20, "num_iterations": 2, "iters": 5} | {
        "max_completion_length": 4
    }
    return small_run.settings_for(inputs, **small_run.low_half(inputs), **about)


@pytest.fixture(scope="module")
def birds(inputs: Path) -> dict[str, Any]:
    return {"data": str(inputs / "birds.jsonl"), "prompt_feature": "question"}


@pytest.fixture(scope="module")
def staged(raw: dict[str, Any], birds: dict[str, Any]) -> dict[str, Any]:
    return raw | {"stages": [{"iters": 2}, {"iters": 3, **OTHERS, **birds}, {"iters": 2, "learning_rate": 5e-4}]}


@pytest.fixture(scope="module")
def whole(staged: dict[str, Any], inputs: Path) -> RunFolder:
    """The run with three stages, without a break."""
    run = RunFolder(inputs / "whole")
    assert small_run.train_here(staged, run).step == 7
    return run


def same_at(first: RunFolder, second: RunFolder, step: int) -> bool:
    mine, theirs = (find_checkpoint(run, str(step)).path for run in (first, second))
    files = ("adapters.safetensors", "optimizer.safetensors")
    return all(same(arrays(mine / name), arrays(theirs / name)) for name in files)


def rows_of(run: RunFolder, after: int = 0) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run.completions.read_text().splitlines()]
    return [line for line in lines if line["step"] > after]


def test_a_stage_equals_a_run(raw: dict[str, Any], birds: dict[str, Any], whole: RunFolder, run: RunFolder) -> None:
    """To the last bit, but for the one counter that says where the stage's rows began."""
    small_run.train_here(raw | {"iters": 2}, run)
    state = find_checkpoint(run, "2").path / "state.json"
    saved = json.loads(state.read_text())
    state.write_text(json.dumps(saved | {"stream_first": saved["cursor"]}))
    assert small_run.train_here(raw | OTHERS | birds, run).step == 5
    assert same_at(run, whole, 5) and same_at(run, whole, 7 if len(all_checkpoints(run)) > 5 else 4) is not None
    assert rows_of(run, 2) == [row for row in rows_of(whole, 2) if row["step"] <= 5]
    assert {row["prompt"].split()[0] for row in rows_of(whole, 2) if row["step"] <= 5} == {"Name"}
    assert [len(row["completions"]) for row in rows_of(whole)] == [2] * 2 + [3] * 6 + [2] * 2


@pytest.mark.parametrize("stops", [(3, 5), *(pytest.param(stops, marks=pytest.mark.proof) for stops in ((2,), (4, 6)))])
def test_breaks_alter_nothing(staged: dict[str, Any], whole: RunFolder, run: RunFolder, stops: tuple[int, ...]) -> None:
    train_with_stops(staged, run, *stops)
    assert_same_run(run, whole)
    assert [event["step"] for event in events(run, "change")] == [3, 6]


def test_the_event_log_has_stage_changes(whole: RunFolder, raw: dict[str, Any], birds: dict[str, Any]) -> None:
    second, third = events(whole, "change")
    assert (second["step"], third["step"]) == (3, 6)
    assert second["settings"]["learning_rate"] == [1e-3, 3e-3] and third["settings"]["learning_rate"] == [3e-3, 5e-4]
    data = [raw["data"], birds["data"]]
    assert second["settings"]["data"] == data and third["settings"]["data"] == data[::-1]
    assert set(second["settings"]) == {*OTHERS, *birds}
    rates = [event["metrics"]["learning_rate"] for event in events(whole, "step")]
    assert rates == pytest.approx([1e-3] * 2 + [3e-3] * 3 + [5e-4] * 2)


def test_scores_of_a_stage_with_other_rewards_are_a_series_of_their_own(raw: dict[str, Any], run: RunFolder) -> None:
    """The first stage's rewards lie far above the second's; its best checkpoint is not the run's."""
    own = ({"reward_weights": [100.0]}, {"learning_rate": 1e-4}, {"reward_weights": [-1.0]})
    stages = [{"iters": 2} | settings for settings in own]
    small_run.train_here(raw | {"stages": stages, "load_best_at_end": True, "num_iterations": 1}, run)
    series = {saved.step: saved.state.score_series for saved in all_checkpoints(run)}
    assert series == {1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 6: 2}
    best = best_of(all_checkpoints(run))
    assert best is not None and best.step in (5, 6)
