"""Runs, preferences and what is worked on are readable by their owner alone, whatever the umask says."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.state.prefs import Prefs
from backend.runs.queue import QueueFile
from backend.runs.run_folder import default_run_name, make_run_folder
from backend.utils.places import RUNS_VARIABLE, preferences_folder


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_of_runs_and_preferences_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path / "data" / "runs"))
    run = make_run_folder(default_run_name("m", "lora", "grpo"))
    QueueFile(tmp_path / "other" / "runs").set_paused(True)
    Prefs()
    made = [run.path, tmp_path / "data", tmp_path / "data" / "runs", tmp_path / "other", preferences_folder()]
    assert [mode(folder) for folder in made] == [0o700] * len(made)


def test_a_run_in_a_shared_folder_is_private_and_the_folder_stays_shared(tmp_path: Path) -> None:
    shared = tmp_path / "team"
    shared.mkdir(mode=0o775)
    (shared / "mine").mkdir(mode=0o777)
    run = make_run_folder("mine", shared, reuse=True)
    assert (mode(shared), mode(run.path)) == (0o775, 0o700)
