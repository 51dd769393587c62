"""The seconds per completion, from the event logs of earlier runs of the same model."""

from __future__ import annotations

import yaml

from backend.runs.archive import CompletionTime, completion_time_of, seconds_per_completion
from backend.runs.events import EventLog
from backend.runs.run_folder import RunFolder, make_run_folder

FORM = {"model": "a/b", "train_type": "lora", "max_completion_length": 512, "num_layers": 16}
FORM |= {"grad_checkpoint": False, "num_iterations": 1}


def run_of(name: str, seconds: list[float], **settings: object) -> RunFolder:
    run = make_run_folder(name)
    sizes = {"group_size": 4, "batch_size": 2, "gradient_accumulation_steps": 1}
    run.config.write_text(yaml.safe_dump(sizes | FORM | settings))
    event_log = EventLog(run.events)
    for step, time_s in enumerate(seconds):
        event_log.write("step", step=step, metrics={"time/step": time_s})
    event_log.close()
    return run


def test_the_time_of_a_completion_is_the_median_step_over_its_completions():
    known = completion_time_of(run_of("one", [90.0, 8.0, 16.0, 8.0]))
    assert known is not None and known.seconds == 12.0 / 8


def test_runs_that_share_more_settings_decide_the_forecast():
    known = [CompletionTime(FORM, seconds) for seconds in (5.0, 7.0)]
    known += [CompletionTime(FORM | {"max_completion_length": 64}, 1.0), CompletionTime(FORM | {"model": "c/d"}, 99.0)]
    assert seconds_per_completion(FORM, known) == 6.0
    assert seconds_per_completion(FORM | {"max_completion_length": 64}, known) == 1.0
    assert seconds_per_completion(FORM | {"train_type": "full"}, known) == 6.0


def test_no_forecast_for_a_model_with_no_or_few_steps():
    broken = run_of("broken", [1.0] * 5)
    broken.config.write_text("a: [")
    runs = (broken, run_of("short", [1.0, 1.0]), make_run_folder("empty"))
    assert [completion_time_of(run) for run in runs] == [None] * 3
    assert seconds_per_completion(FORM, []) is None
