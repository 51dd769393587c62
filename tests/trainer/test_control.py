"""Commands from the control file and stop signals: each is obeyed once, and nothing keeps a run from stopping."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from backend.config.config import parse
from backend.runs import checkpoint
from backend.runs.events import EventLog, read_events
from backend.runs.run_folder import RunFolder, hold_lock
from backend.trainer.control import STOP_SIGNALS, Control, Stopped
from backend.trainer.run_process import train
from tests.support import small_run


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "mine")
    folder.path.mkdir(parents=True)
    return folder


@pytest.fixture
def control(run: RunFolder) -> Control:
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


def test_a_stop_between_updates_waits_for_the_end_of_the_step(run: RunFolder, control: Control) -> None:
    run.say("stop")
    control.obey(may_stop=False)
    assert control.stop_requested and words(run) == ["stop"]
    with pytest.raises(Stopped, match="it was asked to stop"):
        control.obey()
    assert words(run) == ["stop"]


def test_control_files_of_an_earlier_process_are_not_obeyed(run: RunFolder) -> None:
    run.control.write_text("stop")
    run.control_taken.write_text("stop")
    control = Control(run, EventLog(run.events))
    control.obey()
    assert not control.stop_requested and not run.control.exists() and not run.control_taken.exists()


def test_a_pause_lasts_until_resume_and_frees_memory_once(run: RunFolder) -> None:
    calls: list[str] = []
    before, after = (lambda: calls.append("before")), (lambda: calls.append("after"))
    control = Control(run, EventLog(run.events), before_pause=before, after_pause=after)
    threading.Timer(0.3, run.say, ["resume"]).start()
    run.say("pause")
    control.obey()
    assert calls == ["before", "after"] and 0.2 < control.paused_s < 2 and words(run) == ["pause", "resume"]
    paused = [event for event in read_events(run.events) if event["kind"] == "phase"]
    assert [event["phase"] for event in paused] == ["paused"]
    assert not control.stop_requested and not control.save_requested


def test_a_word_that_came_since_the_run_was_locked_is_obeyed(inputs: Path, run: RunFolder) -> None:
    """By `train --run`, which locks the run before it checks the data."""
    settings = small_run.settings_for(inputs)
    small_run.write_config(run.config, settings)
    lock = hold_lock(run)
    run.say("stop")
    ending = train(parse(settings), run, command="a test", lock=lock)
    assert (ending.kind, ending.step) == ("stopped", 0) and words(run) == ["stop"] and not run.is_locked()


def test_an_unknown_word_is_refused_and_the_run_goes_on(inputs: Path, run: RunFolder) -> None:
    ending = small_run.train_here(small_run.settings_for(inputs), run, after(run, 1, "st\x00p"))
    assert ending.kind == "finished" and small_run.steps(run) == [1, 2, 3] and not words(run)
    (note,) = [event for event in small_run.events(run, "note") if event["level"] == "warning"]
    assert note["sentence"] == "The control word “st\x00p” is unknown and was ignored."


def test_a_requested_save_is_a_checkpoint_of_the_step_that_was_running(inputs: Path, run: RunFolder) -> None:
    ending = small_run.train_here(small_run.settings_for(inputs, iters=4), run, after(run, 2, "save"))
    assert ending.kind == "finished"
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
