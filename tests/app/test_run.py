"""A run followed from its folder: metrics, state, clock, progress before the first step; the event loop stays free."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from PySide6.QtCore import QCoreApplication

from app.state.run import MOST_METRICS, Run, RunState, Series
from app.state.run_files import log_lines, problem_of
from backend.cli import training
from backend.runs.events import EventLog, JsonLines, truncate_file
from backend.runs.run_folder import STARTUP_GRACE_S, RunFolder
from backend.runs.start_progress import StartProgress
from tests.support import made_up_runs
from tests.support.latency import LatencyProbe
from tests.support.trainer_by_hand import age, locked


@pytest.fixture
def follow_run(qtbot):
    """Open a folder as the window does, and read it to its end."""
    opened: list[Run] = []

    def open_run(folder: RunFolder) -> Run:
        run = Run(folder)
        opened.append(run)
        poll_to_end(run)
        return run

    yield open_run
    for run in opened:
        run.close()


def poll_to_end(run: Run) -> None:
    run.poll()
    while not run.has_caught_up:
        run.poll()


def test_the_numbers_of_a_finished_run(follow_run, tmp_path: Path) -> None:
    run = follow_run(made_up_runs.make_run(tmp_path / "run", steps=60))
    steps, reward = run.series("reward")
    assert steps.tolist() == list(range(1, 61)) and reward.dtype == np.float64 and np.isfinite(reward).all()
    assert (run.step, run.iterations, run.state, run.is_live) == (60, 60, "finished", False)
    assert run.data.steps.latest("reward") == reward[-1]
    assert run.series("accuracy", held_out=True)[0].tolist() == [1, 20, 40, 60]
    assert run.reward_names == list(made_up_runs.REWARDS)
    assert run.data.ending and run.data.ending["sentence"] == "All 60 steps are done."
    assert run.config["beta"] == 0.05 and run.problem == ""
    assert len(run.series("no such metric")[0]) == 0 and run.data.steps.latest("no such metric") is None


def test_the_clock_leaves_out_loading_and_pauses() -> None:
    run_state = RunState()
    for t, kind, more in (
        (0, "started", {"iterations": 10}),
        (1, "phase", {"phase": "loading"}),
        (31, "phase", {"phase": "sampling"}),
        (33, "step", {"step": 1, "metrics": {}}),
        (35, "step", {"step": 2, "metrics": {}}),
        (35.5, "command", {"word": "pause"}),
        (36, "phase", {"phase": "paused"}),
        (1036, "command", {"word": "resume"}),
        (1036, "phase", {"phase": "sampling"}),
        (1038, "step", {"step": 3, "metrics": {}}),
    ):
        run_state.apply({"kind": kind, "t": t, **more})
    assert run_state.elapsed_s() == pytest.approx(2 + 2 + 0.5 + 2)
    assert run_state.eta_s(1038) == pytest.approx(7 * (2 + 0.5 + 2) / 2)
    assert run_state.eta_s(1039) == pytest.approx(7 * (2 + 0.5 + 2) / 2 - 1), "it decreases between steps"
    assert run_state.eta_s(1100) is None, "a step takes longer than any before"


def test_null_and_missing_metrics_are_gaps() -> None:
    series = Series()
    series.append(1, {"kl": 0.5})
    series.append(2, {"kl": None, "late": 1})
    series.append(3, {})
    assert [str(x) for x in series.get("kl")[1]] == ["0.5", "nan", "nan"]
    assert [str(x) for x in series.get("late")[1]] == ["nan", "1.0", "nan"]
    assert series.latest("kl") == 0.5
    series.append(4, dict.fromkeys("zyxwvut", 0.0))
    assert series.names() == ["kl", "late", *"zyxwvut"], "the order in which charts are laid out"


def test_a_strangers_metrics_are_limited() -> None:
    """A log with 20,000 kept the window busy for more than a minute."""
    run_state = RunState()
    for step in (1, 2):
        run_state.apply({"kind": "step", "step": step, "metrics": {f"m{i}": 0.5 for i in range(2 * MOST_METRICS)}})
    assert run_state.steps.names() == [f"m{i}" for i in range(MOST_METRICS)]
    assert [x["sentence"] for x in run_state.notes] == ["Step 1 has 1,000 metrics; the first 500 of the run are shown."]


def test_a_repeated_step_replaces_itself_and_all_later_steps() -> None:
    series = Series()
    for step in range(1, 3000):
        series.append(step, {"a": step})
    series.append(2000, {"b": 7.0})
    steps, a = series.get("a")
    assert len(steps) == 2000 and steps[-1] == 2000 and np.isnan(a[-1]) and a[-2] == 1999
    assert series.latest("b") == 7.0


def test_state_comes_from_the_event_log_and_the_lock(follow_run, tmp_path: Path) -> None:
    folder = made_up_runs.make_run(tmp_path / "run", steps=5, ending=None)
    with locked(folder):
        run = follow_run(folder)
        states = []
        run.state_changed.connect(states.append)
        assert run.state == "running"
        event_log, clock = EventLog(folder.events), made_up_runs.Clock()
        made_up_runs.write(event_log, clock, "command", word="pause")
        made_up_runs.write(event_log, clock, "phase", phase="paused")
        poll_to_end(run)
        made_up_runs.write(event_log, clock, "command", word="resume")
        made_up_runs.write(event_log, clock, "phase", phase="learning")
        poll_to_end(run)
        run.send("stop")
        assert folder.control.read_text() == "stop"
    poll_to_end(run)
    assert states == ["paused", "running", "stopping", "crashed"]
    made_up_runs.write(event_log, clock, "stopped", step=5, reason="asked", sentence="Stopped.")
    poll_to_end(run)
    assert states[-1] == "stopped"


def test_a_new_folder_is_starting_until_its_grace_is_over(follow_run, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.config.write_text("iters: 5\n")
    run = follow_run(folder)
    assert (run.state, run.iterations, run.is_live) == ("starting", 5, True)
    with locked(folder):  # the lock is taken before the event log begins
        age(folder)
        poll_to_end(run)
        assert run.state == "starting"
    poll_to_end(run)
    assert run.state == "crashed"
    folder.log.write_text("Traceback …\nModuleNotFoundError: No module named 'mlx'\n")
    age(folder)
    assert run.problem.startswith("The training process ended before its first step without saying why")
    assert run.problem.endswith("Its last words: ModuleNotFoundError: No module named 'mlx'")


def test_a_stop_that_the_starting_trainer_deleted_is_sent_again(follow_run, tmp_path: Path) -> None:
    # A starting trainer deletes the control words that it finds, so a stop sent while it was loading was lost.
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.config.write_text("iters: 5\n")
    run = follow_run(folder)
    run.send("stop")
    with locked(folder):
        folder.control.unlink()
        event_log = EventLog(folder.events)
        event_log.write("started", iterations=5)
        poll_to_end(run)
        assert run.state == "stopping" and folder.control.read_text() == "stop"
        folder.control.unlink()
        event_log.write("command", word="stop")
        poll_to_end(run)
        assert run.state == "stopping" and not folder.control.exists()


def test_the_problem_of_a_failed_run_leaves_out_the_names_of_settings(follow_run, tmp_path: Path) -> None:
    folder = made_up_runs.make_run(tmp_path / "run", steps=1, ending=None)
    two = "data: There is no file rows.jsonl.\nreward_weights: There are 2 weights for 3 functions."
    EventLog(folder.events).write("failed", step=1, sentence=two)
    assert follow_run(folder).problem == "There is no file rows.jsonl. There are 2 weights for 3 functions."


def test_a_relaunched_run_is_starting_until_the_lock_is_taken(follow_run, tmp_path: Path) -> None:
    folder = made_up_runs.make_run(tmp_path / "run", steps=3, ending="failed")
    run = follow_run(folder)
    assert run.state == "failed" and run.problem == made_up_runs.SENTENCES["failed"]
    run.expect_process()
    assert run.state == "starting"
    with locked(folder):
        made_up_runs.write(EventLog(folder.events), made_up_runs.Clock(), "started", iterations=60, resumed_from=3)
        poll_to_end(run)
        assert run.state == "running"
    poll_to_end(run)
    assert run.state == "crashed", "the grace ended when the lock was taken"


def test_a_truncated_event_log_is_read_again(follow_run, tmp_path: Path) -> None:
    folder = made_up_runs.make_run(tmp_path / "run", steps=40, ending=None)
    run = follow_run(folder)
    restarts = []
    run.restarted.connect(lambda: restarts.append(run.step))
    with locked(folder):
        run.send("stop")
    folder.control.unlink()  # as a starting trainer does
    text = folder.events.read_bytes()
    truncate_file(folder.events, text.rindex(b"\n", 0, text.index(b'"step": 20, "metrics"')) + 1)
    rows = folder.completions.read_bytes()
    truncate_file(folder.completions, rows.index(b'{"step": 20,'))
    event_log = EventLog(folder.events)
    made_up_runs.write(event_log, made_up_runs.Clock(), "started", iterations=60, resumed_from=19)
    with locked(folder):
        poll_to_end(run)
        assert run.state == "stopping" and folder.control.read_text() == "stop"
    assert restarts == [0] and run.step == 19
    assert run.series("reward")[0].tolist() == list(range(1, 20))
    assert run.index.steps() == list(range(1, 20))


def test_the_log_tail_shows_the_last_state_of_a_progress_line(follow_run, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.log.write_bytes(b"one\ntwo\n 10%\r 60%\r100%\n\x1b[90mlast\x1b[0m \x1b]0;title\x07\xc3")
    run = follow_run(folder)
    assert log_lines(run.folder.log, 3) == ["two", "100%", "last �"]
    folder.log.write_text("x" * 70_000 + "\nend\n")
    assert log_lines(run.folder.log, 3) == ["end"]


def test_long_event_log(qtbot, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    steps = 30_000  # two megabytes and more: read at once they would hold the loop up for half a second
    folder.config.write_text(f"iters: {steps}\n")
    names = ["reward", "kl", *(f"rewards/{name}/mean" for name in made_up_runs.REWARDS)]
    with folder.events.open("w") as file:
        file.write('{"v": 1, "seq": 0, "t": 1.0, "kind": "started", "iterations": 30000}\n')
        for step in range(1, steps + 1):
            values = ", ".join(f'"{name}": {step / 7}' for name in names)
            file.write(
                f'{{"v": 1, "seq": {step}, "t": {step}.5, "kind": "step", "step": {step}, "metrics": {{{values}}}}}\n'
            )
        file.write('{"v": 1, "seq": 30001, "t": 30001.0, "kind": "finished", "step": 30000}\n')
    rows = JsonLines(folder.completions)
    rows.append({"step": steps, "prompt": "p", "completions": []})
    run = Run(folder)
    probe = LatencyProbe(run)
    qtbot.waitUntil(lambda: run.state == "finished")
    probe.check()
    assert run.step == steps and len(run.series("kl")[0]) == steps and len(run.index.rows()) == 1
    run.close()
    QCoreApplication.processEvents()


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


def test_a_starting_run_says_how_far_it_has_come_with_its_rows(follow_run, folder: RunFolder) -> None:
    run = follow_run(folder)
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


def test_long_check_of_rows_is_no_crash(follow_run, folder: RunFolder, monkeypatch) -> None:
    """The lock was taken after the check only: from 20 seconds without a line in the log on, the window said Crashed
    and offered to run another."""
    run = follow_run(folder)
    seen: list[str] = []

    def check(*_: object) -> None:
        age(folder)
        run.poll()
        seen.append(run.state)
        raise training.UserError("data", "There is no file rows.jsonl.")

    assert STARTUP_GRACE_S < 3600
    monkeypatch.setattr(training, "check_settings", check)
    with pytest.raises(training.UserError):
        training.prepared_run(folder.path)
    run.poll()
    assert seen == ["starting"] and run.state == "failed" and not folder.is_locked()


def test_lines_that_every_run_prints_are_nobodys_last_words(folder: RunFolder) -> None:
    """A run that was killed had as its last words “BLAS is OpenBLAS 0.3.21, 1 thread.”"""
    told = f"{folder.path}\nBLAS is OpenBLAS 0.3.21, 1 thread.\nstep 4  reward 1.2  ± std 0.6\n{CHECKING.line}\n\n"
    folder.log.write_text(told)
    assert "last words" not in problem_of("crashed", None, 4, folder)
    folder.log.write_text(f"Stopped at step 3 because it was asked to stop; everything is saved.\n{told}")
    assert "last words" not in problem_of("crashed", None, 4, folder), "of the process before"
    folder.log.write_text(f"{told}libc++abi: terminating due to an uncaught exception\n")
    said = problem_of("crashed", None, 4, folder)
    assert said.endswith("Its last words: libc++abi: terminating due to an uncaught exception")


def test_a_stop_while_the_rows_are_checked_ends_the_run(follow_run, folder: RunFolder, monkeypatch) -> None:
    """It was obeyed when the check was over, minutes later."""
    run = follow_run(folder)

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
