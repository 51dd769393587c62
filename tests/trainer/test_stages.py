"""How a step is scored and which prompts it takes: stages, reward weights that vary, baselines, dynamic sampling."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from backend.config.config import Config, parse
from backend.runs import checkpoint
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from tests.support import small_run
from tests.support.small_run import assert_same_run, train_with_stops

REWARDS = '''
from backend.rewards import register_reward_function
def shares(completion_ids, start, stop):
    return [sum(start <= token < stop for token in ids) / len(ids) for ids in completion_ids]
@register_reward_function("low")
def low(prompts, completions, answer, types=None, completion_ids=None):
    return shares(completion_ids, 0, 160)
@register_reward_function("high")
def high(prompts, completions, answer, types=None, completion_ids=None):
    return shares(completion_ids, 160, 320)
@register_reward_function("seldom")
def seldom(prompts, completions, answer, types=None, completion_ids=None):
    """Gives 1 for the first completion of a step and next to nothing for the others."""
    return [1.0 if i == 0 else 0.01 * (i % 2) for i in range(len(completions))]
@register_reward_function("even_prompts")
def even_prompts(prompts, completions, answer, types=None):
    """Scores vary over the completions of even prompts ("What is 4 plus 4?") and are all 1 for odd ones."""
    even = [int(prompt.split()[2]) % 2 == 0 for prompt in prompts]
    return [float(i % 2) if is_even else 1.0 for i, is_even in enumerate(even)]
@register_reward_function("all_alike")
def all_alike(prompts, completions, answer, types=None):
    return [1.0] * len(completions)
'''


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def settings(inputs: Path, rewards: list[str], **changes: Any) -> dict[str, Any]:
    about = {"reward_functions": rewards, "reward_weights": [], "reward_functions_file": str(inputs / "rewards.py")}
    return small_run.settings_for(inputs, **about | {"learning_rate": 1e-3} | changes)


def metrics(run: RunFolder) -> list[dict[str, Any]]:
    return [event["metrics"] for event in read_events(run.events) if event["kind"] == "step"]


def lines(run: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.completions.read_text().splitlines()]


@pytest.fixture(scope="module")
def staged(inputs: Path) -> dict[str, Any]:
    """Settings of a run with stages, whose learning rate falls to 0."""
    falls = {"lr_schedule": "linear", "lr_warmup_steps": 0, "lr_decay_fraction": 1.0, "lr_final": 0.0}
    second = {"iters": 3, "reward_functions": ["high", "low"], "reward_weights": [2, -1]}
    stages = [{"iters": 2, "reward_functions": ["low"]}, second, {"iters": 1}]
    return settings(inputs, ["low", "high"], reward_weights=[0.5, 0.25], stages=stages, iters=1000, **falls)


@pytest.fixture(scope="module")
def whole(staged: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run with stages, without a break."""
    run = RunFolder(tmp_path_factory.mktemp("staged") / "run")
    assert small_run.train_here(staged, run).kind == "finished"
    return run


def test_stages_switch_at_their_step_and_decide_the_length_of_the_run(whole: RunFolder) -> None:
    (started,) = [event for event in read_events(whole.events) if event["kind"] == "started"]
    assert small_run.steps(whole) == [1, 2, 3, 4, 5, 6]
    assert started["iterations"] == 6
    expected = [{"low": 1.0}] * 2 + [{"high": 2.0, "low": -1.0}] * 3 + [{"low": 0.5, "high": 0.25}]
    for line, weights in zip(lines(whole), expected, strict=True):
        for completion in line["completions"]:
            scores = completion["rewards"]
            assert scores.keys() == weights.keys()
            assert completion["reward"] == pytest.approx(sum(weights[name] * x for name, x in scores.items()))
    for step_metrics, weights in zip(metrics(whole), expected, strict=True):
        assert {name.split("/")[1] for name in step_metrics if name.startswith("rewards/")} == weights.keys()


def test_adaptive_weights_survive_a_resume(inputs: Path, run: RunFolder, tmp_path: Path) -> None:
    """`seldom` succeeds in 1 of 4 completions: after ten steps its weight is 1.2 times as large."""
    uninterrupted = RunFolder(tmp_path / "uninterrupted")
    about = {"reward_weight_schedule": "adaptive", "iters": 12, "group_size": 4, "max_completion_length": 1}
    raw = settings(inputs, ["seldom", "low"], reward_weights=[0.5, 1.0], **about)
    assert small_run.train_here(raw, uninterrupted).kind == "finished"
    weights = [step["reward_weights/seldom"] for step in metrics(uninterrupted)]
    assert weights == pytest.approx([0.5] * 10 + [0.6] * 2)
    train_with_stops(raw, run, 4, 11)  # with some success rates collected, and with a weight changed
    assert_same_run(run, uninterrupted)
    assert [step["reward_weights/seldom"] for step in metrics(run)] == weights


def taken(config: Config, count: int) -> list[int]:
    """The numbers in the first `count` prompts of the stream, by its rule: reshuffled every epoch with the seed."""
    order: list[int] = []
    while len(order) < count:
        order += random.Random(f"{config.seed} {len(order) // 8}").sample(range(8), 8)
    return order[:count]


def by_hand(config: Config, steps: int, prompts: int, rounds: int) -> tuple[list[list[int]], list[int]]:
    """The numbers that each step learns from, and the stream's cursor after it."""
    prompt_stream, cursor, chosen, cursors = taken(config, 1000), 0, [], []
    for _ in range(steps):
        kept: list[int] = []
        spare: list[int] = []
        for _ in range(rounds):
            next_numbers = prompt_stream[cursor : cursor + prompts - len(kept)]
            cursor += len(next_numbers)
            kept += [n for n in next_numbers if n % 2 == 0]
            spare += [n for n in next_numbers if n % 2]
            if len(kept) == prompts:
                break
        chosen.append(kept + spare[: prompts - len(kept)])
        cursors.append(cursor)
    return chosen, cursors


def numbers(run: RunFolder, prompts: int) -> list[list[int]]:
    taken = [int(line["prompt"].split()[2]) for line in lines(run)]
    return [taken[i : i + prompts] for i in range(0, len(taken), prompts)]


DYNAMIC: dict[str, Any] = {"dynamic_sampling": True, "batch_size": 3, "iters": 4, "beta": 0.02, "save_every": 1}
DYNAMIC |= {"keep_checkpoints": 9, "max_completion_length": 3}


@pytest.fixture(scope="module")
def dynamic(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """An uninterrupted run with dynamic sampling."""
    run = RunFolder(tmp_path_factory.mktemp("dynamic") / "run")
    assert small_run.train_here(settings(inputs, ["even_prompts"], **DYNAMIC), run).kind == "finished"
    return run


def test_dynamic_sampling_takes_prompts_until_every_group_has_a_gradient(inputs: Path, dynamic: RunFolder) -> None:
    raw, run = settings(inputs, ["even_prompts"], **DYNAMIC), dynamic
    chosen, cursors = by_hand(parse(raw), 4, 3, 10)
    assert numbers(run, 3) == chosen and all(n % 2 == 0 for step in chosen for n in step)
    assert [saved.state.cursor for saved in checkpoint.all_checkpoints(run)] == cursors and cursors[-1] > 4 * 3
    assert [step_metrics["frac_reward_zero_std"] for step_metrics in metrics(run)] == [0] * 4
    assert np.cumsum([step_metrics["dynamic_sampling/prompts"] for step_metrics in metrics(run)]).tolist() == cursors


def test_a_resumed_dynamic_run_equals_the_uninterrupted_one(inputs: Path, run: RunFolder, dynamic: RunFolder) -> None:
    train_with_stops(settings(inputs, ["even_prompts"], **DYNAMIC), run, 2)
    assert_same_run(run, dynamic)


def test_a_resumed_run_with_prompts_by_pass_rate_equals_the_uninterrupted_one(
    inputs: Path, run: RunFolder, tmp_path: Path
) -> None:
    uninterrupted = RunFolder(tmp_path / "uninterrupted")
    raw = settings(inputs, ["even_prompts"], **DYNAMIC, prompt_selection="pass_rate", success_reward_threshold=0.5)
    assert small_run.train_here(raw, uninterrupted).kind == "finished"
    train_with_stops(raw, run, 2, 3)
    assert_same_run(run, uninterrupted)
    saved = [dict(mx.load(str(run.checkpoints / f"{step:06d}/pass_rates.safetensors"))) for step in (1, 4)]
    assert saved[0]["failures"].shape == (8,) and saved[1]["failures"].sum().item() > 0
    assert {"curriculum/pass_rate", "curriculum/expected_signal", "curriculum/signal"} <= metrics(run)[-1].keys()
    assert all(len(set(of_step)) == 3 for of_step in numbers(run, 3))
