"""`doctor` tells all findings of a run with their steps, or what it looked at when there is nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backend.__main__ import app
from backend.trainer.health.rules import RULES
from tests.support.diaries import recording

VERBS = app()


def doctor(*arguments: str) -> str:
    result = CliRunner().invoke(VERBS, ["doctor", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_findings_have_steps_figures_advice_and_a_proposal(tmp_path: Path) -> None:
    run = recording("lr-high").unpack(tmp_path / "sick")
    text = doctor(str(run.path))
    assert "sick: finished, 64 steps, 9 evaluations." in text
    assert "Drifting from the reference (warning, since step 10)" in text
    assert "Proposed: --set learning_rate=0.0015" in text
    (told,) = [json.loads(line) for line in doctor(str(run.path), "--json").splitlines()]
    drifting = next(finding for finding in told["findings"] if finding["code"] == "drifting")
    assert drifting["since"] == 10 and drifting["until"] is None and drifting["settings"] == {"learning_rate": 0.0015}
    assert drifting["value"] > drifting["threshold"] == 0.5 and drifting["chart"] == "KL from the reference"
    assert any(finding["until"] for finding in told["findings"])


def test_nothing_found_says_what_was_looked_at_and_what_was_not(tmp_path: Path) -> None:
    text = doctor(str(recording("healthy-lora").unpack(tmp_path / "well").path))
    looked_at = next(line for line in text.splitlines() if line.startswith("Nothing found. Looked at:"))
    assert "Flat reward" in looked_at and "KL exploding" not in looked_at
    assert "did not measure it: Drifting from the reference (kl); KL exploding (kl)" in text
    short = doctor(str(recording("healthy-lora").unpack(tmp_path / "other").path), "--json")
    assert set(json.loads(short)["looked_at"]) < set(RULES)


@pytest.mark.parametrize(
    ("name", "sentence"), [("lr-1", "The gradient of update 2 is not a number"), ("crashed", "crashed, 20 steps")]
)
def test_a_run_that_failed_or_crashed_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sentence: str
) -> None:
    monkeypatch.setattr("backend.runs.archive.STARTUP_GRACE_S", 0.0)
    text = doctor(str(recording(name).unpack(tmp_path / name).path))
    assert sentence in text
    assert ("There is no finished step to look at." in text) == (name == "lr-1")
