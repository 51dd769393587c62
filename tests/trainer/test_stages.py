"""How a step is scored and which prompts it takes: stages, with settings and rows of their own, reward weights that
vary, dynamic sampling; runs that end before their last step as planned."""

import json
import math
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from backend.config.config import Config, parse, problems
from backend.runs import checkpoint
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import TrainingState, all_checkpoints, best_of, find_checkpoint
from backend.runs.steering import MetricWatch, early_stop
from tests.support import small_run
from tests.support.small_run import arrays, assert_same_run, events, metrics, rows, same, train_with_stops, trained
from tests.support.verbs import run_ok

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
    return trained(staged, RunFolder(tmp_path_factory.mktemp("staged") / "run"))


def test_stages_switch_at_their_step_and_decide_the_length_of_the_run(whole: RunFolder) -> None:
    (started,) = [event for event in read_events(whole.events) if event["kind"] == "started"]
    assert small_run.steps(whole) == [1, 2, 3, 4, 5, 6]
    assert started["iterations"] == 6
    expected = [{"low": 1.0}] * 2 + [{"high": 2.0, "low": -1.0}] * 3 + [{"low": 0.5, "high": 0.25}]
    for line, weights in zip(rows(whole), expected, strict=True):
        for completion in line["completions"]:
            scores = completion["rewards"]
            assert scores.keys() == weights.keys()
            assert completion["reward"] == pytest.approx(sum(weights[name] * x for name, x in scores.items()))
    for step_metrics, weights in zip(metrics(whole), expected, strict=True):
        assert {name.split("/")[1] for name in step_metrics if name.startswith("rewards/")} == weights.keys()


def test_adaptive_weights_survive_a_resume(inputs: Path, tmp_path: Path) -> None:
    """`seldom` succeeds in 1 of 4 completions: after ten steps its weight is 1.2 times as large."""
    about = {"reward_weight_schedule": "adaptive", "iters": 12, "group_size": 4, "max_completion_length": 1}
    raw = settings(inputs, ["seldom", "low"], reward_weights=[0.5, 1.0], **about)
    run = small_run.resumed_and_whole(
        raw, tmp_path, 4, 11
    )  # with some success rates collected, and with a weight changed
    weights = [step["reward_weights/seldom"] for step in metrics(run)]
    assert weights == pytest.approx([0.5] * 10 + [0.6] * 2)


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
    taken = [int(line["prompt"].split()[2]) for line in rows(run)]
    return [taken[i : i + prompts] for i in range(0, len(taken), prompts)]


DYNAMIC: dict[str, Any] = {"dynamic_sampling": True, "batch_size": 3, "iters": 4, "beta": 0.02, "save_every": 1}
DYNAMIC |= {"keep_checkpoints": 9, "max_completion_length": 3}


@pytest.fixture(scope="module")
def dynamic(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """An uninterrupted run with dynamic sampling."""
    return trained(settings(inputs, ["even_prompts"], **DYNAMIC), RunFolder(tmp_path_factory.mktemp("dynamic") / "run"))


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


def test_a_resumed_run_with_prompts_by_pass_rate_equals_the_uninterrupted_one(inputs: Path, tmp_path: Path) -> None:
    raw = settings(inputs, ["even_prompts"], **DYNAMIC, prompt_selection="pass_rate", success_reward_threshold=0.5)
    run = small_run.resumed_and_whole(raw, tmp_path, 2)
    saved = [dict(mx.load(str(run.checkpoints / f"{step:06d}/pass_rates.safetensors"))) for step in (1, 4)]
    assert saved[0]["failures"].shape == (8,) and saved[1]["failures"].sum().item() > 0
    assert {"curriculum/pass_rate", "curriculum/expected_signal", "curriculum/signal"} <= metrics(run)[-1].keys()
    assert all(len(set(of_step)) == 3 for of_step in numbers(run, 3))


OTHERS: dict[str, Any] = {"learning_rate": 3e-3, "temperature": 1.3, "top_k": 5, "beta": 0.05, "epsilon": 0.3}
OTHERS |= {"group_size": 3, "batch_size": 2, "max_completion_length": 3}
"""What the second stage has of its own, beside its rows."""


@pytest.fixture(scope="module")
def own_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    rows = [{"question": f"Name {n} birds.", "answer": str(n)} for n in range(5)]
    (folder / "birds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def own_raw(own_inputs: Path) -> dict[str, Any]:
    about = {"learning_rate": 1e-3, "save_every": 1, "keep_checkpoints": 20, "num_iterations": 2, "iters": 5}
    return small_run.settings_for(own_inputs, **small_run.low_half(own_inputs), **about, max_completion_length=4)


@pytest.fixture(scope="module")
def birds(own_inputs: Path) -> dict[str, Any]:
    return {"data": str(own_inputs / "birds.jsonl"), "prompt_feature": "question"}


@pytest.fixture(scope="module")
def own_staged(own_raw: dict[str, Any], birds: dict[str, Any]) -> dict[str, Any]:
    return own_raw | {"stages": [{"iters": 2}, {"iters": 3, **OTHERS, **birds}, {"iters": 2, "learning_rate": 5e-4}]}


@pytest.fixture(scope="module")
def own_whole(own_staged: dict[str, Any], own_inputs: Path) -> RunFolder:
    """The run with three stages, without a break."""
    return trained(own_staged, RunFolder(own_inputs / "whole"))


def same_at(first: RunFolder, second: RunFolder, step: int) -> bool:
    mine, theirs = (find_checkpoint(run, str(step)).path for run in (first, second))
    files = ("adapters.safetensors", "optimizer.safetensors")
    return all(same(arrays(mine / name), arrays(theirs / name)) for name in files)


def test_a_stage_equals_a_run(
    own_raw: dict[str, Any], birds: dict[str, Any], own_whole: RunFolder, run: RunFolder
) -> None:
    """To the last bit, but for the one counter that says where the stage's rows began."""
    small_run.train_here(own_raw | {"iters": 2}, run)
    state = find_checkpoint(run, "2").path / "state.json"
    saved = json.loads(state.read_text())
    state.write_text(json.dumps(saved | {"stream_first": saved["cursor"]}))
    assert small_run.train_here(own_raw | OTHERS | birds, run).step == 5
    assert same_at(run, own_whole, 5)
    of_stage = [row for row in rows(own_whole) if 2 < row["step"] <= 5]
    assert [row for row in rows(run) if row["step"] > 2] == of_stage
    assert {row["prompt"].split()[0] for row in of_stage} == {"Name"}
    assert [len(row["completions"]) for row in rows(own_whole)] == [2] * 2 + [3] * 6 + [2] * 2


@pytest.mark.parametrize("stops", [(3, 5), *(pytest.param(stops, marks=pytest.mark.proof) for stops in ((2,), (4, 6)))])
def test_breaks_alter_nothing(
    own_staged: dict[str, Any], own_whole: RunFolder, run: RunFolder, stops: tuple[int, ...]
) -> None:
    train_with_stops(own_staged, run, *stops)
    assert_same_run(run, own_whole)
    assert [event["step"] for event in events(run, "change")] == [3, 6]


def test_the_event_log_has_stage_changes(own_whole: RunFolder, own_raw: dict[str, Any], birds: dict[str, Any]) -> None:
    second, third = events(own_whole, "change")
    assert (second["step"], third["step"]) == (3, 6)
    assert second["settings"]["learning_rate"] == [1e-3, 3e-3] and third["settings"]["learning_rate"] == [3e-3, 5e-4]
    data = [own_raw["data"], birds["data"]]
    assert second["settings"]["data"] == data and third["settings"]["data"] == data[::-1]
    assert set(second["settings"]) == {*OTHERS, *birds}
    rates = [event["metrics"]["learning_rate"] for event in events(own_whole, "step")]
    assert rates == pytest.approx([1e-3] * 2 + [3e-3] * 3 + [5e-4] * 2)


def test_scores_of_a_stage_with_other_rewards_are_a_series_of_their_own(
    own_raw: dict[str, Any], run: RunFolder
) -> None:
    """The first stage's rewards lie far above the second's; its best checkpoint is not the run's."""
    own = ({"reward_weights": [100.0]}, {"learning_rate": 1e-4}, {"reward_weights": [-1.0]})
    stages = [{"iters": 2} | settings for settings in own]
    small_run.train_here(own_raw | {"stages": stages, "load_best_at_end": True, "num_iterations": 1}, run)
    series = {saved.step: saved.state.score_series for saved in all_checkpoints(run)}
    assert series == {1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 6: 2}
    best = best_of(all_checkpoints(run))
    assert best is not None and best.step in (5, 6)


@pytest.fixture(scope="module")
def end_raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
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
def test_conditions_are_checked_by_the_nearest_metric(
    end_raw: dict[str, Any], conditions: list[str], says: str
) -> None:
    """The reward file may log metrics of its own, so an unknown name that is like no other passes."""
    sentences = [
        fault.sentence for fault in problems(end_raw | {"stop_when": conditions}) if fault.setting == "stop_when"
    ]
    assert (says in sentences[0]) if says else not sentences


def test_the_mean_of_five_steps_is_compared_and_a_gap_is_no_number() -> None:
    watch = MetricWatch()
    for _ in range(4):
        watch.take(step(kl=1.0))
    assert math.isnan(watch.value("kl")) and watch.met(["kl > 0.5"]) is None
    watch.take(step(kl=0.0))
    assert watch.value("kl") == 0.8
    end = watch.met(["kl > 0.9", "kl >= 0.8"])
    assert end is not None and end[1] == "kl >= 0.8 is met: 0.8 over the last 5 steps"
    watch.take(step(kl=None))
    assert watch.met(["kl >= 0", "kl <= 0"]) is None


def test_a_run_ends_where_a_metric_has_passed_its_line_and_says_so(end_raw: dict[str, Any], run: RunFolder) -> None:
    ending = small_run.train_here(end_raw | {"stop_when": ["loss > 9", "rewards/low_half/mean >= 0.01"]}, run)
    assert (ending.kind, ending.exit_code, ending.step) == ("finished", 0, 5)
    *_, last = read_events(run.events)
    assert last["reason"] == "stop_when" and last["sentence"] == ending.sentence
    assert ending.sentence.startswith("Finished after 5 of 12 steps. rewards/low_half/mean >= 0.01 is met: 0.")
    assert [saved.step for saved in all_checkpoints(run)] == [5]
    assert "More steps: --set stop_when=[]." in run_ok("resume", run.path).output
    run_ok("resume", run.path, "--set", "stop_when=[]", "--allow-code")
    assert small_run.steps(run)[-1] == 12


@pytest.mark.parametrize("every", [2, 0])
def test_early_stopping_keeps_the_best_checkpoint(end_raw: dict[str, Any], run: RunFolder, every: int) -> None:
    """A gain of 9 is out of reach, so two scores after the first end it: evaluations at 0, 2 and 4, or else the saves
    of 2, 4 and 6."""
    patient = {"early_stopping_patience": 2, "early_stopping_min_delta": 9.0, "save_every": 2, "keep_checkpoints": 1}
    ending = small_run.train_here(end_raw | patient | {"steps_per_eval": every}, run)
    assert (ending.kind, ending.exit_code, ending.step) == ("finished", 0, 4 if every else 6)
    what = "Held-out reward has not risen by more than 9 in 2 evaluations" if every else "in 2 checkpoints"
    assert what in ending.sentence
    best = best_of(all_checkpoints(run))
    assert best is not None and "--set early_stopping_patience=0." in run_ok("resume", run.path).output
    before = [e["metrics"]["reward"] for e in read_events(run.events) if e["kind"] == "eval" and e["step"] == 0]
    is_trained = not before or (best.state.score is not None and best.state.score > before[0])
    named = f"checkpoint {best.step}" if is_trained else "the model before training"
    assert ending.sentence.endswith(f"is that of {named}.")


def test_a_stop_changes_no_score_and_no_early_stopping(end_raw: dict[str, Any], run: RunFolder, tmp_path: Path) -> None:
    """Scores are means of the steps between two saves that are due; the checkpoints of the stops are none of them."""
    patient = {"early_stopping_patience": 2, "early_stopping_min_delta": 9.0, "save_every": 3, "steps_per_eval": 0}
    whole, raw = RunFolder(tmp_path / "whole"), end_raw | patient | {"keep_checkpoints": 9}
    assert small_run.train_here(raw, whole).step == 9
    train_with_stops(raw, run, 1, 5)
    of_saves = [
        [(x.step, x.state.score, x.state.best_score) for x in all_checkpoints(each) if x.step % 3 == 0]
        for each in (whole, run)
    ]
    assert of_saves[0] == of_saves[1] and len(of_saves[0]) == 3
    first, second = (list(read_events(each.events))[-1]["sentence"] for each in (whole, run))
    assert first == second and first.startswith("Finished after 9 of")


def test_early_stopping_names_the_score(end_raw: dict[str, Any]) -> None:
    config = parse(
        end_raw
        | {"train_mode": "distill", "teacher_model": "m", "reward_functions": []}
        | {"early_stopping_patience": 1}
    )
    end = early_stop(
        TrainingState(step=4, scores_without_gain=1, best_score=0.5), config, "eval/distillation/divergence"
    )
    assert end is not None and end[1].startswith("Held-out divergence has not fallen in 1 evaluation.")
