"""`where` lists what is stored, and deletes only preferences and compiled kernels, only when asked twice, and never a
run."""

from __future__ import annotations

import fcntl
import json
import tempfile
from pathlib import Path

import pytest
from typer.testing import Result

from backend.runs.run_folder import make_run_folder
from backend.utils import places
from tests.support import verbs


def call(*arguments: str) -> Result:
    return verbs.call("where", *arguments)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Preferences and runs in one folder, as they are by default, with a file in it that is not ours."""
    hub = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")
    for name in ("GRPO_STUDIO_RUNS", "GRPO_STUDIO_PREFS", *hub):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    folder = places.preferences_folder()
    ours = "prefs.ini draft.yaml draft-2.yaml draft-1.lock trusted.json native-crash-1.txt"
    for name in (*ours.split(), "mine.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("12345")
    run = make_run_folder("trained")
    run.config.write_text("iters: 1\n")
    for file in (run.about, run.changes, run.parent, run.window_lock, places.runs_folder() / "queue.json"):
        file.write_text("1")
    (places.runs_folder() / "sweeps" / "rates").mkdir(parents=True)
    (places.runs_folder() / "sweeps" / "rates" / "results.json").write_text("{}")
    (folder / "runs-cache.jsonl").write_text("12345")
    (tmp_path / "temporary" / "mlx" / "cpu").mkdir(parents=True)
    (tmp_path / "temporary" / "mlx" / "cpu" / "kernel.so").write_bytes(b"x" * 100)
    return folder


def test_everything_stored_is_listed_with_its_size(home: Path) -> None:
    rows = {row["key"]: row for row in json.loads(call("--json").stdout)}
    assert (rows["settings"]["files"], rows["settings"]["bytes"]) == (7, 35)
    assert (rows["runs"]["files"], rows["runs"]["path"]) == (7, str(home / "runs"))
    assert rows["kernels"]["bytes"] == 100 and rows["kernels"]["is_shared"]
    printed = call().stdout
    assert rows["hub"]["files"] == 0 and "nothing yet" in printed
    assert "0.035 kB in 7 files" in printed and "0.1 kB in 1 file," in printed


def test_nothing_is_deleted_without_yes(home: Path) -> None:
    before = sorted(home.rglob("*"))
    output = call("--remove", "settings").stdout
    assert str(home / "prefs.ini") in output and "--yes" in output
    assert sorted(home.rglob("*")) == before


def test_only_preferences_are_deleted_and_runs_stay(home: Path) -> None:
    runs = sorted((home / "runs").rglob("*"))
    assert call("--remove", "settings", "--yes").exit_code == 0
    assert sorted(path.name for path in home.iterdir()) == ["mine.txt", "runs"]
    assert sorted((home / "runs").rglob("*")) == runs, "the queue and sweeps too"
    assert "nothing to delete" in call("--remove", "settings", "--yes").stdout


def test_runs_are_never_deleted_by_a_command(home: Path) -> None:
    for key in ("runs", "hub", "lm-studio", "everything"):
        result = call("--remove", key, "--yes")
        assert result.exit_code == 2 and "cannot be removed by a command" in result.stderr
    assert (home / "runs" / "trained").is_dir()


def test_an_open_window_keeps_its_preferences(home: Path) -> None:
    with (home / "draft-1.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = call("--remove", "settings", "--yes")
        assert result.exit_code == 2 and "close it first" in result.stderr and (home / "prefs.ini").exists()
