"""Whatever is not finite in a step ends the run before it is applied or saved, in a sentence with a setting, and leaves the batch to read."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from backend.config.config import Config, parse
from backend.runs.checkpoints import checkpoint
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.trainer.not_finite import ends_run, likely_cause, weights_error, write_inspection
from backend.training.learner import Learner
from backend.training.not_finite import (
    GradientNorm,
    NotFiniteError,
    check_sampled,
    check_scores,
    gradient_norms,
    not_finite_arrays,
)
from backend.types import Completion, Group, Problem
from backend.utils.errors import UserError
from tests.support import small_run


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    small_run.settings_for(folder)
    return folder


def raw(inputs: Path, **changes: Any) -> dict[str, Any]:
    return small_run.settings_for(inputs, **small_run.low_half(inputs) | {"iters": 9, "learning_rate": 1e-5} | changes)


def inspected(run: RunFolder, step: int) -> tuple[str, list[dict[str, Any]]]:
    """summary.txt, and the lines of completions.jsonl."""
    folder = run.inspection / f"step-{step:06d}"
    lines = (folder / "completions.jsonl").read_text().splitlines()
    return (folder / "summary.txt").read_text(), [json.loads(line) for line in lines]


def saved_arrays_are_finite(run: RunFolder) -> bool:
    files = [*run.checkpoints.glob("*/*.safetensors"), *run.adapters.glob("*.safetensors")]
    arrays = [array for file in files for array in mx.load(str(file)).values()]  # pyright: ignore
    return bool(files) and all(np.isfinite(np.array(x.astype(mx.float32))).all() for x in arrays)


def test_a_gradient_that_is_not_finite_ends_the_run_at_the_step_before(
    inputs: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = Learner._apply  # pyright: ignore[reportPrivateUsage]

    def poisoned(learner: Learner, gradient: Any, loss: mx.array) -> dict[str, float]:
        if learner.updates == 2:
            gradient = _with_infinity(gradient)
        return apply(learner, gradient, loss)

    monkeypatch.setattr(Learner, "_apply", poisoned)
    ending = small_run.train_here(raw(inputs, beta=0.01), run)
    assert (ending.kind, ending.exit_code, ending.step) == ("failed", 2, 2)
    assert ending.sentence == (
        "learning_rate: Step 3 was not applied, for its gradient is not finite (a norm of inf). The likely cause is the learning rate of "
        "1e-05; go on with learning_rate=1e-06, from an earlier checkpoint if it comes again. What it computed is in "
        "inspection/step-000003."
    )
    assert small_run.steps(run) == [1, 2] and saved_arrays_are_finite(run)
    saved = checkpoint.newest(run)
    assert saved is not None and saved.state.step == 2
    summary, rows = inspected(run, 3)
    assert "Optimizer update 3." in summary and "not finite in 1 of them" in summary
    assert len(rows) == 2 and rows[0]["prompt"].startswith("What is") and rows[0]["advantage"] == -rows[1]["advantage"]
    for row in rows:
        counts = {len(values) for values in row["tokens"].values()}
        assert counts == {len(row["completion_tokens"])}
        assert row["tokens"].keys() == {"sampled_logp", "learned_logp", "old_logp", "reference_logp", "weight"}
        assert row["tokens"]["learned_logp"] == pytest.approx(row["tokens"]["sampled_logp"], abs=1e-4)
    table = (run.inspection / "step-000003" / "gradients.tsv").read_text().splitlines()
    assert len(table) > 2 and table[1].split("\t")[1:2] + table[1].split("\t")[3:4] == ["inf", "1"]
    # With the cause gone it goes on from there.
    monkeypatch.undo()
    assert small_run.train_here(raw(inputs, beta=0.01, iters=4), run).kind == "finished"
    assert small_run.steps(run) == [1, 2, 3, 4]


def _with_infinity(tree: Any) -> Any:
    """The same gradients, with one infinity in the first array."""
    leaves: Any = tree_flatten(tree)
    (name, first), *others = leaves
    flat = mx.concatenate([mx.array([math.inf], first.dtype), first.reshape(-1)[1:]])
    return tree_unflatten([(name, flat.reshape(first.shape)), *others])


def test_a_loss_that_is_not_finite_is_told_as_the_loss(
    inputs: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = Learner._apply  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(
        Learner, "_apply", lambda learner, gradient, loss: apply(learner, gradient, loss * mx.array(math.nan))
    )
    ending = small_run.train_here(raw(inputs), run)
    assert ending.exit_code == 2 and ending.sentence.startswith(
        "model: Step 1 was not applied, for its loss is not finite (nan)."
    )
    assert "Nothing is trained yet" in ending.sentence and ending.step == 0


def test_weights_that_are_not_finite_are_never_saved(
    inputs: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update can overflow although its gradient has not: the step is in the event log, its weights are nowhere."""
    apply = Learner._apply  # pyright: ignore[reportPrivateUsage]

    def overflowing(learner: Learner, gradient: Any, loss: mx.array) -> dict[str, float]:
        metrics = apply(learner, gradient, loss)
        if learner.updates == 2:
            learner.policy.set_parameters(_with_infinity(learner.policy.parameters()))
        return metrics

    monkeypatch.setattr(Learner, "_apply", overflowing)
    ending = small_run.train_here(raw(inputs, save_every=1, iters=3), run)
    assert (ending.kind, ending.exit_code) == ("failed", 2)
    assert ending.sentence.startswith("learning_rate: The weights of step 2 are not finite (")
    assert ending.sentence.count("are not finite") == 1  # the last attempt to save says the same
    assert [saved.state.step for saved in checkpoint.all_checkpoints(run)] == [1] and saved_arrays_are_finite(run)
    assert [event["kind"] for event in read_events(run.events)][-1] == "failed"


def test_a_damaged_model_is_told_before_anything_is_learned(inputs: Path, tmp_path: Path, run: RunFolder) -> None:
    shutil.copytree(inputs / "model", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights = mx.load(str(file))
    assert isinstance(weights, dict)
    name = next(name for name in weights if "norm" in name)
    mx.save_safetensors(str(file), weights | {name: weights[name] * math.nan}, metadata={"format": "mlx"})
    ending = small_run.train_here(raw(inputs, model=str(tmp_path / "model")), run)
    assert ending.exit_code == 2 and ending.sentence.startswith("model: ")
    assert "Step 1 was not applied, for its log-probability is not finite (nan at token 1" in ending.sentence
    _, rows = inspected(run, 1)
    assert rows[0]["tokens"]["sampled_logp"][0] == "nan"


def test_a_reward_too_large_to_compute_with_is_told(inputs: Path, tmp_path: Path, run: RunFolder) -> None:
    """A single score of that size is refused where it is read; weights can make it of smaller ones."""
    (tmp_path / "large.py").write_text(small_run.LOW_HALF.replace("/ len(ids)", "* 1e28"))
    large = {"reward_functions_file": str(tmp_path / "large.py"), "reward_weights": [1e6]}
    ending = small_run.train_here(raw(inputs, **large), run)
    assert ending.exit_code == 2
    assert ending.sentence.startswith(
        "reward_functions: Step 1 was not applied, for its reward is too large (their weighted sum is "
    )
    assert len(inspected(run, 1)[1]) == 2


def of(logps: list[float], mask: list[int] | None = None, **fields: Any) -> list[Group]:
    completion = Completion(tokens=[1] * len(logps), logps=logps, text="", stop="eos", mask=mask or [], **fields)
    return [Group(Problem(0, "", [], [1], ""), [completion])]


def test_only_tokens_that_are_trained_on_count() -> None:
    check_sampled(of([-1.0, math.nan], [1, 0]))
    for odd in (math.nan, -math.inf, math.inf):
        with pytest.raises(NotFiniteError, match="at token 2 of a completion"):
            check_sampled(of([-1.0, odd]))


def test_scores_up_to_the_largest_count() -> None:
    check_scores(of([], scores={"a": -1e30, "b": None}, reward=None))
    for scores, reward in (({"a": 2e30}, 1.0), ({"a": -2e30}, 1.0), ({"a": 1.0}, math.inf), ({"a": 1.0}, math.nan)):
        with pytest.raises(NotFiniteError):
            check_scores(of([], scores=scores, reward=reward))


def test_the_summary_names_twenty_of_each_and_counts_all(tmp_path: Path) -> None:
    found = NotFiniteError("gradient", "layers.0")
    found.gradients = [GradientNorm(f"layers.{n}", math.nan, 1.0, 1, 4) for n in range(25)]
    found.tokens = {row: {"learned_logp": [-1.0, math.nan]} for row in range(23)}
    write_inspection(tmp_path / "step", "A sentence.", found, [group for _ in range(30) for group in of([-1.0])])
    lines = (tmp_path / "step" / "summary.txt").read_text().splitlines()
    assert not any("Optimizer update" in line for line in lines), "there was none yet"
    assert "30 completions; not finite in 23 of them:" in lines and "25 gradients; not finite in 25 of them:" in lines
    assert sum(line.startswith("  completion ") for line in lines) == 20
    assert sum(line.startswith("  layers.") for line in lines) == 20


def test_completions_are_written_as_a_person_reads_them(tmp_path: Path) -> None:
    (group,) = of([-1.0])
    group.completions[0].text = "Größe ≈ 3"
    write_inspection(tmp_path / "step", "A sentence.", NotFiniteError("reward", "of length is nan"), [group])
    assert "Größe ≈ 3" in (tmp_path / "step" / "completions.jsonl").read_text("utf-8")


@pytest.mark.parametrize(
    ("names", "are"), [(["a"], "(a)"), (["a", "b"], "(a and 1 more)"), (["a", "b", "c"], "(a and 2 more)")]
)
def test_weights_that_are_refused_are_named_and_counted(inputs: Path, names: list[str], are: str) -> None:
    (fault,) = weights_error(parse(raw(inputs)), 3, names).faults
    assert fault.sentence.startswith(f"The weights of step 3 are not finite {are}, so they are not saved.")


def test_every_array_is_looked_at() -> None:
    arrays = [
        ("fine", mx.ones(3)),
        ("step", mx.array(3, mx.uint64)),
        ("odd", mx.array([1.0, math.inf])),
        ("none", mx.zeros((0, 2))),
        ("numpy", np.array([1.0, math.nan])),
        ("fine numpy", np.ones(3)),
    ]
    assert sorted(not_finite_arrays(arrays)) == ["numpy", "odd"]


def test_gradients_are_told_the_worst_first() -> None:
    """By their numbers that are not finite, then by their norms: one that overflows is the largest."""
    told = gradient_norms({
        "flat": mx.array([0.5]), "fine": mx.array([3.0, -4.0]), "overflows": mx.array([3e38, 3e38]),
        "odd": mx.array([0.5, math.nan, 0.25]), "worst": mx.array([math.inf, 0.5, -math.inf]),
    })  # fmt: skip
    assert [each.name for each in told] == ["worst", "odd", "overflows", "fine", "flat"]
    assert [(each.not_finite, each.largest) for each in told[:2]] == [(2, 0.5), (1, 0.5)]
    assert told[2].norm == math.inf and (told[3].norm, told[3].largest, told[3].size) == (5.0, 4.0, 2)


@pytest.mark.parametrize(
    ("changes", "is_first", "setting", "proposed"),
    [
        ({"dtype": "float16"}, False, "dtype", "float32"),
        ({}, True, "model", "dtype=float32"),
        ({"learning_rate": 0.5}, False, "learning_rate", "learning_rate=0.0001"),
        (
            {"train_type": "full", "learning_rate": 1e-4, "max_grad_norm": 0.0},
            False,
            "learning_rate",
            "learning_rate=1e-05",
        ),
        ({"beta": 1.0}, False, "beta", "beta=0.04"),
        ({"max_grad_norm": 0.0}, False, "max_grad_norm", "max_grad_norm=1"),
        ({"learning_rate": 1e-3, "max_grad_norm": 0.0}, False, "learning_rate", "learning_rate=0.0001"),
    ],
)
def test_the_most_likely_cause_has_a_value_to_go_on_with(
    inputs: Path, changes: dict[str, Any], is_first: bool, setting: str, proposed: str
) -> None:
    config: Config = parse(raw(inputs, **changes))
    found, advice = likely_cause(config, "gradient", is_first=is_first)
    assert found == setting and proposed in advice


@pytest.mark.parametrize(
    ("step", "update", "setting"),
    [(1, 0, "model"), (1, 1, "model"), (1, 2, "learning_rate"), (2, 0, "learning_rate"), (2, 1, "learning_rate")],
)
def test_the_model_is_suspected_until_an_update_is_applied(
    inputs: Path, run: RunFolder, step: int, update: int, setting: str
) -> None:
    """`update` is the one that the number was found in, 0 before the step's first."""
    found = NotFiniteError("log-probability", "nan at token 1 of a completion")
    found.update = update
    with pytest.raises(UserError) as told, ends_run(parse(raw(inputs)), run, step, of([-1.0])):
        raise found
    assert told.value.faults[0].setting == setting
