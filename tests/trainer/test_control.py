"""Commands from the control file, stop signals, and settings changed during a run: each is obeyed once, nothing keeps a
run from stopping, and a resume from either side of a change repeats it exactly."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backend.config.config import parse
from backend.runs import checkpoint
from backend.runs.events import EventLog, read_events
from backend.runs.run_folder import RunFolder, hold_lock
from backend.runs.steering import Change, read_changes, request_change
from backend.trainer import run_context, trainer
from backend.trainer.control import STOP_SIGNALS, Control, Stopped
from backend.trainer.run_process import train
from tests.support import small_run
from tests.support.small_run import assert_same_run, events, numbers, trained


@pytest.fixture
def control(run: RunFolder) -> Control:
    run.path.mkdir(parents=True)
    return Control(run, EventLog(run.events))


def words(run: RunFolder) -> list[str]:
    return [event["word"] for event in read_events(run.events) if event["kind"] == "command"]


def after(run: RunFolder, step: int, *commands: str) -> Any:
    """An echo that writes these commands once `step` is in the event log, each after the previous one was claimed."""

    def speak() -> None:
        for word in commands:
            run.say(word)
            while run.control.exists():
                time.sleep(0.005)

    def echo(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == step:
            threading.Thread(target=speak, daemon=True).start()
            while not run.control.exists():
                time.sleep(0.001)

    return echo


def test_a_command_is_obeyed_once_and_written_to_the_event_log(run: RunFolder, control: Control) -> None:
    control.obey()
    run.say("save")
    control.obey()
    assert control.save_requested and words(run) == ["save"]
    control.save_requested = False
    control.obey()
    assert not control.save_requested and words(run) == ["save"]
    assert not run.control.exists() and not run.control_taken.exists()


def test_control_files_of_an_earlier_process_are_not_obeyed(run: RunFolder, control: Control) -> None:
    run.control.write_text("stop")
    run.control_taken.write_text("stop")
    control = Control(run, control.event_log)
    control.obey()
    assert not control.stop_requested and not run.control.exists() and not run.control_taken.exists()


def test_a_word_that_came_since_the_run_was_locked_is_obeyed(inputs: Path, run: RunFolder) -> None:
    """By `train --run`, which locks the run before it checks the data."""
    settings = small_run.settings_for(inputs)
    small_run.write_config(run.config, settings)
    lock = hold_lock(run)
    run.say("stop")
    ending = train(parse(settings), run, command="a test", lock=lock)
    assert (ending.kind, ending.step) == ("stopped", 0) and words(run) == ["stop"] and not run.is_locked()


def test_a_stop_while_the_model_of_a_resumed_run_loads_is_at_its_step(
    inputs: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that the run was stopped at step 0."""
    raw = small_run.settings_for(inputs)
    small_run.train_here(raw, run, small_run.stop_after(run, 2))

    def load(*_: Any) -> None:
        raise Stopped("it was asked to stop")

    with monkeypatch.context() as patched:
        patched.setattr(run_context, "load_policy", load)
        ending = small_run.train_here(raw, run)
    assert ending.sentence.startswith("Stopped at step 2 because") and events(run, "stopped")[-1]["step"] == 2
    assert small_run.train_here(raw, run).kind == "finished" and small_run.steps(run) == [1, 2, 3]


def test_a_save_is_of_the_step_that_was_running_and_an_unknown_word_is_refused(inputs: Path, run: RunFolder) -> None:
    asks = after(run, 2, "st\x00p", "save")
    assert small_run.train_here(small_run.settings_for(inputs, iters=4), run, asks).kind == "finished"
    assert small_run.steps(run) == [1, 2, 3, 4] and words(run) == ["save"]
    (note,) = [event for event in small_run.events(run, "note") if event["level"] == "warning"]
    assert note["sentence"] == "The control word “st\x00p” is unknown and was ignored."
    steps = [saved.state.step for saved in checkpoint.all_checkpoints(run)]
    assert steps[-1] == 4 and len(steps) == 2 and steps[0] in (2, 3)


@pytest.fixture(autouse=True)
def not_under_nohup(signal_handlers_restored: None) -> None:
    """A suite that nohup has started ignores SIGHUP, and so would what is tested."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_every_stop_signal_stops(run: RunFolder, control: Control, number: signal.Signals) -> None:
    control.listen_to_signals()
    os.kill(os.getpid(), number)
    with pytest.raises(Stopped, match=f"{number.name} was received"):
        control.obey()
    (command,) = read_events(run.events)
    assert (command["word"], command["source"]) == ("stop", number.name)


SLOW = """
import time
from backend.rewards import register_reward_function
@register_reward_function("slow")
def slow(prompts, completions, answer, types=None):
    until = time.monotonic() + 30
    while time.monotonic() < until:
        time.sleep(0.01)
    return [1.0] * len(completions)
"""


@pytest.mark.parametrize("asks", ["SIGTERM", "the word stop"])
def test_no_reward_function_keeps_a_run_from_stopping(tmp_path: Path, run: RunFolder, asks: str) -> None:
    """Its limit is a minute by default; a system that shuts down, and a person, do not wait so long."""
    (tmp_path / "slow.py").write_text(SLOW)
    named = {"reward_functions": ["slow"], "reward_weights": [], "reward_functions_file": str(tmp_path / "slow.py")}
    settings = small_run.settings_for(tmp_path, **named)
    asked: list[float] = []

    def ask(event: dict[str, Any]) -> None:
        if event["kind"] == "phase" and event["phase"] == "scoring":
            asked.append(time.monotonic())
            ways = {"SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM), "the word stop": lambda: run.say("stop")}
            threading.Timer(0.1, ways[asks]).start()

    ending = small_run.train_here(settings, run, ask)
    assert ending.kind == "stopped" and time.monotonic() - asked[0] < 10
    why = "SIGTERM was received" if asks == "SIGTERM" else "it was asked to stop"
    assert ending.sentence == f"Stopped at step 0 because {why}; everything is saved."
    assert small_run.kinds(run).count("command") == 1


Echo = Callable[[dict[str, Any]], None]
SETTINGS: dict[str, Any] = (
    {"iters": 6, "group_size": 4, "num_iterations": 2, "learning_rate": 1e-3, "epsilon": 1e-3, "dropout": 0.1}
    | {"lr_schedule": "cosine", "lr_warmup_steps": 2, "lr_final": 1e-5, "save_every": 1, "keep_checkpoints": 9}
    | {"steps_per_eval": 2, "validation_split": 0.25, "val_batches": 1, "max_completion_length": 4, "top_k": 0}
)
CHANGED: dict[str, Any] = (
    {"learning_rate": 3e-3, "beta": 0.2, "temperature": 1.3, "epsilon": 0.2, "epsilon_high": 0.3}
    | {"reward_weights": [2.0], "iters": 5, "top_p": 0.8, "max_grad_norm": 0.5, "entropy_coef": 0.01}
    | {"steps_per_eval": 3}
)
"""Of every kind the trainer takes up in a place of its own; the KL weight from 0, so that a reference is loaded."""


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("inputs")
    return small_run.settings_for(folder, **small_run.low_half(folder) | SETTINGS)


def asking(run: RunFolder, settings: dict[str, Any]) -> Echo:
    """Asks for a change as soon as step 3 is in the event log."""

    def echo(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 3:
            request_change(run, settings)

    return echo


@pytest.fixture(scope="module")
def unchanged(raw: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained(raw, RunFolder(tmp_path_factory.mktemp("unchanged") / "run"))


@pytest.fixture(scope="module")
def changed(raw: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run that every interrupted one must equal: changed after step 3, so that step 4 is the first with the new
    settings, under which step 3 would have been evaluated."""
    run = RunFolder(tmp_path_factory.mktemp("changed") / "run")
    return trained(raw, run, asking(run, CHANGED))


def cut_to(source: RunFolder, folder: Path, step: int) -> RunFolder:
    """A copy of a run as a kill would leave it, its newest checkpoint that of `step`, its event log ahead of it."""
    run = RunFolder(folder / f"killed-after-{step}")
    shutil.copytree(source.path, run.path)
    for saved in checkpoint.all_checkpoints(run):
        if saved.state.step > step:
            shutil.rmtree(saved.path)
    lines = run.events.read_text().splitlines(keepends=True)
    last = events(run, "step")[-1]["seq"]
    run.events.write_text("".join(lines[: last + 1]) + '{"half a')
    return run


def test_a_change_holds_from_the_next_step_and_is_kept(changed: RunFolder, unchanged: RunFolder) -> None:
    (event,) = events(changed, "change")
    assert event["step"] == 4 and event["settings"]["learning_rate"] == [1e-3, 3e-3]
    assert set(event["settings"]) == set(CHANGED)
    assert read_changes(changed) == [Change(4, {key: tuple(pair) for key, pair in event["settings"].items()})]
    assert [step for _, step, _ in numbers(changed)] == [0, 1, 2, 2, 3, 4, 5, 5], "five steps, the last evaluated"
    assert numbers(changed)[:5] == numbers(unchanged)[:5], "what came before is as it was"
    fourth = next(metrics for kind, step, metrics in numbers(changed) if (kind, step) == ("step", 4))
    assert fourth["kl"] is not None and fourth["learning_rate"] > 1e-3
    rows = small_run.rows(changed)
    later = [completion for row in rows if row["step"] > 3 for completion in row["completions"]]
    assert all(completion["reward"] == 2 * completion["rewards"]["low_half"] for completion in later)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.proof), 3, 4])
def test_a_killed_run_equals_the_whole_one(raw: dict[str, Any], changed: RunFolder, tmp_path: Path, step: int) -> None:
    run = cut_to(changed, tmp_path, step)
    assert small_run.train_here(raw, run).kind == "finished"
    assert events(run, "started")[-1]["resumed_from"] == step
    assert_same_run(run, changed)
    mine, theirs = ([event["settings"] for event in events(each, "change")] for each in (run, changed))
    assert mine == theirs


def test_a_change_to_other_values_and_back_changes_nothing(
    raw: dict[str, Any], unchanged: RunFolder, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pause in the middle of step 3: both changes are taken up before step 4, the second over the first."""
    monkeypatch.setattr(trainer, "PHASE_EVERY_S", 0)
    back = {key: parse(raw).model_dump()[key] for key in CHANGED}
    answers: list[dict[str, Any]] = []

    def echo(event: dict[str, Any]) -> None:
        if event.get("phase") == "sampling" and small_run.steps(run)[-1:] == [2] and not answers:
            run.say("pause")
        if event.get("phase") == "paused":
            request_change(run, CHANGED)
        if event["kind"] == "note" and event["sentence"].startswith("From step 4 on"):
            answers.append(event)
            request_change(run, back) if len(answers) == 1 else run.say("resume")

    trained(raw, run, echo)
    assert [change.step for change in read_changes(run)] == [4, 4]
    assert_same_run(run, unchanged)


def test_a_change_that_cannot_be_is_refused_whole_and_the_run_goes_on(raw: dict[str, Any], run: RunFolder) -> None:
    """And one whose request is damaged."""

    def echo(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 1:
            request_change(run, {"temperature": -1, "beta": 0.5, "rank": 4})
        if event["kind"] == "step" and event["step"] == 2:
            run.change_request.write_text('{"settings": {"beta": 0.')

    trained(raw | {"iters": 3, "steps_per_eval": 0}, run, echo)
    first, second = (event["sentence"] for event in events(run, "note") if event["level"] == "warning")
    assert "not made. Rank is fixed once a run has begun" in first
    assert second == "The change was not made: its request cannot be read."
    assert not run.change_request.exists() and not run.changes.exists() and small_run.steps(run) == [1, 2, 3]


def test_finish_step(raw: dict[str, Any], unchanged: RunFolder, run: RunFolder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainer, "PHASE_EVERY_S", 0)

    def echo(event: dict[str, Any]) -> None:
        if event.get("phase") == "sampling" and small_run.steps(run)[-1:] == [2]:
            run.say("finish-step")

    ending = small_run.train_here(raw, run, echo)
    assert (ending.kind, ending.step, ending.exit_code) == ("stopped", 3, 3)
    assert "at the end of the step" in ending.sentence
    trained(raw, run)
    assert_same_run(run, unchanged)
