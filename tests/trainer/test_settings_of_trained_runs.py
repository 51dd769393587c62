"""Whoever means the settings of a trained run gets those of the step that is meant, not those that it began with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.state.chat import run_choice
from app.state.prefs import Prefs
from app.state.session import Session
from backend.runs import archive
from backend.runs.run_folder import RunFolder
from backend.runs.run_record import read_record
from backend.runs.steering import run_config
from backend.sampling.chat import find_source
from backend.trainer.evaluation.comparison import find_evaluated
from tests.support import made_up_runs

BEGAN, ENDED = 0.9, 0.7


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run whose temperature was changed before step 15, with checkpoints of steps 10 and 20."""
    run = made_up_runs.make_run(tmp_path / "steered", steps=20, total=20, temperature=BEGAN)
    for step in (10, 20):
        folder = run.checkpoints / f"{step:06}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"step": step}))
        for name in ("adapters.safetensors", "optimizer.safetensors"):
            (folder / name).touch()
    changes = [{"step": 15, "settings": {"temperature": [BEGAN, ENDED]}}]
    run.changes.write_text(json.dumps({"v": 1, "changes": changes}))
    return run


def test_chat_evaluation_and_clone_have_those_of_the_checkpoint(run: RunFolder) -> None:
    for step, temperature in (("10", BEGAN), ("20", ENDED)):
        assert run_config(run, int(step)).temperature == temperature
        assert find_source(str(run.path), step).config.temperature == temperature
        assert find_evaluated(str(run.path), None, which=step).config.temperature == temperature


def test_lists_and_forms_have_those_of_the_end(run: RunFolder, tmp_path: Path, qapp) -> None:
    assert archive.raw_settings(run)["temperature"] == ENDED
    assert read_record(run).setting("temperature") == ENDED
    assert run_choice(run).settings["temperature"] == ENDED
    session = Session(Prefs(tmp_path / "prefs"))
    assert session.load_settings(run)
    assert session.draft.value("temperature") == ENDED
    assert session.messages.current and "as they were at its end" in session.messages.current.sentence


def test_a_damaged_list_of_changes_is_told(run: RunFolder, tmp_path: Path, qapp) -> None:
    run.changes.write_text("{")
    session = Session(Prefs(tmp_path / "prefs"))
    before = session.draft.values()
    assert not session.load_settings(run) and session.draft.values() == before
    assert session.messages.current and "changes.json is not valid JSON" in session.messages.current.sentence
    assert "changes.json is not valid JSON" in run_choice(run).problem
    assert archive.raw_settings(run)["temperature"] == BEGAN
