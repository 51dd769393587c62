"""Supervised runs, and the supervised warm-up of a GRPO run: losses in place of rewards, the warm-up's end, resumes."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from backend.config.config import parse
from backend.runs import checkpoint
from backend.runs.checkpoint import newest
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import all_checkpoints, best_of
from backend.sampling.chat import find_source, load_sides
from backend.trainer.run_context import keep_best, load_context
from backend.types import Completion, Group, Problem
from tests.support import small_run
from tests.support.random_models import tiny_model
from tests.support.small_run import arrays, check, metrics, notes, settings_for

WARM = {"iters": 5, "warmup_steps": 2, "warmup_learning_rate": 0.01, "learning_rate": 1e-3, "beta": 0.1}
WARM |= {"save_every": 1}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Rows with labels that are all low tokens, and a reward for low tokens."""
    folder = tmp_path_factory.mktemp("inputs")
    raw = small_run.settings_for(folder, **small_run.low_half(folder), **WARM, batch_size=2, keep_checkpoints=9)
    rows = [{"prompt": f"What is {n} plus {n}?", "answer": str(2 * n), "completion": str(2 * n)} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return raw | {"lr_schedule": "linear", "lr_warmup_steps": 0, "lr_final": 0.0, "lr_decay_fraction": 1.0}


@pytest.fixture(scope="module")
def whole(raw: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    held_out = {"validation_split": 0.25, "steps_per_eval": 1}
    return small_run.trained(raw | held_out, RunFolder(tmp_path_factory.mktemp("whole") / "run"))


def test_the_first_steps_are_supervised_and_grpo_starts_fresh_after_them(whole: RunFolder) -> None:
    steps = metrics(whole)
    assert [("warmup/loss" in each, "loss" in each, "reward" in each) for each in steps] == [
        *[(True, False, False)] * 2,
        *[(False, True, True)] * 3,
    ]
    assert [each["warmup/learning_rate"] for each in steps[:2]] == [0.01, 0.01]
    assert [each["learning_rate"] for each in steps[2:]] == pytest.approx([1e-3 * left / 3 for left in (3, 2, 1)])
    assert any("ended after step 2, its last" in note for note in notes(whole))
    assert {
        (saved.step, saved.state.updates, saved.state.warmup_end) for saved in checkpoint.all_checkpoints(whole)
    } == {*((1, 1, None), (2, 0, 2), (3, 1, 2), (4, 2, 2), (5, 3, 2))}


def test_evaluations_and_the_kl_penalty_of_a_warmed_up_run(whole: RunFolder) -> None:
    """Evaluations are GRPO's from the start; the KL is one against the base first, then against the warmed-up model."""
    evaluations = metrics(whole, "eval")
    assert all({"reward", "entropy", "kl"} <= each.keys() for each in evaluations)
    first, warm, end = (evaluations[step]["kl"] for step in (0, 1, 2))
    assert (first, end) == pytest.approx((0, 0), abs=1e-9) and warm > 1e-6
    reference = arrays(checkpoint.find_checkpoint(whole, "4").path / "reference.safetensors")
    assert small_run.same(reference, arrays(checkpoint.find_checkpoint(whole, "2").weights_file))


@pytest.mark.parametrize("train_type", ["lora", pytest.param("full", marks=pytest.mark.proof)])
def test_a_resume_in_either_phase_changes_nothing(raw: dict[str, Any], tmp_path: Path, train_type: str) -> None:
    raw = raw | {"train_type": train_type, "warmup_pass_rate": 0.99, "success_reward_threshold": 2.0}
    small_run.resumed_and_whole(raw, tmp_path, 1, 2, 3)
    saved = [checkpoint.newest(RunFolder(tmp_path / name)) for name in ("whole", "parted")]
    assert small_run.same(*(arrays(each.path / "reference.safetensors") for each in saved if each is not None))


@pytest.mark.parametrize(
    ("targets", "threshold", "end"), [("dataset", 0.0, 1), ("dataset", 2.0, 4), ("best_of_n", 2.0, 4)]
)
def test_the_goal_ends_the_warm_up(
    raw: dict[str, Any], run: RunFolder, targets: str, threshold: float, end: int
) -> None:
    goal = {"warmup_pass_rate": 0.5, "success_reward_threshold": threshold, "sft_targets": targets}
    small_run.train_here(raw | goal | {"warmup_steps": 4, "beta": 0.0}, run)
    steps = metrics(run)
    assert ["warmup/loss" in each for each in steps] == [step <= end for step in range(1, 6)]
    measured = [each.get("warmup/pass_rate") for each in steps if "warmup/loss" in each]
    every = targets == "best_of_n"
    assert measured == ([1.0] if end == 1 else [0.0] * 4 if every else [0.0, None, None, None])
    why = ": one of 2 completions solves 100% of the prompts" if end == 1 else ", its last"
    assert any(f"ended after step {end}{why}" in note for note in notes(run))
    sampled = {row["step"] for row in small_run.rows(run)}
    assert sampled == ({1, 2, 3, 4, 5} if every else set(range(end + 1, 6)))


def test_early_stopping_waits_for_the_end_of_the_warm_up(raw: dict[str, Any], run: RunFolder) -> None:
    patience = {"early_stopping_patience": 1, "early_stopping_min_delta": 9.0, "validation_split": 0.25}
    ending = small_run.train_here(
        raw | patience | {"warmup_steps": 3, "steps_per_eval": 1, "stop_when": ["kl > 9"]}, run
    )
    assert (ending.step, ending.reason) == (4, "early_stopping")
    assert not any("never met" in note for note in notes(run))


@pytest.mark.parametrize(
    ("rewards", "best"),
    [([0.0, 1.0, 0.5], [1]), ([1.0, 1.0, 0.0], [0]), ([0.5, 0.5], []), ([None, 2.0, 1.0], [1]), ([None, None], [])],
)
def test_the_best_of_a_group_is_imitated_where_it_beats_the_mean(rewards: list[float | None], best: list[int]) -> None:
    completions = [Completion([1], [0.0], "", "eos", reward=reward, advantage=0.3) for reward in rewards]
    keep_best([Group(Problem(0, "", [], [], ""), completions)])
    assert [i for i, completion in enumerate(completions) if completion.advantage] == best
    assert {completion.advantage for completion in completions} <= {0.0, 1.0}


@pytest.mark.parametrize("more", [{"train_mode": "sft"}, {"warmup_steps": 2}], ids=str)
def test_labels_that_are_cut_are_imitated_though_cut_completions_are_not(
    raw: dict[str, Any], more: dict[str, Any], run: RunFolder, tmp_path: Path
) -> None:
    rows = [{"prompt": f"What is {n}?", "completion": "one two " * 90} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    short = {"data": str(tmp_path / "rows.jsonl"), "mask_truncated_completions": True, "max_seq_length": 60}
    steps = metrics(small_run.trained(raw | short | more, run))[:2]
    assert [each["completions/clipped_ratio"] for each in steps] == [1.0, 1.0]
    assert all(each["loss" if "train_mode" in more else "warmup/loss"] > 0 for each in steps)


def test_sft_on_the_best_of_its_own_needs_no_labels(raw: dict[str, Any], run: RunFolder, tmp_path: Path) -> None:
    small_run.write_rows(tmp_path / "unlabelled.jsonl")
    own = {"train_mode": "sft", "sft_targets": "best_of_n", "data": str(tmp_path / "unlabelled.jsonl"), "iters": 12}
    held_out = {"validation_split": 0.25, "steps_per_eval": 12, "group_size": 4}
    assert small_run.train_here(raw | own | held_out | {"learning_rate": 0.02, "beta": 0.0}, run).kind == "finished"
    first, *_, last = metrics(run)
    assert {"loss", "reward", "warmup/pass_rate"} <= first.keys() and last["reward"] > first["reward"]
    before, after = (each["reward"] for each in metrics(run, "eval"))
    assert after > before


NOTHING_TO_IMITATE = "There is no completion and no message to imitate in rows 2, 3, 4, 5, 6 and 2 more of "


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"warmup_steps": 5}, "A warm-up of 5 steps leaves none of the 5 Iterations"),
        ({"warmup_steps": 0, "data": "unlabelled"}, ""),
        ({"sft_targets": "best_of_n", "data": "unlabelled"}, ""),
        ({"data": "unlabelled"}, "There is no column completion, and no messages, to learn answers from"),
        ({"data": "gaps"}, NOTHING_TO_IMITATE),
        ({"train_mode": "sft", "data": "gaps"}, NOTHING_TO_IMITATE),
        ({"train_mode": "sft", "sft_targets": "best_of_n", "reward_functions": [], "environment": ""}, ""),
    ],
)
def test_check_tells_before_the_run(raw: dict[str, Any], tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    small_run.write_rows(tmp_path / "unlabelled.jsonl")
    rows = [{"prompt": f"{n}", "answer": "a", "completion": None if n else "0"} for n in range(8)]
    (tmp_path / "gaps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if name := changes.get("data"):
        changes = changes | {"data": str(tmp_path / f"{name}.jsonl")}
    found = [problem.sentence for problem in check(raw | changes)]
    assert len(found) == bool(said) and all(sentence.startswith(said) for sentence in found), found


def test_the_learner_of_the_warm_up_takes_its_memory_with_it(raw: dict[str, Any]) -> None:
    """The learner that waits has no state in memory, and the one that is done is gone."""
    config = parse(raw | {"rank": 64, "beta": 0.0})
    context = load_context(config, lambda sentence: None)
    assert context.waiting_learner is not None
    context.learn([labelled_group()], config, lambda: None)
    mx.synchronize()
    during = mx.get_active_memory()
    state = sum(array.nbytes for array in context.learner.state_arrays().values())
    context.end_warmup(1, config)
    after = mx.get_active_memory()
    context.close()
    assert state > 100_000 and during - after > 0.9 * state


def test_no_quantised_copy_is_made_where_labels_are_learned(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model", hidden=64, layers=1)
    context = load_context(parse(labelled(tmp_path, train_mode="sft", rollout_quantization="8")), lambda sentence: None)
    assert context.exact_rollout is None
    context.close()


def labelled_group() -> Group:
    return Group(Problem(0, "", [], [1, 2], ""), [Completion([3, 4], [0.0] * 2, "", "eos")])


def labelled(folder: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run on eight labelled rows, evaluated on four chats."""
    data = folder / "labelled"
    data.mkdir(exist_ok=True)
    rows = [{"prompt": f"What is {n} plus {n}?", "completion": str(2 * n), "answer": str(2 * n)} for n in range(8)]
    chats = [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]}
        for row in rows[:4]
    ]
    for name, split in (("train", rows), ("valid", chats)):
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in split))
    own = {"train_mode": "sft", "data": str(data), "reward_functions": [], "reward_weights": [], "steps_per_eval": 2}
    short = {"iters": 6, "batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 3e-3, "save_every": 2}
    return settings_for(folder) | own | short | changes


def test_a_resumed_run_equals_the_whole_one(inputs: Path, tmp_path: Path) -> None:
    whole = small_run.resumed_and_whole(labelled(inputs, dropout=0.1), tmp_path, 1, 4)
    steps, evaluations = small_run.events(whole, "step"), small_run.events(whole, "eval")
    assert whole.completions.read_text() == ""
    assert not any(name.startswith("reward") for event in (*steps, *evaluations) for name in event["metrics"])
    losses = [event["metrics"]["loss"] for event in evaluations]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    assert steps[-1]["metrics"]["epoch"] == 3 and steps[0]["metrics"]["entropy"] > 0


def test_the_best_checkpoint_has_the_lowest_loss(inputs: Path, sft_run: RunFolder) -> None:
    """At a rate at which the loss rises after the first steps, the run ends early."""
    raw = labelled(inputs, learning_rate=1.0, early_stopping_patience=2, load_best_at_end=True, iters=30)
    ending = small_run.train_here(raw, sft_run)
    assert ending.reason == "early_stopping" and "Held-out loss has not fallen" in ending.sentence
    losses = {event["step"]: event["metrics"]["loss"] for event in small_run.events(sft_run, "eval")}
    last, best = newest(sft_run), best_of(all_checkpoints(sft_run))
    assert last is not None and last.state.best_score == min(losses.values())
    assert best is None or best.state.score_metric == "eval/loss"


def test_reward_functions_score_the_evaluation(inputs: Path, sft_run: RunFolder) -> None:
    raw = labelled(inputs, reward_functions=["r1_int"], iters=2, num_generations_eval=2)
    assert small_run.train_here(raw, sft_run).kind == "finished"
    for event in small_run.events(sft_run, "eval"):
        assert event["metrics"]["loss"] > 0 and event["metrics"]["reward"] is not None
    assert not any(
        name.startswith("reward") for event in small_run.events(sft_run, "step") for name in event["metrics"]
    )
    assert sft_run.completions.read_text() == ""
    sides = load_sides(find_source("run", runs_dir=sft_run.path.parent))
    assert sorted(sides) == ["base", "tuned"]


@pytest.fixture
def sft_run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")
