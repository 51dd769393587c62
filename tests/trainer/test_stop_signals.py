"""A closed terminal is a request to stop: everything is saved, whatever else comes while it is, and nothing that cannot
be printed matters."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from backend.runs.events import EventLog
from backend.runs.run_folder import RunFolder
from backend.trainer.control import STOP_SIGNALS, Control, Stopped
from tests.support import small_run


@pytest.fixture(autouse=True)
def not_under_nohup(signal_handlers_restored: None) -> None:
    """A suite that nohup has started ignores SIGHUP, and so would what is tested."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def control(run: RunFolder) -> Control:
    run.path.mkdir(parents=True)
    return Control(run, EventLog(run.events))


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_every_stop_signal_stops(control: Control, number: signal.Signals) -> None:
    control.listen_to_signals()
    os.kill(os.getpid(), number)
    with pytest.raises(Stopped, match=f"{number.name} was received"):
        control.obey()


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
    settings = small_run.settings_for(tmp_path) | {
        "reward_functions": ["slow"], "reward_weights": [], "reward_functions_file": str(tmp_path / "slow.py"),
    }  # fmt: skip
    asked: list[float] = []

    def ask(event: dict[str, Any]) -> None:
        if event["kind"] == "phase" and event["phase"] == "scoring":
            asked.append(time.monotonic())
            timer = threading.Timer(
                0.1, lambda: os.kill(os.getpid(), signal.SIGTERM) if asks == "SIGTERM" else run.say("stop")
            )
            timer.start()

    ending = small_run.train_here(settings, run, ask)
    assert ending.kind == "stopped" and time.monotonic() - asked[0] < 10
    why = "SIGTERM was received" if asks == "SIGTERM" else "it was asked to stop"
    assert ending.sentence == f"Stopped at step 0 because {why}; everything is saved."
    assert small_run.kinds(run).count("command") == 1
