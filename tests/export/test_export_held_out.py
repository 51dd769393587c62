"""The held-out comparison of an export: same prompts and random numbers for both models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from backend.__main__ import app
from backend.config import config as spec_config
from backend.export.export_run import Export, ExportedModel, export_run
from backend.models import policy
from backend.runs.run_folder import RunFolder
from backend.utils.errors import UserError
from tests.support import small_run
from tests.support.adapters import save_adapters


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run with random adapters, a reward that varies, and a test split of twelve prompts."""
    folder = tmp_path_factory.mktemp("held-out")
    rows = folder / "data"
    for split in ("train", "test"):
        small_run.write_rows(rows / f"{split}.jsonl", 12)
    raw = small_run.settings_for(folder, data=str(rows), scale=4.0) | small_run.low_half(folder)
    made = RunFolder(folder / "runs" / "first")
    made.path.mkdir(parents=True)
    config = spec_config.parse(raw)
    made.config.write_text(spec_config.dump(config), encoding="utf-8")
    trained = policy.load_policy(config)
    mx.random.seed(3)
    trained.assign({name: x + 0.2 * mx.random.normal(x.shape) for name, x in trained.trainable().items()})
    save_adapters(trained, config, made.adapters)
    return made


def exported(run: RunFolder, folder: Path, **how: Any) -> ExportedModel:
    return export_run(run, Export("folder", "mine", folder, **how))


def test_a_model_written_in_full_precision_earns_the_very_same_rewards(run: RunFolder, tmp_path: Path) -> None:
    report = exported(run, tmp_path, held_out=10)
    found = report.held_out
    assert found and (found.split, found.prompts) == ("test", 10)
    assert found.trained == found.exported and found.error == 0 and 0 < found.trained < 1
    assert report.sentences()[-1].startswith("On 10 prompts of the test split its reward is 0.")
    assert report.sentences()[-1].endswith(": a difference of 0.")


def test_a_model_that_lost_much_earns_other_rewards(run: RunFolder, tmp_path: Path) -> None:
    found = exported(run, tmp_path, held_out=99, format="mxfp4").held_out
    assert found and found.prompts == 12 and found.error and found.difference == found.exported - found.trained
    assert found.exported != found.trained


def test_without_held_out_prompts_it_is_refused_before_anything_is_written(run: RunFolder, tmp_path: Path) -> None:
    text = run.config.read_text(encoding="utf-8")
    lonely = RunFolder(tmp_path / "lonely")
    lonely.path.mkdir()
    shutil.copytree(run.adapters, lonely.adapters)
    rows = small_run.write_rows(tmp_path / "rows.jsonl")
    lonely.config.write_text(text.replace(str(run.path.parents[1] / "data"), str(rows)), encoding="utf-8")
    with pytest.raises(UserError, match="no valid or test split") as caught:
        exported(lonely, tmp_path / "out", held_out=4)
    assert caught.value.faults[0].setting == "held_out" and not (tmp_path / "out").exists()


def test_the_verb_prints_progress_and_figures_as_json(run: RunFolder, tmp_path: Path) -> None:
    arguments = f"export {run.path} --to folder --folder {tmp_path} --quantize 4 --held-out 2 --allow-code".split()
    done = CliRunner().invoke(app(), [*arguments, "--name", "mine", "--json"])
    assert done.exit_code == 0, done.output
    *progress, result = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["progress"] for line in progress} >= {"Merging the adapters and writing the model."}
    assert {line["done"] for line in progress} >= {None, 0.0, 1.0}
    assert (
        result["path"] == str(tmp_path / "mine") and result["format"] == "4bit" and result["held_out"]["prompts"] == 2
    )
    assert len(result["sentences"]) >= 2 and result["nats"] > 0
    plain = CliRunner().invoke(app(), [*arguments, "--name", "other", "--checkpoint", ""])
    assert plain.exit_code == 0 and plain.stdout.splitlines()[-1] == str(tmp_path / "other")
    both = CliRunner().invoke(app(), [*arguments, "--format", "8bit"])
    assert both.exit_code == 2 and "contradict each other" in both.output
