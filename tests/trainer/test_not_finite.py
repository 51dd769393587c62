"""Whatever is not finite in a step ends the run before it is applied or saved, in a sentence with a setting, and leaves
the batch to read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from backend.runs import checkpoint
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.training.learner import Learner
from tests.support import small_run


def raw(inputs: Path, **changes: Any) -> dict[str, Any]:
    return small_run.settings_for(inputs, **small_run.low_half(inputs) | {"iters": 9, "learning_rate": 1e-5} | changes)


def saved_arrays_are_finite(run: RunFolder) -> bool:
    files = [*run.checkpoints.glob("*/*.safetensors"), *run.adapters.glob("*.safetensors")]
    arrays = [array for file in files for array in mx.load(str(file)).values()]  # pyright: ignore
    return bool(files) and all(np.isfinite(np.array(x.astype(mx.float32))).all() for x in arrays)


def test_an_infinite_gradient_ends_the_run(inputs: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = Learner._apply  # pyright: ignore[reportPrivateUsage]

    def poisoned(learner: Learner, gradient: Any, loss: mx.array) -> dict[str, float]:
        if learner.updates == 2:
            gradient = _with_infinity(gradient)
        return apply(learner, gradient, loss)

    monkeypatch.setattr(Learner, "_apply", poisoned)
    ending = small_run.train_here(raw(inputs, beta=0.01), run)
    assert (ending.kind, ending.exit_code, ending.step) == ("failed", 2, 2)
    assert ending.sentence == (
        "learning_rate: Step 3 was not applied, for its gradient is not finite (a norm of inf). The likely "
        "cause is the learning rate of "
        "1e-05; go on with learning_rate=1e-06, from an earlier checkpoint if it comes again. What it computed is in "
        "inspection/step-000003."
    )
    assert small_run.steps(run) == [1, 2] and saved_arrays_are_finite(run)
    saved = checkpoint.newest(run)
    assert saved is not None and saved.state.step == 2
    folder = run.inspection / "step-000003"
    summary = (folder / "summary.txt").read_text()
    rows = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    assert "Optimizer update 3." in summary and "not finite in 1 of them" in summary
    assert len(rows) == 2 and rows[0]["prompt"].startswith("What is") and rows[0]["advantage"] == -rows[1]["advantage"]
    for row in rows:
        counts = {len(values) for values in row["tokens"].values()}
        assert counts == {len(row["completion_tokens"])}
        assert row["tokens"].keys() == {"sampled_logp", "learned_logp", "old_logp", "reference_logp", "weight"}
        assert row["tokens"]["learned_logp"] == pytest.approx(row["tokens"]["sampled_logp"], abs=1e-4)
    table = (folder / "gradients.tsv").read_text().splitlines()
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


def test_infinite_weights_are_never_saved(inputs: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
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
