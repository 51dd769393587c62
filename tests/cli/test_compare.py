"""The verbs that look at runs: the searched list, and the comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from backend.__main__ import app
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import change_notes, value_text
from backend.utils.places import demo_folder
from tests.support import made_up_runs

VERBS = app()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRPO_STUDIO_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def run_ok(*arguments: str) -> Result:
    result = CliRunner().invoke(VERBS, list(arguments))
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def test_runs_are_searched_and_archived_ones_left_out(runs: Path) -> None:
    for name, rate in (("slow", 1e-6), ("fast", 1e-4)):
        made_up_runs.make_run(runs / name, steps=4, learning_rate=rate)
    change_notes(RunFolder(runs / "fast"), title="Quick one", tags=("math",))

    def names(*flags: str) -> set[str]:
        return {row["name"] for row in json.loads(run_ok("runs", "--json", *flags).stdout)}

    assert names("--search", "lr>1e-5 tag:math") == {"fast"} and "Quick one" in run_ok("runs").stdout
    change_notes(RunFolder(runs / "fast"), archived=True)
    assert (
        names() == {"slow"} and names("--archived") == {"slow", "fast"} and names("--search", "is:archived") == {"fast"}
    )
    refused = CliRunner().invoke(VERBS, ["runs", "--search", "lrr>1"])
    assert refused.exit_code == 2 and "search: Runs have no lrr. Did you mean lr?" in refused.stderr


def test_runs_are_compared_in_the_terminal(runs: Path) -> None:
    for name, rate in (("slow", 1e-6), ("fast", 1e-4)):
        made_up_runs.make_run(runs / name, steps=4, learning_rate=rate)
    compared = json.loads(run_ok("compare", "slow", "fast", "--json").stdout)
    assert compared["settings"] == {"learning_rate": [1e-6, 1e-4]}
    assert [one["name"] for one in compared["results"]] == ["slow", "fast"]
    printed = run_ok("compare", "slow", "fast", "--markdown").stdout
    assert "| Learning Rate | 1e-06 | 0.0001 |" in printed and "| Run | State |" in printed
    assert "Learning Rate" in run_ok("compare", "slow", "fast").stdout
    assert CliRunner().invoke(VERBS, ["compare", "slow"]).exit_code == 2


def test_a_setting_changed_during_the_run_differs_though_it_ends_the_same(runs: Path) -> None:
    for name, rate in (("steered", 1e-6), ("fast", 1e-4)):
        made_up_runs.make_run(runs / name, steps=4, learning_rate=rate)
    change = {"step": 3, "settings": {"learning_rate": [1e-6, 1e-4]}}
    RunFolder(runs / "steered").changes.write_text(json.dumps({"v": 1, "changes": [change]}))
    compared = json.loads(run_ok("compare", "steered", "fast", "--json").stdout)
    assert compared["settings"] == {"learning_rate": ["1e-06, from step 3 on 0.0001", 1e-4]}
    listed = json.loads(run_ok("runs", "--json", "--search", "lr>1e-5").stdout)
    assert {row["name"] for row in listed} == {"steered", "fast"}, "a list of runs has the settings of their ends"


def test_a_path_of_ours_is_shown_without_the_folder_of_this_machine() -> None:
    assert value_text(str(demo_folder("model"))) == "Bundled demo/model"
    assert value_text("/elsewhere/demo/model") == "/elsewhere/demo/model"
