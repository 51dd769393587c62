"""Runs of every kind, made by the real trainer and the command line: what the pages of the window are walked over."""

import shutil
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from backend.__main__ import app
from backend.config.config import read
from backend.runs.run_folder import RunFolder
from backend.utils.places import demo_config
from tests.support import small_run

OLD_RUN = Path(__file__).parents[1] / "golden" / "run_of_2026_11" / "run"
FAILING = """
from backend.rewards import register_reward_function
@register_reward_function()
def failing_with_a_name_that_is_far_longer_than_the_details_are_wide(completions):
    raise ValueError("Out of luck.")
"""
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"steps_per_eval": 1, "validation_split": 0.25, "val_batches": 1, "beta": 0.1, "save_every": 2}
    | {"record_tokens": True},
    "full": {"train_type": "full", "learning_rate": 1e-4, "log_kl": True},
    "stages": {
        "stages": [{"iters": 1, "reward_functions": ["r1_int"]}, {"iters": 2, "reward_functions": ["r1_count_xml"]}],
        "reward_functions": ["r1_int"],
        "reward_weights": [],
    },
}


def make_runs(folder: Path) -> Path:
    """A folder with LoRA, full, staged, tool-calling, stopped, failed, cloned, swept, old runs, an evaluation."""
    runs, inputs = folder / "runs", folder / "inputs"
    raw, low_half = small_run.settings_for(inputs), small_run.low_half(inputs)
    for name, changes in (KINDS | {"lora": KINDS["lora"] | low_half}).items():
        assert small_run.train_here(raw | changes, RunFolder(runs / name)).kind == "finished"
    tools = read(demo_config("calculator")) | {"iters": 1, "record_tokens": True, "reward_isolation": "thread"}
    assert small_run.train_here(tools | {"steps_per_eval": 0}, RunFolder(runs / "tools")).kind == "finished"
    for name in ("stopped", "resumed"):
        run = RunFolder(runs / name)

        def stop_after_one_step(event: Any, run: RunFolder = run) -> None:
            if event["kind"] == "step" and event["step"] == 1:
                run.control.write_text("stop")

        assert small_run.train_here(raw | low_half, run, stop_after_one_step).kind == "stopped"
    (inputs / "fails.py").write_text(FAILING)
    name = "failing_with_a_name_that_is_far_longer_than_the_details_are_wide"
    failing = {"reward_functions": [name], "reward_weights": [], "reward_functions_file": str(inputs / "fails.py")}
    assert small_run.train_here(raw | failing, RunFolder(runs / "failed")).kind == "failed"
    sweep = {"name": "rates", "base": raw, "over": {"learning_rate": [1e-5, 1e-4]}}
    (inputs / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    held_out = ["--config", str(runs / "lora" / "config.yaml"), "--split", "valid", "--n", "2"]
    for arguments in (
        ["resume", "resumed", "--allow-code"],
        ["sweep", str(inputs / "sweep.yaml")],
        ["clone", "lora", "--step", "2", "--name", "clone"],
        ["evaluate", "lora", *held_out],
    ):
        done = CliRunner().invoke(app(), [*arguments, "--runs-dir", str(runs)])
        assert done.exit_code == 0, (arguments, done.output, done.exception)
    shutil.copytree(OLD_RUN, runs / "old")
    return runs
