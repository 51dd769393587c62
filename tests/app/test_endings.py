"""Every way a run can end or fall silent, as the window shows it: header, strip, title, Monitor, and what it offers."""

import os
import time
from pathlib import Path

import pytest

from app.menus import RUN_ACTIONS
from app.state.prefs import Prefs
from app.state.run import Run
from app.state.run_files import last_run
from app.state.run_notices import findings_of
from app.state.session import Session
from app.widgets.basic.dialogs import QuestionBox
from app.window import Window
from backend.runs.run_folder import RunFolder
from backend.utils import places
from tests.support import made_up_runs
from tests.support.trainer_by_hand import add_checkpoints, age, locked, write_event


@pytest.fixture
def window(window: Window) -> Window:
    window.resize(1280, 800)
    window.show()
    window.show_page("monitor")
    return window


def running(name: str = "run", *, steps: int = 30) -> RunFolder:
    """A run in the middle, with a checkpoint at step 20; its newest event is a few seconds old."""
    folder = made_up_runs.make_run(places.runs_folder() / name, steps=steps, ending=None, now=True)
    add_checkpoints(folder, {20: None})
    return folder


def shown(window: Window, folder: RunFolder, qtbot, state: str) -> Run:
    window.session.open_run(folder.path)
    run = window.session.run
    qtbot.waitUntil(lambda: run.has_caught_up and run.state == state)
    run.poll()
    window.pages["monitor"]._refresh()
    return run


def card(window: Window) -> tuple[str, str, list[str]]:
    """Title, texts and buttons of Monitor's card; empty where it is hidden."""
    verdict = window.pages["monitor"].verdict
    if verdict.isHidden():
        return "", "", []
    text = " ".join(line.text() for line in (verdict.sentence, verdict.advice))
    return verdict.title.text(), text, [button.text() for button in verdict.buttons]


def advance(monkeypatch, run: Run, seconds: float) -> None:
    """Let the run's monotonic clock go on."""
    clock = run.clock.monotonic
    monkeypatch.setattr(run.clock, "monotonic", lambda: clock() + seconds)
    run.poll()


def enabled(window: Window) -> set[str]:
    return {name for name in RUN_ACTIONS if window.menus[name].isEnabled()}


def test_buttons_and_strip_follow_the_run(window: Window, qtbot) -> None:
    assert enabled(window) == {"run"} and window.strip.state.label.text() == "No run"
    folder, menus = running(), window.menus
    with locked(folder):
        run = shown(window, folder, qtbot, "running")
        assert enabled(window) == {"pause", "stop", "save_now"}
        assert window.strip.step.text() == "step 30 of 60" and window.strip.left.text().endswith("left")
        assert window.strip.memory.text().replace("\u202f", " ") == "peak 0.420 GB"
        for name, word in (("save_now", "save"), ("pause", "pause")):
            menus[name].trigger()
            assert folder.control.read_text() == word
        write_event(folder, "phase", phase="paused")
        qtbot.waitUntil(lambda: run.state == "paused")
        assert menus["pause"].text() == "Resume"
        for name, word in (("pause", "resume"), ("stop", "stop")):
            menus[name].trigger()
            assert folder.control.read_text() == word
        assert enabled(window) == set()
    write_event(folder, "failed", step=30, sentence="The dataset has no rows.")
    qtbot.waitUntil(lambda: run.state == "failed")
    assert enabled(window) == {"run"} and menus["resume"].isEnabled() and not window.strip.left.isVisible()
    assert window.strip.sentence.text() == "The dataset has no rows."


def test_stopped(window: Window, qtbot) -> None:
    folder = running()
    with locked(folder):
        run = shown(window, folder, qtbot, "running")
        window.stop()
        assert run.state == "stopping" and folder.control.read_text() == "stop"
        write_event(folder, "stopped", step=30, sentence="Stopped as it was asked to; everything is saved.")
    qtbot.waitUntil(lambda: run.state == "stopped")
    title, text, buttons = card(window)
    assert title.startswith("Stopped: 30 of 60 steps") and "everything is saved" in text
    assert buttons[0] == "Resume from step 20" and window.menus["resume"].isEnabled()


def test_stopped_before_the_first_step(window: Window, qtbot) -> None:
    folder = running(steps=0)
    write_event(folder, "stopped", step=0, sentence="Stopped before its first step.")
    shown(window, folder, qtbot, "stopped")
    assert card(window)[2][1:] == ["Open folder"], "there is nothing to export, evaluate or chat with"


def test_settings_of_a_failed_run(window: Window, qtbot) -> None:
    folder, asked = running(), list[str]()
    window.session.field_requested.connect(asked.append)
    write_event(folder, "failed", step=30, sentence="learning_rate: Step 31 was not applied: its loss is nan.")
    shown(window, folder, qtbot, "failed")
    edit = next(button for button in window.pages["monitor"].verdict.buttons if button.text() == "Edit settings")
    edit.click()
    assert window.current_page == "train" and asked == ["learning_rate"]


def test_hostile_sentences(window: Window, qtbot) -> None:
    folder, hostile = running(), "<b>x</b> \u202eevil\x1b[31m\x07"
    folder.log.write_text(hostile * 100)
    for level in ("info", "warning"):
        write_event(folder, "note", level=level, sentence=hostile * 100)
    shown(window, folder, qtbot, "crashed")
    page = window.pages["monitor"]
    findings = [episode.sentence for episode in findings_of(page._run, ())]
    for text in (page.note.text(), page._run.problem, *findings):
        assert "<b>x</b>" in text and text.isprintable() and len(text) <= 600


def test_a_run_that_paused_by_itself_says_why(window: Window, qtbot) -> None:
    folder, lacks = running(), "The disk of /runs/run has 3 MB free, and 16.8 MB are needed."
    with locked(folder):
        run = shown(window, folder, qtbot, "running")
        write_event(folder, "note", level="warning", sentence=lacks, during="pause")
        write_event(folder, "phase", phase="paused", sentence=lacks)
        qtbot.waitUntil(lambda: run.state == "paused")
        title, text, buttons = card(window)
        assert title == "Paused" and text.startswith(lacks) and buttons[0] == "Resume"
        assert "by itself" not in text, "a run that waits for its judge's server does not resume by itself"
        assert not findings_of(run, ()), "the card has the sentence"
        write_event(folder, "phase", phase="sampling")
        qtbot.waitUntil(lambda: run.state == "running")
        assert run.data.pause_reason == "" and card(window) == ("", "", [])


def test_hung(window: Window, qtbot, monkeypatch) -> None:
    folder = running()
    with locked(folder):
        run = shown(window, folder, qtbot, "running")
        assert run.silence == "" and window.strip.left.isVisible()
        advance(monkeypatch, run, 310)
        qtbot.waitUntil(lambda: card(window)[0] == "No sign of life for 5 min.")
        assert "continues from step 20" in card(window)[1] and card(window)[2] == ["Open log"]
        assert window.strip.sentence.text().startswith("No sign of life for 5 min.")
        assert "No sign of life" in window.pages["monitor"].header.doing.text()
        assert not window.strip.left.isVisible(), "nobody knows how long it takes"
        assert window.menus["stop"].isEnabled(), "it may answer yet"
        write_event(folder, "step", step=31, metrics={"reward": 1.0})
        qtbot.waitUntil(lambda: run.silence == "" and card(window)[0] == "")
        assert "No sign" not in window.strip.sentence.text() and window.strip.left.isVisible()


def test_silence_of_a_resumed_run(window: Window, qtbot, monkeypatch) -> None:
    folder = made_up_runs.make_run(places.runs_folder() / "old", steps=12, ending="failed")  # a year ago
    run = shown(window, folder, qtbot, "failed")
    run.expect_process()
    assert run.state == "starting" and run.silence == ""
    with locked(folder):
        advance(monkeypatch, run, 310)
        assert run.silence == "No sign of life for 5 min."


@pytest.mark.parametrize("jump_s", [8 * 3600, -8 * 3600], ids=["asleep for a night", "clock set back"])
def test_machine_asleep(window: Window, qtbot, monkeypatch, jump_s: float) -> None:
    """Unix time jumps, monotonic time does not: elapsed, time left and silence stay what they are."""
    folder = running()
    write_event(folder, "phase", phase="sampling")  # the log's first event with a monotonic clock
    with locked(folder):
        run = shown(window, folder, qtbot, "running")
        elapsed, left = run.elapsed_s, run.eta_s
        assert left is not None and 20 < left < 60
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + jump_s)
        run.poll()
        assert run.silence == "" and abs(run.elapsed_s - elapsed) < 3
        write_event(folder, "phase", phase="sampling")  # the trainer wakes too; its monotonic clock stood still
        run.poll()
        for step in (31, 32):
            write_event(folder, "step", step=step, metrics={"reward": 1.0})
            run.poll()
        qtbot.waitUntil(lambda: run.step == 32)
        assert abs(run.elapsed_s - elapsed) < 5
        assert run.eta_s is not None and run.eta_s < left + 5


def test_two_windows_steer_one_run(window: Window, session: Session, qtbot, tmp_path: Path) -> None:
    folder = running()
    with locked(folder):
        shown(window, folder, qtbot, "running")
        other = Session(Prefs(tmp_path / "other"))
        assert other.reattach(), "a window that is opened finds the run that trains"
        qtbot.waitUntil(lambda: other.run.state == "running")
        for send, word in ((window.pause, "pause"), (lambda: other.send("stop"), "stop")):
            send()
            assert folder.control.read_text() == word
        third = Session(Prefs(tmp_path / "third"))
        assert third.starter.is_busy(), "nor does a window that shows no run start a second one"
        assert third.messages.current.sentence.startswith("run is training: stop it first")
        other.close_run()


def test_a_run_whose_folder_is_moved_away_is_closed(window: Window, qtbot, tmp_path: Path) -> None:
    """Another window moved it to the trash, and it had crashed before its first step."""
    folder = made_up_runs.make_run(tmp_path / "away", steps=3, ending="finished")
    shown(window, folder, qtbot, "finished")
    folder.path.rename(tmp_path / "trash")
    qtbot.waitUntil(lambda: window.session.run is None)
    assert window.strip.sentence.text() == "The folder of away was moved or deleted."


def test_the_last_run_is_shown_after_a_restart(session: Session) -> None:
    older = made_up_runs.make_run(places.runs_folder() / "older", steps=3)
    made_up_runs.make_run(places.runs_folder() / "newer", steps=3)
    os.utime(older.events, (time.time() + 5,) * 2)
    fresh = RunFolder(places.runs_folder() / "waits")
    fresh.path.mkdir()
    fresh.config.write_text("model: a\n")
    assert last_run() == older, "the one that has trained last, which may have been resumed; what never began is none"
    assert not session.reattach()
    session.show_last_run()
    assert session.run is not None and session.run.folder == older


def test_a_crash_that_nobody_saw_is_resumed_from_monitor(window: Window, session: Session, qtbot, monkeypatch) -> None:
    folder = running(steps=137)
    age(folder)
    session.show_last_run()
    qtbot.waitUntil(lambda: session.run.state == "crashed")
    assert window.strip.sentence.text().startswith("The training process ended after step 137")
    window.show_page("monitor")
    resumed: list[RunFolder] = []
    monkeypatch.setattr(session.starter, "resume", resumed.append)
    button = window.pages["monitor"].verdict.buttons[0]
    assert button.text() == "Resume from step 20"
    button.click()
    assert resumed == [folder]


@pytest.mark.parametrize(
    ("answer", "closes", "says", "paused"),
    [("keep", True, "", False), ("stop", True, "stop", True), ("cancel", False, "", False)],
)
def test_closing_asks_and_remembers(window: Window, session: Session, qtbot, monkeypatch, answer, closes, says, paused):
    folder = running()
    waits = RunFolder(places.runs_folder() / "waits")
    waits.path.mkdir()
    waits.config.write_text("model: a\n")
    runner = session.queue.file.hold_runner_lock()
    session.queue.add(waits)
    asked: list[QuestionBox] = []
    monkeypatch.setattr(QuestionBox, "exec", lambda box: (asked.append(box), box.checkBox().setChecked(True)))
    monkeypatch.setattr(QuestionBox, "answer", answer)
    with locked(folder):
        shown(window, folder, qtbot, "running")
        assert window.leave_training() is closes
        assert (folder.control.read_text() if folder.control.exists() else "") == says
        assert session.queue.now.is_paused is paused, "or the next run would begin behind the user's back"
        assert session.prefs.when_closing == ("ask" if answer == "cancel" else answer)
        folder.control.unlink(missing_ok=True)
        window.leave_training()
        assert len(asked) == (2 if answer == "cancel" else 1)
    os.close(runner)
