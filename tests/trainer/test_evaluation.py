"""Evaluations: on disk and in a sentence, intervals over prompts, paired differences and pass@k; scoring beside
sampling; a run beside its base."""

import re
import threading
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend.config.config import load
from backend.runs.checkpoint import arrays_of
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.sampling.sampler import Sampling
from backend.trainer.evaluation import comparison
from backend.trainer.evaluation.comparison import (
    Column,
    EvaluatedModel,
    EvaluationChoices,
    estimates,
    evaluate_model,
    find_evaluated,
    pass_at_k,
)
from backend.trainer.evaluation.evaluate import FORWARD_ROWS, evaluation_metrics, sample_of, scored_groups
from backend.trainer.evaluation.evaluation_rows import (
    FULL_SCORES,
    DecodingName,
    EvaluatedRow,
    Evaluation,
    MeanWithInterval,
    PassRule,
    evaluations_of,
    free_name,
    read_evaluation,
    read_pass_rule,
    read_rows,
    write_evaluation,
)
from backend.trainer.scoring import MLX
from backend.types import Completion, Group, Problem
from backend.utils.errors import UserError
from tests.support import small_run
from tests.support.cases import cases
from tests.support.made_up_evaluations import evaluated_row, evaluation

Draw = Callable[[np.random.Generator, int], Sequence[np.ndarray]]  # rewards before and after, by prompt


def passes(rng: np.random.Generator, prompts: int) -> Sequence[np.ndarray]:
    """Each prompt passes or not, 0.3 before and 0.5 after; 60 % of the prompts are as hard for both sides."""
    hardness, other = rng.random(prompts), rng.random(prompts)
    return (hardness < 0.3) * 1.0, (np.where(rng.random(prompts) < 0.6, hardness, other) < 0.5) * 1.0


def mostly_zero(rng: np.random.Generator, prompts: int) -> Sequence[np.ndarray]:
    """Rewards that are 0 but for a few prompts, and log-normal there."""
    return [(rng.random(prompts) < share) * rng.lognormal(0, 0.8, prompts) for share in (0.1, 0.15)]


def few_changes(rng: np.random.Generator, prompts: int) -> Sequence[np.ndarray]:
    """Half of the prompts pass; a tenth of them is drawn anew after training, passing with chance 0.8."""
    base, anew = (rng.random(prompts) < 0.5) * 1.0, (rng.random(prompts) < 0.8) * 1.0
    return base, np.where(rng.random(prompts) < 0.1, anew, base)


ENTRIES = ["r1_int", "accuracy_reward(name=right)", "mine.py::brevity"]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    made, rows = evaluation(), [evaluated_row(0, 0.0, 1.0), evaluated_row(3, 1.0, 1.0)]
    path = write_evaluation(run.evaluations, made, rows)
    assert read_evaluation(path) == made and list(read_rows(path)) == rows
    assert evaluations_of(run) == [path]
    assert sorted(file.name for file in run.evaluations.iterdir()) == ["test-step-32.json", "test-step-32.jsonl"]
    names = [free_name(run.evaluations, name) for name in ("test-step-32", "a/b c")]
    assert names == ["test-step-32-2", "a-b-c"]


def test_an_evaluation_that_cannot_be_finished_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, replace = RunFolder(tmp_path), Path.replace

    def fail_on_json(self: Path, target: Path) -> Path:
        if target.suffix == ".json":
            raise OSError(28, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail_on_json)
    with pytest.raises(UserError, match="the disk is full"):
        write_evaluation(run.evaluations, evaluation(), [evaluated_row(0, 0.0, 1.0)])
    assert evaluations_of(run) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"name": "x", "decodings": []}'])
def test_a_file_that_is_no_evaluation_is_told_in_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=r"x\.json is no evaluation"):
        read_evaluation(tmp_path / "x.json")


@cases(
    ("text", "name", "at_least"),
    [
        ("right", "right", 1.0),
        ("right>=0.5", "right", 0.5),
        ("r1_int >= .5", "r1_int_reward_func", 0.5),
        ("reward>=1.5", "reward", 1.5),
        ("brevity>=3", "brevity", 3.0),
    ],
)
def test_the_user_says_what_passes(text: str, name: str, at_least: float) -> None:
    assert read_pass_rule(text, ENTRIES) == PassRule(reward=name, at_least=at_least, chosen_by="user")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("brevity", "From what score on"),
        ("right>=x", "x is not a number"),
        ("rihgt>=1", "Did you mean right"),
        (">=1", "No reward"),
    ],
)
def test_a_rule_that_cannot_be_read_is_told_in_a_sentence(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_pass_rule(text, ENTRIES)


def test_full_scores_are_what_the_functions_give_for_a_right_answer() -> None:
    from backend.rewards.registry import REWARD_REGISTRY

    text = "<think>2 + 2</think><answer>4</answer>"
    for name, full in FULL_SCORES.items():
        answer, said = ("B", text.replace("4", "B")) if name == "multiple_choice" else ("4", text)
        scores = REWARD_REGISTRY[name](prompts=["?"], completions=[said], answer=[answer], types=[None])
        assert list(scores) == [full], name


def sentence(low: float | None, value: float, high: float | None) -> str:
    made = evaluation()
    first = made.headline
    assert first.difference is not None
    change = first.difference.model_copy(update={"reward": MeanWithInterval(value=value, low=low, high=high)})
    return Evaluation.sentence(made, first.model_copy(update={"difference": change}))


def test_the_sentence_says_how_sure_a_difference_is() -> None:
    start = "The mean reward on 2 rows of the test split went from 0.5 to 1"
    assert sentence(0.1, 0.5, 0.9) == f"{start}: better by 0.5 (95 % interval 0.1 to 0.9)."
    assert sentence(-0.9, -0.5, -0.1) == f"{start}: worse by 0.5 (95 % interval 0.1 to 0.9)."
    assert "which may be chance" in sentence(-0.1, 0.5, 0.9) and "−0.1 to 0.9" in sentence(-0.1, 0.5, 0.9)
    assert sentence(None, 0.5, None) == f"{start}."
    made = evaluation()
    nothing = {"reward": MeanWithInterval(value=None, low=None, high=None)}
    unscored = {
        name: side.model_copy(update={"figures": side.figures.model_copy(update=nothing)})
        for name, side in made.headline.sides.items()
    }
    said = made.sentence(made.headline.model_copy(update={"sides": unscored}))
    assert said == "No completion of 2 rows of the test split has a reward: every function returned None."


def one(values: list[float | None], low: float, high: float) -> MeanWithInterval:
    return estimates([Column(np.array(values, np.float64), low, high)])[0]


@pytest.mark.parametrize("completions", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_k_subsets_with_a_pass(completions: int) -> None:
    for passed in range(completions + 1):
        passes = [index < passed for index in range(completions)]
        for k in range(1, completions + 1):
            subsets = [any(chosen) for chosen in combinations(passes, k)]
            assert pass_at_k(completions, passed, k) == pytest.approx(np.mean(subsets), abs=1e-12)


def test_the_mean_is_that_of_the_prompts_and_lies_within_its_interval() -> None:
    values: list[float | None] = [0.0, 1.0, 1.0, 0.0, 1.0] * 20
    mean = one(values, 0, 1)
    assert mean.value == pytest.approx(0.6)
    assert mean.low is not None and mean.high is not None
    # The normal interval, 0.6 ± 1.96 √(0.24 / 100), is about right for a hundred prompts.
    assert mean.low == pytest.approx(0.504, abs=0.02) and mean.high == pytest.approx(0.696, abs=0.02)
    ones = one([1.0] * 30, 0, 1)
    assert ones.high == ones.value == 1.0 and ones.low is not None and 0.85 < ones.low < 1


def test_a_bound_of_0_is_exact() -> None:
    """Rounding made it ±1e-17, which was printed, and which excludes 0 on one side."""
    before = np.array([0.0, 0.0, 0.0, 0.7])
    assert estimates([Column.difference(Column(before + 0.1, 0, 4), Column(before, 0, 4))], 400)[0].low == 0


def test_a_difference_is_paired() -> None:
    """Prompts differ far more than the sides do: only a paired difference can tell."""
    rng = np.random.default_rng(3)
    base = rng.normal(0, 10, 200)
    tuned = base + rng.normal(0.5, 0.2, 200)
    low, high = float(min(base.min(), tuned.min())), float(max(base.max(), tuned.max()))
    before, after = Column(base, low, high), Column(tuned, low, high)
    change, mean_before, mean_after = estimates([Column.difference(after, before), before, after])
    assert change.value == pytest.approx(0.5, abs=0.05) and change.excludes_zero
    assert mean_before.high is not None and mean_after.low is not None and mean_before.high > mean_after.low


@pytest.mark.parametrize(
    ("draw", "difference"), [(passes, 0.2), (few_changes, 0.03), (mostly_zero, 0.05 * np.exp(0.8**2 / 2))]
)
def test_the_interval_covers_the_true_difference(draw: Draw, difference: float) -> None:
    """A quick look, at the smallest size: the plain percentile interval covers 66 of 100 of the second case."""
    rng, inside = np.random.default_rng(5), list[bool]()
    for _ in range(200):
        base, tuned = draw(rng, 30)
        low, high = float(min(base.min(), tuned.min())), float(max(base.max(), tuned.max()))
        change = Column.difference(Column(tuned, low, high), Column(base, low, high))
        mean = estimates([change], 400, rng)[0]
        if mean.low is not None and mean.high is not None:
            inside.append(mean.low <= difference <= mean.high)
    assert np.mean(inside) >= 0.93


PROBLEMS = [Problem(n, str(n), [], [n], str(n)) for n in range(7)]
SAMPLING = Sampling(1.0, 1.0, 0, 0.0)


class Sampled:
    """A fake Rollout: groups without a model, and a log of calls in order."""

    tools = None

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def sample(self, problems: Sequence[Problem], group_size: int, *_: Any) -> list[Group]:
        *_, poll, _ = _
        self.log.append(f"sample {problems[0].index}")
        poll(1)
        made = [[Completion([1], [0.0], str(each.index), "eos") for _ in range(group_size)] for each in problems]
        return list(map(Group, problems, made))


def held_out(score: Any, log: list[str], **more: Any) -> dict[str, float]:
    groups = scored_groups(Sampled(log), PROBLEMS, score, sampling=SAMPLING, group_size=2, batch_size=2, **more)
    return evaluation_metrics(groups, ["r"], [1.0])


def scorer(log: list[str], *, waits: bool = False) -> Any:
    """Scores a completion by its problem's number; `waits`: until the next batch is sampled."""

    def score(groups: list[Group], poll: Any) -> None:
        number, until = groups[0].problem.index, time.monotonic() + 10
        log.append(f"score {number}")
        while waits and number < 6 and f"sample {number + 2}" not in log and time.monotonic() < until:
            time.sleep(0.001)
        for completion in (completion for group in groups for completion in group.completions):
            completion.scores = {"r": float(completion.text)}
            completion.reward = float(completion.text)
        log.append(f"scored {number}")

    return score


def test_a_stop_waits_for_no_reward_function() -> None:
    """The next batch is sampled while the functions judge this one, and sampling is where an evaluation is stopped."""
    judging = threading.Event()

    class Stop(Exception): ...

    class Stopping(Sampled):
        def sample(self, problems: Sequence[Problem], *more: Any) -> list[Group]:
            if problems[0].index and judging.wait(5.0):
                raise Stop
            return super().sample(problems, *more)

    def score(groups: list[Group], poll: Any) -> None:
        judging.set()
        until = time.monotonic() + 10.0
        while time.monotonic() < until:
            poll()
            time.sleep(0.005)

    began = time.monotonic()
    with pytest.raises(Stop):
        scored_groups(Stopping([]), PROBLEMS, score, sampling=SAMPLING, group_size=2, batch_size=2)
    assert time.monotonic() - began < 5.0


def test_scoring_overlaps_with_sampling_the_next_batch_and_changes_no_number() -> None:
    overlapped, sequential = [], []
    fast = held_out(scorer(overlapped, waits=True), overlapped)
    assert fast == held_out(scorer(sequential), sequential, overlap_scoring=False) and fast["reward"] == 3
    assert sequential == [f"{call} {n}" for n in (0, 2, 4, 6) for call in ("sample", "score", "scored")]
    calls = [line for line in overlapped if line.startswith("sco")]
    assert calls == [line for line in sequential if line.startswith("sco")], "one call after the other, in order"
    at = overlapped.index
    assert at("sample 2") < at("scored 0") and at("sample 6") < at("scored 4")


def test_a_reward_file_that_imports_mlx_is_recognised() -> None:
    for line in ("import mlx.core as mx", "    from mlx_lm import load"):
        assert re.search(MLX, f"import os\n{line}\n")
    for line in ("from mlx_lm_lora.trainer import register_reward_function", "import numpy  # not mlx"):
        assert not re.search(MLX, f"import os\n{line}\n")


def test_an_evaluation_reports_what_a_step_does_but_for_learning(tmp_path: Path) -> None:
    evaluated = {"iters": 2, "steps_per_eval": 1, "beta": 0.1, "data": str(tmp_path / "data"), "val_batches": 2}
    raw = small_run.settings_for(tmp_path, **evaluated | small_run.low_half(tmp_path))
    for split in ("train", "valid"):
        small_run.write_rows(tmp_path / "data" / f"{split}.jsonl")
    run = RunFolder(tmp_path / "run")
    assert small_run.train_here(raw, run).kind == "finished"
    events = list(read_events(run.events))
    step = next(event["metrics"] for event in events if event["kind"] == "step")
    (first, *_) = evaluations = [event["metrics"] for event in events if event["kind"] == "eval"]
    of_learning = {"loss", "learning_rate", "grad_norm", "grad_clipped", "num_tokens", "epoch", "peak_memory_gb"}
    prefixes = ("clip_ratio", "time/", "sampling/", "process/", "machine/", "peak_memory_gb/")
    expected = {name for name in step if not name.startswith(prefixes) and not name.endswith("per_second")}
    assert first.keys() == (expected - of_learning) | {"time/eval", "kl_stderr", "entropy_stderr"}
    assert all(value is not None for metrics in evaluations for value in metrics.values())
    assert evaluations[-1]["kl"] > 0 and first["entropy"] > 1


@cases(("count", "read"), [(1, 1), (4, 4), (5, 3), (16, 4), (32, 8), (33, 7), (128, 32), (132, 27), (200, 29)])
def test_the_model_reads_a_bounded_sample_of_an_evaluation(count: int, read: int) -> None:
    """One completion of a group, an eighth of all within limits, and groups from the beginning to the end."""
    groups = [Group(PROBLEMS[0], [Completion([n], [0.0], str(n), "eos") for n in (i, -1)]) for i in range(count)]
    sample = [int(group.completions[0].text) for group in sample_of(groups)]
    assert len(sample) == read <= FORWARD_ROWS and all(len(group.completions) == 1 for group in sample_of(groups))
    assert sample == sorted(set(sample)) and sample[-1] >= count - 7 and -1 not in sample


COUNTED = '''
from backend.rewards import register_reward_function
@register_reward_function("low_half")
def low_half(prompts, completions, answer, types=None, completion_ids=None):
    """Share of the low half of the vocabulary; None for the prompt of zero."""
    with open("{calls}", "a") as calls:
        calls.write(f"{{len(completions)}}\\n")
    return [None if "is 0" in p else sum(t < 160 for t in ids) / len(ids) for p, ids in zip(prompts, completion_ids)]
'''


def raw_settings(folder: Path, **changes: Any) -> dict[str, Any]:
    (folder / "counted.py").write_text(COUNTED.format(calls=folder / "calls.txt"))
    for split, rows in (("train", 8), ("test", 6)):
        small_run.write_rows(folder / "data" / f"{split}.jsonl", rows)
    settings = {"data": str(folder / "data"), "reward_functions": ["low_half"], "reward_weights": [2.0], "iters": 2}
    settings |= {"learning_rate": 0.05, "reward_functions_file": str(folder / "counted.py"), "save_every": 1}
    return small_run.settings_for(folder, **settings | changes)


@pytest.fixture(scope="module", params=["lora", pytest.param("dora", marks=pytest.mark.proof), "full"])
def run(request: Any, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp(request.param)
    run = RunFolder(folder / "run")
    raw = raw_settings(folder, train_type=request.param, beta=0.1)  # a reference, which no evaluation loads
    assert small_run.train_here(raw, run).kind == "finished"
    return run


def evaluate(evaluated: EvaluatedModel, **choices: Any) -> tuple[Evaluation, list[EvaluatedRow]]:
    return evaluate_model(evaluated, EvaluationChoices(**{"completions": 3} | choices), "x")


def texts(rows: list[EvaluatedRow], decoding: DecodingName, side: str) -> list[str]:
    return [completion["text"] for row in rows for completion in (row[decoding] or {})[side]]  # pyright: ignore


def test_base_and_tuned_answer_the_test_split(run: RunFolder) -> None:
    calls = run.path.parent / "calls.txt"
    calls.unlink(missing_ok=True)
    evaluation, rows = evaluate(find_evaluated(str(run.path), None))
    assert [row["index"] for row in rows] == list(range(6)) and evaluation.data.rows == 6
    assert evaluation.subject.step == 2 and evaluation.subject.config_sha256
    greedy, drawn = evaluation.decodings
    assert (greedy.name, greedy.completions, drawn.name, drawn.completions) == ("greedy", 1, "sampled", 3)
    assert greedy.better + greedy.worse + greedy.unchanged == 5, "the prompt of zero has no score"
    assert texts(rows, "greedy", "base") != texts(rows, "greedy", "tuned"), "the learning rate is large enough"
    # Both sides, one greedy and three sampled completions of six prompts, all at once each time.
    assert sorted(map(int, calls.read_text().split())) == [6, 6, 18, 18]
    for decoding in evaluation.decodings:
        assert decoding.difference is not None
        for side in ("base", "tuned"):
            scores = [
                [item["rewards"]["low_half"] for item in (row[decoding.name] or {})[side]]  # pyright: ignore
                for row in rows
                if row["prompt"] != "What is 0 plus 0?"
            ]
            by_hand = sum(sum(of) / len(of) for of in scores) / 5
            figures = decoding.sides[side].figures
            assert figures.rewards["low_half"].value == pytest.approx(by_hand)
            assert figures.reward.value == pytest.approx(2 * by_hand), "the weight is 2"
        after, before = (decoding.sides[side].figures.reward.value for side in ("tuned", "base"))
        assert decoding.difference.reward.value == pytest.approx((after or 0) - (before or 0))
    assert not greedy.sides["base"].figures.pass_at and "--pass" in evaluation.notes[0]


def test_the_base_is_the_model_itself(run: RunFolder) -> None:
    """The run's base side writes what the model's folder writes by itself, token for token."""
    evaluated = find_evaluated(str(run.path), None)
    _, of_run = evaluate(evaluated, base_only=True, decodings=("sampled",), limit=4)
    model = find_evaluated(evaluated.config.model, load(run.config))
    evaluation, of_model = evaluate(model, decodings=("sampled",), limit=4)
    assert texts(of_run, "sampled", "base") == texts(of_model, "sampled", "model")
    assert list(evaluation.headline.sides) == ["model"] and evaluation.headline.difference is None
    assert evaluation.subject.run is None and evaluation.subject.step is None


def test_the_tuned_side_is_the_trained_weights(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated = find_evaluated(str(run.path), None)
    policies: list[Any] = []
    load_policy = comparison.load_policy
    monkeypatch.setattr(comparison, "load_policy", lambda *more: policies.append(load_policy(*more)) or policies[-1])
    evaluate(evaluated, decodings=("greedy",), limit=2)
    assert evaluated.checkpoint is not None and len(policies) == 1, "one model is loaded for both sides"
    saved, now = arrays_of(evaluated.checkpoint, "weights"), policies[0].trainable()
    assert saved.keys() == now.keys() and all((saved[name] == now[name]).all().item() for name in saved)
