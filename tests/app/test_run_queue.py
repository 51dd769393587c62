"""The queue in the window: what waits, who runs it, and the run that it starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.state.prefs import Prefs
from app.state.run_list import RunQueue
from app.state.session import Session
from backend.runs.run_folder import RunFolder
from backend.utils import places
from backend.utils.errors import UserError


@pytest.fixture
def runners(monkeypatch) -> list[list[str]]:
    """Stands in for the runners that are started."""
    started: list[list[str]] = []
    monkeypatch.setattr("app.state.run_list.start_detached", lambda command, *_: started.append(command))
    return started


@pytest.fixture
def session(tmp_path: Path, qapp, runners) -> Session:
    session = Session(Prefs(tmp_path / "prefs"))
    session.restore()
    return session


def prepared(name: str) -> RunFolder:
    run = RunFolder(places.runs_folder() / name)
    run.path.mkdir(parents=True)
    run.config.write_text("model: a\ndata: b\n")
    os.utime(run.config, (1e9, 1e9))
    return run


def test_a_run_that_is_added_has_a_runner_started_once(qapp, runners) -> None:
    queue = RunQueue()
    assert queue.add(prepared("a"))
    assert queue.is_active, "its process needs seconds until it holds the lock, in which nothing else may begin"
    queue.add(prepared("a2"))
    lock = queue.file.hold_runner_lock()
    queue.add(prepared("b"))
    assert len(runners) == 1 and [run.name for run in queue.waiting] == ["a", "a2", "b"]
    assert queue.is_active
    os.close(lock)
    queue.set_paused(True)
    queue.add(prepared("c"))
    assert len(runners) == 1, "a paused queue needs no runner"
    queue.set_paused(False)
    assert len(runners) == 2


def test_refusals_are_sentences(qapp, monkeypatch) -> None:
    def start(*_: object) -> None:
        raise UserError("run", "python cannot be started.")

    monkeypatch.setattr("app.state.run_list.start_detached", start)
    queue, said = RunQueue(), []
    queue.refused.connect(said.append)
    assert not queue.add(prepared("a"))
    queue.change(queue.file.move, prepared("other"), 0)
    queue.file.path.write_text("{")
    queue.set_paused(True)
    assert said[0] == "python cannot be started."
    assert "does not wait" in said[1] and "queue.json is not valid JSON" in said[2]
    assert "queue.json is not valid JSON" in queue.problem and queue.waiting == ()


def test_a_removed_run_goes_to_the_trash(qapp, runners, monkeypatch) -> None:
    trashed: list[str] = []
    monkeypatch.setattr("app.state.run_list.QFile.moveToTrash", lambda path: not trashed.append(path))
    queue = RunQueue()
    run = prepared("a")
    queue.add(run)
    queue.remove(run)
    assert trashed == [str(run.path)] and queue.waiting == ()


def test_a_run_that_has_begun_is_no_trash(session: Session, monkeypatch) -> None:
    monkeypatch.setattr("app.state.run_list.QFile.moveToTrash", lambda path: pytest.fail("a run was thrown away"))
    run = prepared("stopped")
    run.events.write_text('{"v": 1, "seq": 0, "t": 1.0, "kind": "stopped"}\n')
    session.starter.queue_existing(run)
    assert session.queue.waiting == (run,)
    assert session.messages.current and session.messages.current.sentence == "stopped waits in the queue."
    session.queue.remove(run)
    assert session.queue.waiting == () and run.events.exists()


def test_the_form_waits_as_a_run_and_its_settings_can_be_changed(session: Session, runners) -> None:
    session.draft.set("run_name", "first")
    session.draft.set("seed", 3)
    session.starter.queue()
    (run,) = session.queue.waiting
    assert run.name == "first" and "seed: 3" in run.config.read_text() and len(runners) == 1
    session.queue.edit(run)
    session.draft.set("seed", 4)
    session.starter.queue()
    assert "seed: 4" in run.config.read_text() and session.queue.edited is None
    assert session.queue.waiting == (run,), "it has kept its place, and there is no second"
    assert session.messages.current and session.messages.current.sentence == "first waits with these settings."


@pytest.mark.parametrize(("shown", "follows"), [("", True), ("live", True), ("archived", False)])
def test_the_next_run_is_shown_to_who_watched_the_one_before(session: Session, shown: str, follows: bool) -> None:
    """Nobody who reads an older run is taken away from it."""
    queue = session.queue
    queue.add(prepared("next"))
    if shown:
        session.open_run(prepared(shown).path)
    session.launched = RunFolder(places.runs_folder() / "live")
    lock = queue.file.hold_runner_lock()
    queue.file.start_next(lambda _: None)
    queue.refresh()
    assert session.run is not None
    assert (session.run.folder.name == "next") is follows
    assert session.is_training
    assert session.messages.current and session.messages.current.sentence == "next has left the queue and begins."
    os.close(lock)
    session.close_run()
