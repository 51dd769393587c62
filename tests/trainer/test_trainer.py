"""A run from first event to last: what it writes, that it learns, and that nothing is lost when it is interrupted."""

import json
import math
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import load

from app.state.run import PHASE_WORDS
from backend.runs import checkpoint
from backend.runs.events import METRICS, read_events
from backend.runs.run_folder import RunFolder
from backend.trainer import run_context, trainer
from backend.training.learner import Learner
from backend.utils.command import backend_command, backend_environment
from tests.support import small_run
from tests.support.random_models import tiny_model
from tests.support.small_run import assert_same_run, events, resumed_and_whole

REWARDS = '''
import itertools, os, time
from backend.rewards import register_reward_function
calls = itertools.count(1)
@register_reward_function("share")
def share(prompts, completions, answer, types=None, completion_ids=None):
    """Share of the low half of the vocabulary."""
    time.sleep(float(os.environ.get("SECONDS_A_SCORE", 0)))
    return [sum(token < 160 for token in ids) / len(ids) for ids in completion_ids]
@register_reward_function("one_token")
def one_token(prompts, completions, answer, types=None, completion_ids=None):
    return [ids.count(100) / len(ids) for ids in completion_ids]
@register_reward_function("rises_and_falls")
def rises_and_falls(prompts, completions, answer, types=None):
    return [{2: 1.0, 4: 0.5}.get(next(calls), 0.0)] * len(completions)
'''
WHOLE: dict[str, Any] = (
    {"iters": 5, "batch_size": 2, "group_size": 4, "num_iterations": 2, "beta": 0.05, "learning_rate": 1e-3}
    | {"epsilon": 1e-3, "dropout": 0.1, "lr_schedule": "cosine", "lr_warmup_steps": 2, "lr_final": 1e-5}
    | {"save_every": 2, "steps_per_eval": 3, "validation_split": 0.25, "max_completion_length": 6, "top_p": 0.9}
    | {"top_k": 0}
)
"""Settings with all a resumed run can get wrong: schedule, moments, dropout, random numbers, row order, evaluation."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def settings(inputs: Path, reward: str | list[str] = "share", **changes: Any) -> dict[str, Any]:
    names = [reward] if isinstance(reward, str) else reward
    rewards = {"reward_functions": names, "reward_weights": [], "reward_functions_file": str(inputs / "rewards.py")}
    return small_run.settings_for(inputs, **rewards | changes)


def completion_steps(run: RunFolder) -> list[int]:
    """The step of each line of completions.jsonl."""
    return [row["step"] for row in small_run.rows(run)]


@pytest.fixture(scope="module")
def uninterrupted(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run that every interrupted one must equal."""
    return small_run.trained(settings(inputs, **WHOLE), RunFolder(tmp_path_factory.mktemp("uninterrupted") / "run"))


def test_every_step_carries_every_metric(uninterrupted: RunFolder) -> None:
    names = METRICS.keys() | {"rewards/share/mean", "rewards/share/std"}
    steps = [event["metrics"] for event in events(uninterrupted, "step")]
    assert all(math.isfinite(metrics[name]) for metrics in steps for name in names)
    assert all(steps[-1][name] > 0 for name in ("kl", "entropy", "clip_ratio_total", "grad_norm"))
    tokens = [metrics["num_tokens"] for metrics in steps]
    assert tokens == sorted(tokens) and tokens[0] < tokens[-1]


def test_the_event_log_has_every_event_in_order(uninterrupted: RunFolder) -> None:
    event_log = list(read_events(uninterrupted.events))
    saved = ["step", "checkpoint"]
    assert small_run.kinds(uninterrupted) == [
        *("started", "note", "eval", "step", *saved, "step", "eval", *saved, "step", "eval", "checkpoint", "finished")
    ]
    assert "reward_isolation: thread" in small_run.notes(uninterrupted)[0]
    assert [event["seq"] for event in event_log] == list(range(len(event_log)))
    assert all(event["v"] == 1 and event["t"] > 1.7e9 for event in event_log)
    assert event_log[0]["phase"] == "loading"
    assert {event["phase"] for event in event_log if event["kind"] == "phase"} <= PHASE_WORDS.keys()
    (started,) = events(uninterrupted, "started")
    assert started["iterations"] == 5 and started["pid"] == os.getpid() and started["resumed_from"] is None
    assert {"python", "mlx", "mlx-lm"} <= started["versions"].keys()
    paths = [event["path"] for event in events(uninterrupted, "checkpoint")]
    assert paths == ["checkpoints/000002", "checkpoints/000004", "checkpoints/000005"]
    for event in events(uninterrupted, "eval"):
        assert {"reward", "rewards/share/mean", "completions/mean_length"} <= event["metrics"].keys()
    assert not uninterrupted.is_locked()


def test_completions_jsonl_has_every_group_with_its_rewards_and_advantages(uninterrupted: RunFolder) -> None:
    assert completion_steps(uninterrupted) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    for line in small_run.rows(uninterrupted):
        assert line["prompt"].startswith("What is") and line["answer"].isdigit() and len(line["completions"]) == 4
        for completion in line["completions"]:
            assert completion["tokens"] <= 6 and completion["stop"] in ("eos", "length")
            assert completion["reward"] == completion["rewards"]["share"] and isinstance(completion["text"], str)
        assert sum(completion["advantage"] for completion in line["completions"]) == pytest.approx(0, abs=1e-3)


LEARNING = {"iters": 25, "batch_size": 2, "group_size": 16, "num_iterations": 2, "max_completion_length": 8}
LEARNING |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "epsilon": 0.2, "rank": 8}


@pytest.mark.usefixtures("compiled")  # as users train
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.proof) for seed in (1, 2))])
def test_full_fine_tuning_learns_to_write_one_token(inputs: Path, run: RunFolder, seed: int) -> None:
    """The share of the token rises from chance (1 in 320) to nearly 1."""
    full = {"train_type": "full", "learning_rate": 1e-2, "seed": seed}
    assert small_run.train_here(settings(inputs, "one_token", **LEARNING | full), run).kind == "finished"
    rewards = [event["metrics"]["reward"] for event in events(run, "step")]
    assert rewards[0] < 0.05 and np.mean(rewards[-3:]) > 0.8


@pytest.mark.parametrize("moment", [pytest.param("after a step", marks=pytest.mark.proof), "while it saves"])
def test_a_killed_run_equals_the_whole_one(inputs: Path, uninterrupted: RunFolder, run: RunFolder, moment: str) -> None:
    """A child process, SIGKILL at a random moment after the first checkpoint, then resumed."""
    chance = random.Random()
    step = chance.randint(3, 4)  # the checkpoint of step 2 exists by then
    wait = chance.uniform(0, 0.05) if moment == "after a step" else chance.uniform(0, 0.01)
    small_run.prepare(run, settings(inputs, **WHOLE))
    command = backend_command("train", "--run", str(run.path), "--stream")
    unhurried = backend_environment() | {"SECONDS_A_SCORE": "0.1"}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=unhurried)
    assert child.stdout
    saves = 0
    for text in child.stdout:
        event = json.loads(text)
        saves += event.get("phase") == "saving"
        if saves == 2 if moment == "while it saves" else event.get("step") == step:
            break
    time.sleep(wait)
    child.kill()
    child.communicate()
    killed = f"killed {wait:.3f} s after {f'step {step}' if moment == 'after a step' else 'the second save began'}"
    assert small_run.kinds(run)[-1] not in ("finished", "failed"), killed
    assert small_run.train_here(settings(inputs, **WHOLE), run).kind == "finished", killed
    assert events(run, "started")[-1]["resumed_from"] in (2, 4), killed
    assert_same_run(run, uninterrupted)


def stop_in(run: RunFolder, phase: str, step: int) -> Callable[[dict[str, Any]], None]:
    """An echo that asks to stop in this phase of the step after `step`."""

    def echo(event: dict[str, Any]) -> None:
        if event.get("phase") == phase and small_run.steps(run)[-1:] == [step]:
            run.say("stop")

    return echo


STOPS = [("sampling", 2, 2), ("scoring", 2, 2), ("learning", 2, 3), ("evaluating", 3, 3), ("saving", 4, 4)]
"""In which phase a run is asked to stop, after which step, and the step that it stops at."""


def test_a_stop_leaves_the_last_finished_step_and_loses_nothing(
    inputs: Path, uninterrupted: RunFolder, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop before the updates of a step discards it; after they began, it is finished. An evaluation or save that was
    due is repeated after the resume."""
    monkeypatch.setattr(trainer, "PHASE_EVERY_S", 0)
    for phase, asked_after, last_step in STOPS:
        ending = small_run.train_here(settings(inputs, **WHOLE), run, stop_in(run, phase, asked_after))
        assert (ending.kind, ending.exit_code, ending.step) == ("stopped", 3, last_step), phase
        assert small_run.steps(run) == list(range(1, last_step + 1)) and completion_steps(run)[-1] == last_step
        saved = checkpoint.newest(run)
        assert saved
        assert (saved.state.step, saved.state.updates, saved.state.cursor) == (last_step, 2 * last_step, 2 * last_step)
    assert small_run.train_here(settings(inputs, **WHOLE), run).kind == "finished"
    assert_same_run(run, uninterrupted)


def test_a_run_saves_and_evaluates_once_per_epoch(
    inputs: Path, run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 6 rows, of which a step takes 4; it is stopped in the evaluation that the first epoch ends with."""
    raw = settings(
        inputs, **WHOLE | {"iters": 4, "batch_size": 4, "group_size": 2, "save_every": -1, "steps_per_eval": -1}
    )
    whole = RunFolder(tmp_path / "whole")
    assert small_run.train_here(raw, whole).kind == "finished"
    assert [event["step"] for event in events(whole, "eval")] == [0, 2, 3, 4]
    assert [event["step"] for event in events(whole, "checkpoint")] == [2, 3, 4]
    monkeypatch.setattr(trainer, "PHASE_EVERY_S", 0)
    assert small_run.train_here(raw, run, stop_in(run, "evaluating", 2)).kind == "stopped"
    assert small_run.train_here(raw, run).kind == "finished"
    assert_same_run(run, whole)


def test_a_paused_run(inputs: Path, uninterrupted: RunFolder, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens per second are computed from these times: a pause in the middle of a rollout must not halve them."""
    monkeypatch.setattr(trainer, "PHASE_EVERY_S", 0)

    def echo(event: dict[str, Any]) -> None:
        if event.get("phase") == "sampling" and small_run.steps(run) == [1]:
            run.say("pause")
        if event.get("phase") == "paused":
            threading.Timer(0.5, run.say, ["resume"]).start()

    assert small_run.train_here(settings(inputs, **WHOLE), run, echo).kind == "finished"
    assert_same_run(run, uninterrupted)
    assert [event["word"] for event in events(run, "command")][:2] == ["pause", "resume"]
    steps = events(run, "step")
    paused = steps[1]["metrics"]
    assert paused["time/rollout"] <= paused["time/step"] < steps[1]["t"] - steps[0]["t"] - 0.4
    saved = checkpoint.newest(run)
    assert saved and saved.state.elapsed_s < sum(event["metrics"]["time/step"] for event in steps) + 0.2


def test_a_bug_is_logged_with_its_traceback(inputs: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback was once formatted after the exception was handled, so every bug report read “NoneType: None”."""
    learn = Learner.learn

    def broken(learner: Learner, *args: Any) -> Any:
        return 1 / 0 if learner.updates == 2 else learn(learner, *args)

    monkeypatch.setattr(Learner, "learn", broken)
    ending = small_run.train_here(settings(inputs), run)
    assert (ending.kind, ending.step, ending.exit_code) == ("failed", 2, 1)
    last = list(read_events(run.events))[-1]
    assert last["sentence"] == "ZeroDivisionError: division by zero"
    assert "Traceback" in last["traceback"] and "in broken" in last["traceback"]
    saved = checkpoint.newest(run)
    assert saved and saved.state.step == 2 and not run.is_locked()
    monkeypatch.setattr(checkpoint, "rotate", lambda *_: {}["before the run is open"])
    assert small_run.train_here(settings(inputs), run).exit_code == 1 and not run.is_locked()
    assert "before the run is open" in list(read_events(run.events))[-1]["traceback"]


def test_the_best_checkpoint_survives_the_rotation(inputs: Path, run: RunFolder) -> None:
    raw = settings(inputs, "rises_and_falls", iters=6, save_every=1, keep_checkpoints=2, max_completion_length=2)
    assert small_run.train_here(raw, run).kind == "finished"
    assert [saved.state.step for saved in checkpoint.all_checkpoints(run)] == [2, 5, 6]
    # Killed between the last checkpoint and the deletion of an older one: no further save would delete it.
    older = shutil.copytree(run.checkpoints / "000005", run.checkpoints / "000004")
    state = json.loads((older / "state.json").read_text())
    (older / "state.json").write_text(json.dumps(state | {"step": 4}))
    assert small_run.train_here(raw, run).kind == "finished"
    assert [saved.state.step for saved in checkpoint.all_checkpoints(run)] == [2, 5, 6]


@pytest.mark.parametrize("train_type", ["lora", "dora", "full"])
def test_the_trained_model_opens_in_mlx_lm(inputs: Path, run: RunFolder, train_type: str) -> None:
    raw = settings(inputs, train_type=train_type, learning_rate=1e-3, fuse=False)
    assert small_run.train_here(raw, run).kind == "finished"
    where = {"adapter_path": str(run.adapters)} if train_type != "full" else {}
    model = load(str(run.model) if train_type == "full" else raw["model"], **where)[0]
    start = load(raw["model"])[0]
    tokens = mx.array([[5, 6, 7]])
    assert not mx.array_equal(model(tokens), start(tokens))
    assert run.adapters.exists() == (train_type != "full")


@pytest.mark.parametrize("train_type", ["lora", pytest.param("full", marks=pytest.mark.proof)])
def test_bfloat16_resumes_to_the_last_bit(inputs: Path, tmp_path: Path, train_type: str) -> None:
    """Its importance correction is from the first of a rollout's two updates; full fine-tuning has float32 masters."""
    raw = settings(inputs, train_type=train_type, dtype="bfloat16", iters=3, num_iterations=2, save_every=9, dropout=0)
    whole = resumed_and_whole(raw, tmp_path, 2)
    assert any("bfloat16, where sampler and learner" in note for note in small_run.notes(whole))


def test_quantised_rollouts(tmp_path: Path) -> None:
    """They learn what the exact policy makes of their completions, evaluate it, and resume to the last bit."""
    tiny_model(tmp_path / "model", hidden=64, layers=1)
    small_run.write_rows(tmp_path / "rows.jsonl")
    how = {"top_p": 1.0, "top_k": 0, "learning_rate": 0.05, "validation_split": 0.25, "steps_per_eval": 2}
    raw = small_run.settings_for(tmp_path, iters=3, **how) | small_run.low_half(tmp_path)
    exact = small_run.trained(raw, RunFolder(tmp_path / "exact"))
    quantised = raw | {"rollout_quantization": "4"}
    whole = resumed_and_whole(quantised, tmp_path, 1)
    assert len({events(folder, "eval")[0]["metrics"]["reward"] for folder in (exact, whole)}) == 1
    first, coarse = (events(folder, "step")[0]["metrics"] for folder in (exact, whole))
    assert first["sampling/logp_gap/mean"] < 1e-5 < 1e-3 < coarse["sampling/logp_gap/mean"]
    assert coarse["sampling/importance_sampling_ratio/min"] < 0.999 < first["sampling/importance_sampling_ratio/min"]
    gap = events(whole, "step")[-1]["metrics"]["sampling/logp_gap/mean"]
    assert gap < 0.5, "it samples with the present adapters"
    assert any("sampled in 4 bits, and learned in float32" in note for note in small_run.notes(whole))


def test_a_resumed_run_computes_in_the_type_that_it_began_with(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU `dtype: auto` depends on the memory that is free."""
    tiny_model(tmp_path / "model", layers=1, dtype="bfloat16")
    small_run.write_rows(tmp_path / "rows.jsonl")
    raw = small_run.settings_for(tmp_path, iters=2) | small_run.low_half(tmp_path)
    whole = RunFolder(tmp_path / "whole")
    assert small_run.train_here(raw, whole).kind == "finished"
    assert small_run.train_here(raw, run, small_run.stop_after(run, 1)).kind == "stopped"
    monkeypatch.setattr(run_context, "dtype_here", lambda stages: ("auto", ""))
    assert small_run.train_here(raw, run).kind == "finished"
    assert_same_run(run, whole)
