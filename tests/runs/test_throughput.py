"""The seconds per completion, from the event logs of earlier runs of the same model."""

from __future__ import annotations

import json

import yaml

from backend.runs.archive import CompletionTime, completion_time_of, seconds_per_completion
from backend.runs.run_folder import RunFolder, make_run_folder

FORM = {"model": "a/b", "train_type": "lora", "max_completion_length": 512, "num_layers": 16, "grad_checkpoint": False,
        "num_iterations": 1}  # fmt: skip


def run_of(name: str, seconds: list[float], **settings: object) -> RunFolder:
    run = make_run_folder(name)
    run.config.write_text(
        yaml.safe_dump({"group_size": 4, "batch_size": 2, "gradient_accumulation_steps": 1} | FORM | settings)
    )
    lines = [{"v": 1, "seq": step, "t": 1.0, "kind": "step", "step": step, "metrics": {"time/step": time_s}} for step, time_s in enumerate(seconds)]  # fmt: skip
    run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_the_time_of_a_completion_is_the_median_step_over_its_completions():
    known = completion_time_of(run_of("one", [90.0, 8.0, 16.0, 8.0]))
    assert known is not None and known.seconds == 12.0 / 8


def test_runs_that_share_more_settings_decide_the_forecast():
    known = [
        CompletionTime(FORM | {"max_completion_length": 64}, 1.0),
        CompletionTime(FORM, 5.0),
        CompletionTime(FORM, 7.0),
        CompletionTime(FORM | {"model": "c/d"}, 99.0),
    ]
    assert seconds_per_completion(FORM, known) == 6.0
    assert seconds_per_completion(FORM | {"max_completion_length": 64}, known) == 1.0
    assert seconds_per_completion(FORM | {"train_type": "full"}, known) == 6.0


def test_no_forecast_for_a_model_with_no_or_few_steps():
    broken = run_of("broken", [1.0] * 5)
    broken.config.write_text("a: [")
    assert (
        completion_time_of(broken)
        is completion_time_of(run_of("short", [1.0, 1.0]))
        is completion_time_of(make_run_folder("empty"))
        is None
    )
    assert seconds_per_completion(FORM, []) is None
