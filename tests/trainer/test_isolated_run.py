"""Runs whose reward functions have a process of their own, which is the default."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from backend.cli.run_log import logging_to
from backend.rewards.allowed_code import allow_named
from backend.runs.run_folder import RunFolder
from tests.support import small_run
from tests.support.small_run import events, notes

REWARDS = """
import os
from backend.rewards import register_reward_function

@register_reward_function("low")
def low(completion_ids):
    return [sum(token < 160 for token in ids) / len(ids) for ids in completion_ids]

@register_reward_function("gone")
def gone(completions, trainer_state):
    if trainer_state.step == 2:
        os._exit(0)
    return [0.0] * len(completions)

@register_reward_function("where")
def where(completions, log_metric):
    log_metric("pid", os.getpid())
    return [0.0] * len(completions)
"""


@pytest.fixture
def raw(tmp_path: Path):
    """Makes settings of a short run with these functions."""

    def make(*names: str, **changes: Any) -> dict[str, Any]:
        file = tmp_path / "mine.py"
        file.write_text(REWARDS)
        about = {"reward_functions": list(names), "reward_weights": [], "reward_functions_file": str(file)}
        return small_run.settings_for(tmp_path, **about, **{"reward_isolation": "process", **changes})

    return make


def test_a_run_is_the_same_in_either_place_and_says_where_nothing_is_kept_apart(raw, tmp_path: Path) -> None:
    runs = {place: RunFolder(tmp_path / place) for place in ("process", "thread")}
    for place, run in runs.items():
        evaluated = {"validation_split": 0.5, "val_batches": 1, "steps_per_eval": 1}
        settings = raw("low", "where", reward_isolation=place, iters=2, **evaluated)
        assert small_run.train_here(settings, run).kind == "finished"
    process, thread = runs.values()
    assert process.completions.read_bytes() == thread.completions.read_bytes()
    rewards = [[event["metrics"]["reward"] for event in events(run, "eval")] for run in (process, thread)]
    assert rewards[0] == rewards[1] and len(rewards[0]) == 3
    pids = [{event["metrics"]["pid"] for event in events(run, "step")} for run in (process, thread)]
    assert len(pids[0]) == 1 and pids[0] != pids[1] == {os.getpid()}, "one process for the whole run"
    assert any("inside the trainer's own process" in note for note in notes(thread))
    assert not any("inside the trainer's own process" in note for note in notes(process))


def test_a_function_that_ends_its_process_ends_the_run_saved(raw, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    ending = small_run.train_here(raw("low", "gone", iters=3), run)
    assert (ending.kind, ending.step, ending.exit_code) == ("failed", 2, 2)
    assert ending.sentence.removeprefix("reward_functions: ").startswith(
        "The reward function gone of mine.py, line 9, ended the process it ran in (exit code 0)."
    )
    assert events(run, "failed")[0]["sentence"] == ending.sentence and events(run, "checkpoint")[-1]["step"] == 2


def test_a_resumed_run_says_that_its_reward_file_is_another_now(raw, tmp_path: Path) -> None:
    """The steps before and after are no more comparable, and whoever edited the file may not have meant this run."""
    run, mine = RunFolder(tmp_path / "run"), tmp_path / "mine.py"

    def go_on(iters: int) -> list[str]:
        settings = raw("low", reward_isolation="thread", iters=iters)
        mine.write_text(text)
        assert small_run.train_here(settings, run).kind == "finished"
        return [sentence for sentence in notes(run) if "mine.py" in sentence]

    text = REWARDS
    assert go_on(1) == [] and go_on(2) == []
    text += "# mended"
    (sentence,) = go_on(3)
    assert sentence.startswith("mine.py has changed since this run was trained last: the steps up to 2 were scored")
    assert go_on(4) == [sentence] and len(sentence) <= 200, "and not again"


STRICT = """
import time
import backend.rewards

def inner(text):
    {inner}

@backend.rewards.register_reward_function("strict")
def strict(prompts, completions, answer, types=None):
    try:
        [inner("abc") for _ in completions]
    except ValueError as error:
        raise RuntimeError("cannot score") from error
"""
RAISES = 'raise ValueError("no digits in " + text[:3] + chr(27) + "[31m")'
HANGS = "while True: time.sleep(0.01)"
WAITS = """
import asyncio
import backend.rewards

async def inner():
    await asyncio.Event().wait()

@backend.rewards.register_reward_function("strict")
async def strict(prompts, completions, answer, types=None):
    await inner()
"""


@pytest.mark.parametrize("isolation", ["process", "thread"])
@pytest.mark.parametrize(
    ("text", "says", "logged"),
    [
        (WAITS, "strict of mine.py, line 8, was still running after 1 s (reward_timeout).", "in strict|in inner"),
        (
            STRICT.format(inner=HANGS),
            "strict of mine.py, line 8, was still running after 1 s (reward_timeout).",
            "in inner|in strict",
        ),
        (
            STRICT.format(inner=RAISES),
            "strict of mine.py raised RuntimeError: cannot score (mine.py, line 13).",
            "line 6, in inner|ValueError: no digits in abc|The above exception was the direct cause|line 13, in strict",
        ),
    ],
    ids=["waits", "hangs", "raises"],
)
def test_log_says_where_a_reward_hangs_or_raises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], isolation: str, text: str, says: str, logged: str
) -> None:
    """The user's own frames and the cause; the event log and the terminal have one sentence."""
    file, run = tmp_path / "mine.py", RunFolder(tmp_path / "run")
    file.write_text(text)
    run.path.mkdir()
    about = {"reward_functions_file": str(file), "reward_isolation": isolation, "reward_timeout": 1}
    raw = small_run.settings_for(tmp_path, reward_functions=["strict"], reward_weights=[], **about)
    allow_named(raw)
    with logging_to(run):
        ending = small_run.train_here(raw, run)
    assert (ending.kind, ending.exit_code) == ("failed", 2) and "\n" not in ending.sentence
    assert ending.sentence.endswith(f"{says} The traceback is in log.txt.")
    log = run.log.read_text()
    assert all(line in log for line in logged.split("|"))
    assert chr(27) not in log and "Traceback" not in capsys.readouterr().err
    assert "still running" in says or "calls.py" not in log
