"""A new run whose adapters start from trained ones: of a folder, of a file, of another run at its end or at a
checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from backend.runs.clone import clone
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import find_checkpoint
from backend.trainer.preflight import check
from tests.support import small_run
from tests.support.small_run import arrays, same


@pytest.fixture(scope="module")
def raw(inputs: Path) -> dict[str, Any]:
    about = {"learning_rate": 1e-2, "iters": 2, "save_every": 1, "max_completion_length": 3, "keep_checkpoints": 9} | {
        "reward_functions": ["low_half"]
    }
    return small_run.settings_for(inputs, layers=2, **small_run.low_half(inputs) | about, beta=0.1)


@pytest.fixture(scope="module")
def first(raw: dict[str, Any], inputs: Path) -> RunFolder:
    """The run that others start from."""
    run = RunFolder(inputs / "runs" / "first")
    small_run.train_here(raw, run)
    return run


def starts(raw: dict[str, Any], run: RunFolder, adapter: object, **changes: Any) -> RunFolder:
    assert small_run.train_here(raw | {"adapter": str(adapter)} | changes, run).kind == "finished"
    return run


def test_a_run_starts_from_the_arrays_that_are_named(raw: dict[str, Any], first: RunFolder, run: RunFolder) -> None:
    """At step 0 its checkpoint is theirs; the reference stays the base model, so the KL is not 0."""
    named = {first.path: "2", f"{first.path}@1": "1", first.adapters: "2"}
    named[find_checkpoint(first, "1").weights_file] = "1"
    for number, (adapter, step) in enumerate(named.items()):
        begun = starts(raw, RunFolder(run.path / str(number)), adapter, iters=1)
        assert same(arrays(find_checkpoint(begun, "0").weights_file), arrays(find_checkpoint(first, step).weights_file))
        (step_event,) = small_run.events(begun, "step")
        assert step_event["metrics"]["kl"] > 1e-4
    assert any("The adapters start from" in event.get("sentence", "") for event in read_events(begun.events))


def test_a_start_equals_a_cold_clone(raw: dict[str, Any], first: RunFolder, run: RunFolder, tmp_path: Path) -> None:
    begun = starts(raw, run, f"{first.path}@1")
    cloned = clone(first, "1", warm=False, name="cold", runs_dir=tmp_path)
    assert small_run.train_here(yaml.safe_load(cloned.config.read_text()), cloned).kind == "finished"
    assert same(arrays(find_checkpoint(begun, "2").weights_file), arrays(find_checkpoint(cloned, "2").weights_file))
    assert begun.completions.read_text() == cloned.completions.read_text()


def test_a_resume_needs_no_adapter(raw: dict[str, Any], first: RunFolder, run: RunFolder, tmp_path: Path) -> None:
    whole = starts(raw, RunFolder(tmp_path / "whole"), first.adapters)
    lent = Path(shutil.copytree(first.adapters, tmp_path / "lent"))
    assert small_run.train_here(raw | {"adapter": str(lent)}, run, small_run.stop_after(run, 1)).step == 1
    shutil.rmtree(lent)
    shutil.rmtree(find_checkpoint(run, "1").path)  # as a kill in step 1 leaves it
    starts(raw, run, lent)
    assert same(arrays(find_checkpoint(run, "2").weights_file), arrays(find_checkpoint(whole, "2").weights_file))
    assert run.completions.read_text() == whole.completions.read_text()


@pytest.mark.parametrize(
    ("changes", "setting", "says"),
    [
        ({"rank": 4}, "rank", "Rank is 4, and the adapter to start from has 2; set it to 2."),
        ({"scale": 1.0}, "scale", "Scale is 1.0, and the adapter to start from has 20.0; set it to 20.0."),
        ({"train_type": "dora"}, "train_type", "Fine-tune is dora, and the adapter to start from has lora"),
        ({"num_layers": 1}, "adapter", "which this run does not train (Layers, Target modules)"),
        ({"lora_keys": ["self_attn.q_proj"]}, "adapter", "which this run does not train (Layers, Target modules)"),
        ({"train_type": "full"}, "adapter", "Full fine-tuning has no adapter to start from"),
        ({"adapter": "nowhere"}, "adapter", "There is no adapter nowhere: no folder with adapters.safetensors"),
        ({"adapter": "{first}@9"}, "adapter", "has no checkpoint 9; choose one of end, best, 2, 1."),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    raw: dict[str, Any], first: RunFolder, changes: dict[str, Any], setting: str, says: str
) -> None:
    changes = {key: str(x).format(first=first.path) if key == "adapter" else x for key, x in changes.items()}
    faults = check(raw | {"adapter": str(first.path)} | changes)
    assert [fault.setting for fault in faults] == [setting]
    assert says in faults[0].sentence and len(faults[0].sentence) <= 200
