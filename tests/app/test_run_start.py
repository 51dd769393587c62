"""Before a run's first step the window says what its process does and how far it has come, and never that it has
ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from app.state.run import Run
from app.state.run_files import problem_of
from backend.cli import training
from backend.runs.archive import STARTUP_GRACE_S
from backend.runs.events import EventLog
from backend.runs.run_folder import RunFolder
from backend.runs.start_progress import StartProgress
from tests.app.test_run import make_folder_old
from tests.support.trainer_by_hand import locked

CHECKING = StartProgress("Checking rows.jsonl", 0.35, "1,204,000 rows, 310,000 rows/s")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "run").mkdir()
    folder = RunFolder(tmp_path / "run")
    folder.config.write_text("model: a/b\ndata: a/b\niters: 20\n")
    return folder


def shift(path: Path, seconds: float) -> None:
    """Say that a file was written so many seconds from now."""
    now = time.time()
    os.utime(path, (now + seconds, now + seconds))


def test_a_starting_run_says_how_far_it_has_come_with_its_rows(folder: RunFolder, qapp) -> None:
    run = Run(folder)
    with locked(folder):
        folder.log.write_text("a warning of some library\n")
        run.poll()
        assert run.state == "starting" and run.start_progress is None
        folder.log.write_text(f"a warning of some library\n{CHECKING.line}\n")
        run.poll()
        assert run.start_progress == CHECKING
        event_log = EventLog(folder.events)
        shift(folder.log, -1)
        event_log.write("phase", phase="loading")
        run.poll()
        assert run.start_progress is None and run.data.phase == "loading", "the event log is newer"
        with folder.log.open("a") as log:
            log.write(StartProgress("Loading b", 0.5, "8 GB, 1 GB/s").line + "\n")
        shift(folder.log, 1)
        run.poll()
        assert run.start_progress and run.start_progress.doing == "Loading b"
        event_log.write("started", iterations=20)
        run.poll()
        assert run.start_progress is None and run.state == "running"
        event_log.close()
    run.close()


def test_long_check_of_rows_is_no_crash(folder: RunFolder, monkeypatch, qapp) -> None:
    """The lock was taken after the check only: from 20 seconds without a line in the log on, the window said Crashed
    and offered to run another."""
    run = Run(folder)
    seen: list[str] = []

    def check(*_: object) -> None:
        make_folder_old(folder)
        run.poll()
        seen.append(run.state)
        raise training.UserError("data", "There is no file rows.jsonl.")

    assert STARTUP_GRACE_S < 3600
    monkeypatch.setattr(training, "check_settings", check)
    with pytest.raises(training.UserError):
        training.prepared_run(folder.path)
    run.poll()
    assert seen == ["starting"] and run.state == "failed" and not folder.is_locked()
    run.close()


def test_lines_that_every_run_prints_are_nobodys_last_words(folder: RunFolder) -> None:
    """A run that was killed had as its last words “BLAS is OpenBLAS 0.3.21, 1 thread.”"""
    told = f"{folder.path}\nBLAS is OpenBLAS 0.3.21, 1 thread.\nstep 4  reward 1.2  ± std 0.6\n{CHECKING.line}\n\n"
    folder.log.write_text(told)
    assert "last words" not in problem_of("crashed", None, 4, folder)
    folder.log.write_text(f"libc++abi: terminating due to an uncaught exception\n{told}")
    assert problem_of("crashed", None, 4, folder).endswith(
        "Its last words: libc++abi: terminating due to an uncaught exception"
    )


def test_a_stop_while_the_rows_are_checked_ends_the_run(folder: RunFolder, monkeypatch, qapp) -> None:
    """It was obeyed when the check was over, minutes later."""
    run = Run(folder)

    def check(raw: object, runs_dir: object, look: Callable[[], None]) -> None:
        look()
        run.send("stop")
        try:
            look()
        except Exception as error:  # as readers of data do
            raise training.UserError("data", "The rows cannot be read.") from error

    monkeypatch.setattr(training, "check_settings", check)
    with pytest.raises(typer.Exit) as ended:
        training.prepared_run(folder.path)
    run.poll()
    assert ended.value.exit_code == 3 and run.state == "stopped" and not folder.is_locked()
    assert not folder.control.exists()
    run.close()
