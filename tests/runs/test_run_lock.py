"""Between two starts of a run's ranks nobody else gets the run; the launcher and what it has started do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from backend.runs.run_folder import LAUNCH_VARIABLE, RunFolder, held_for_launch, hold_lock
from backend.utils.errors import UserError

TRIES = """
import os, sys
from pathlib import Path
from backend.utils.errors import UserError
from backend.runs.run_folder import RunFolder
from backend.runs.run_folder import hold_lock
try:
    hold_lock(RunFolder(Path(sys.argv[1])))
except UserError as mistake:
    sys.exit(str(mistake))
print("trains")
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


def tried(run: RunFolder, **variables: str) -> str:
    """What another process gets to hear that would train the run."""
    environment = {key: value for key, value in os.environ.items() if key != LAUNCH_VARIABLE} | variables
    command = [sys.executable, "-c", TRIES, str(run.path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_only_what_the_launcher_has_started_trains_the_run_between_two_starts(run: RunFolder) -> None:
    with held_for_launch(run):
        assert run.is_locked()
        os.close(hold_lock(run))  # its own, as for the event log's last line
        assert run.is_locked(), "no rank is alive, and the window does not take the run for crashed"
        assert "is being trained by another process" in tried(run)
        assert "trains" in tried(run, **{LAUNCH_VARIABLE: os.environ[LAUNCH_VARIABLE]})
        assert "is being trained" in tried(run, **{LAUNCH_VARIABLE: str(run.path.with_name("another"))})
        with pytest.raises(UserError, match="is being trained"), held_for_launch(run):
            raise AssertionError("two launchers")
    assert not run.is_locked() and not run.launch_lock.exists() and LAUNCH_VARIABLE not in os.environ
    assert "trains" in tried(run)
    handle = hold_lock(run)
    with pytest.raises(UserError, match="is being trained"), held_for_launch(run):
        raise AssertionError("beside a trainer")
    assert not run.launch_lock.exists()
    os.close(handle)
