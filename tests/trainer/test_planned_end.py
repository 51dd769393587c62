"""Runs that end before their last step as planned: a metric has passed a line, or the reward rises no more."""

from __future__ import annotations

import math
from typing import Any

import pytest

from backend.config.config import problems
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import all_checkpoints, best_of
from backend.trainer.steering import MetricWatch
from tests.support import small_run


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("inputs")
    about = {"iters": 12, "validation_split": 0.25, "val_batches": 1, "max_completion_length": 3}
    return small_run.settings_for(folder, **small_run.low_half(folder), **about)


def step(**metrics: Any) -> dict[str, Any]:
    return {"kind": "step", "metrics": metrics}


@pytest.mark.parametrize(
    ("conditions", "says"),
    [
        (["kl > 0.8"], ""),
        (["reward>=2.5", "rewards/low_half/mean < 1e-3", "eval/reward > 1"], ""),
        (["rewrd > 1"], "There is no metric rewrd. Did you mean reward?"),
        (["eval/rewrd > 1"], "There is no metric eval/rewrd. Did you mean eval/reward?"),
        (["my_own > 1"], ""),
        (["kl = 2"], "“kl = 2” is not a condition"),
        (["kl > nan"], "“kl > nan” is not a condition"),
    ],
)
def test_conditions_are_checked_by_the_nearest_metric(raw: dict[str, Any], conditions: list[str], says: str) -> None:
    """The reward file may log metrics of its own, so an unknown name that is like no other passes."""
    sentences = [fault.sentence for fault in problems(raw | {"stop_when": conditions}) if fault.setting == "stop_when"]
    assert (says in sentences[0]) if says else not sentences


def test_the_mean_of_five_steps_is_compared_and_a_gap_is_no_number() -> None:
    watch = MetricWatch()
    for _ in range(4):
        watch.take(step(kl=1.0))
    assert math.isnan(watch.value("kl")) and watch.met(["kl > 0.5"]) is None
    watch.take(step(kl=0.0))
    assert watch.value("kl") == 0.8
    end = watch.met(["kl > 0.9", "kl >= 0.8"])
    assert end is not None and end.sentence == "kl >= 0.8 is met: 0.8 over the last 5 steps"
    watch.take(step(kl=None))
    assert watch.met(["kl >= 0", "kl <= 0"]) is None


def test_a_run_ends_where_a_metric_has_passed_its_line_and_says_so(raw: dict[str, Any], run: RunFolder) -> None:
    ending = small_run.train_here(raw | {"stop_when": ["loss > 9", "rewards/low_half/mean >= 0.01"]}, run)
    assert (ending.kind, ending.exit_code, ending.step) == ("finished", 0, 5)
    *_, last = read_events(run.events)
    assert last["reason"] == "stop_when" and last["sentence"] == ending.sentence
    assert ending.sentence.startswith("Finished after 5 of 12 steps. rewards/low_half/mean >= 0.01 is met: 0.")
    assert [saved.step for saved in all_checkpoints(run)] == [5]


@pytest.mark.parametrize("every", [2, 0])
def test_early_stopping_keeps_the_best_checkpoint(raw: dict[str, Any], run: RunFolder, every: int) -> None:
    """A gain of 9 is out of reach, so two scores after the first end it: evaluations at 0, 2 and 4, or else the saves
    of 2, 4 and 6."""
    patient = {"early_stopping_patience": 2, "early_stopping_min_delta": 9.0, "save_every": 2, "keep_checkpoints": 1}
    ending = small_run.train_here(raw | patient | {"steps_per_eval": every}, run)
    assert (ending.kind, ending.exit_code, ending.step) == ("finished", 0, 4 if every else 6)
    what = "Held-out reward has not risen by more than 9 in 2 evaluations" if every else "in 2 checkpoints"
    assert what in ending.sentence
    best = best_of(all_checkpoints(run))
    assert best is not None
    before = [e["metrics"]["reward"] for e in read_events(run.events) if e["kind"] == "eval" and e["step"] == 0]
    is_trained = not before or (best.state.score is not None and best.state.score > before[0])
    named = f"checkpoint {best.step}" if is_trained else "the model before training"
    assert ending.sentence.endswith(f"is that of {named}.")
