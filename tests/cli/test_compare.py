"""The verbs that look at runs: the searched list, the comparison, and `doctor`, which tells all findings of a run with
their steps, or what it looked at when there is nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backend.runs.run_folder import RunFolder
from backend.runs.run_record import change_notes
from backend.trainer.health.rules import RULES
from tests.support import made_up_runs
from tests.support.diaries import recording
from tests.support.verbs import call, refused, run_ok


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The runs folder, with a slow run and a fast one."""
    for name, rate in (("slow", 1e-6), ("fast", 1e-4)):
        made_up_runs.make_run(tmp_path / "runs" / name, steps=4, learning_rate=rate)
    return tmp_path / "runs"


def test_runs_are_searched_and_archived_ones_left_out(runs: Path) -> None:
    change_notes(RunFolder(runs / "fast"), title="Quick one", tags=("math",))

    def names(*flags: str) -> set[str]:
        return {row["name"] for row in json.loads(run_ok("runs", "--json", *flags).stdout)}

    assert names("--search", "lr>1e-5 tag:math") == {"fast"} and "Quick one" in run_ok("runs").stdout
    change_notes(RunFolder(runs / "fast"), archived=True)
    assert names() == {"slow"} and names("--archived") == {"slow", "fast"}
    assert names("--search", "is:archived") == {"fast"}
    assert "search: Runs have no lrr. Did you mean lr?" in refused("runs", "--search", "lrr>1")


def test_runs_are_compared_in_the_terminal(runs: Path) -> None:
    compared = json.loads(run_ok("compare", "slow", "fast", "--json").stdout)
    assert compared["settings"] == {"learning_rate": [1e-6, 1e-4]}
    assert [one["name"] for one in compared["results"]] == ["slow", "fast"]
    printed = run_ok("compare", "slow", "fast", "--markdown").stdout
    assert "| Learning Rate | 1e-06 | 0.0001 |" in printed and "| Run | State |" in printed
    made_up_runs.make_run(runs / (name := "a-name-of-40-characters-that-people-copy"), steps=4, learning_rate=1e-6)
    printed = run_ok("compare", "slow", "fast", name).stdout
    assert "Learning Rate" in printed and "…" not in printed and "Held-out, last" in printed
    assert name in run_ok("runs").stdout
    assert call("compare", "slow").exit_code == 2


def test_a_setting_changed_during_the_run_differs_though_it_ends_the_same(runs: Path) -> None:
    change = {"step": 3, "settings": {"learning_rate": [1e-6, 1e-4]}}
    RunFolder(runs / "slow").changes.write_text(json.dumps({"v": 1, "changes": [change]}))
    compared = json.loads(run_ok("compare", "slow", "fast", "--json").stdout)
    assert compared["settings"] == {"learning_rate": ["1e-06, from step 3 on 0.0001", 1e-4]}
    listed = json.loads(run_ok("runs", "--json", "--search", "lr>1e-5").stdout)
    assert {row["name"] for row in listed} == {"slow", "fast"}, "a list of runs has the settings of their ends"


def doctor(*arguments: object) -> str:
    return run_ok("doctor", *arguments).stdout


def test_findings_have_steps_figures_advice_and_a_proposal(tmp_path: Path) -> None:
    run = recording("lr-high").unpack(tmp_path / "sick")
    text = doctor(run.path)
    assert "sick: finished, 64 steps, 9 evaluations." in text
    assert "Drifting from the reference (warning, since step 10)" in text
    assert "Proposed: --set learning_rate=0.0015" in text
    (told,) = [json.loads(line) for line in doctor(run.path, "--json").splitlines()]
    drifting = next(finding for finding in told["findings"] if finding["code"] == "drifting")
    assert drifting["since"] == 10 and drifting["until"] is None and drifting["settings"] == {"learning_rate": 0.0015}
    assert drifting["value"] > drifting["threshold"] == 0.5 and drifting["chart"] == "KL from the reference"
    assert any(finding["until"] for finding in told["findings"])


def test_nothing_found_says_what_was_looked_at_and_what_was_not(tmp_path: Path) -> None:
    text = doctor(recording("healthy-lora").unpack(tmp_path / "well").path)
    looked_at = next(line for line in text.splitlines() if line.startswith("Nothing found. Looked at:"))
    assert "Flat reward" in looked_at and "KL exploding" not in looked_at
    assert "did not measure it: Drifting from the reference (kl); KL exploding (kl)" in text
    short = doctor(str(recording("healthy-lora").unpack(tmp_path / "other").path), "--json")
    assert set(json.loads(short)["looked_at"]) < set(RULES)


SAID = {"lr-1": "The gradient of update 2 is not a number", "crashed": "crashed, 20 steps"}


@pytest.mark.parametrize(("name", "sentence"), SAID.items())
def test_a_failed_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sentence: str) -> None:
    monkeypatch.setattr("backend.runs.archive.STARTUP_GRACE_S", 0.0)
    text = doctor(recording(name).unpack(tmp_path / name).path)
    assert sentence in text
    assert ("There is no finished step to look at." in text) == (name == "lr-1")
