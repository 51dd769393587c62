"""The queue in the window: what waits, who runs it, the run that it starts, and its panel."""

import os

import pytest
from PySide6.QtCore import Qt

from app.pages.monitor.monitor_page import MonitorPage
from app.pages.runs.runs_page import QueuePanel, RunsPage
from app.state.run_list import RunQueue
from app.state.session import Session
from backend.runs.run_folder import RunFolder
from backend.runs.run_names import name_of, new_label
from backend.runs.run_record import Parent, change_notes, write_parent
from backend.utils import places
from backend.utils.errors import UserError
from tests.runs.test_queue import prepared


@pytest.fixture
def runners(monkeypatch) -> list[list[str]]:
    """Stands in for the runners that are started."""
    started: list[list[str]] = []
    monkeypatch.setattr("app.state.run_list.start_detached", lambda command, *_: started.append(command))
    return started


@pytest.fixture
def session(session: Session, runners) -> Session:
    session.restore()
    return session


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
    trashed: list[RunFolder] = []
    monkeypatch.setattr("app.state.run_list.move_to_trash", trashed.append)
    queue = RunQueue()
    run = prepared("a")
    queue.add(run)
    queue.remove(run)
    assert trashed == [run] and queue.waiting == ()


def test_a_run_that_has_begun_is_no_trash(session: Session, monkeypatch) -> None:
    monkeypatch.setattr("app.state.run_list.move_to_trash", lambda run: pytest.fail("a run was thrown away"))
    run = prepared("stopped")
    run.events.write_text('{"v": 1, "seq": 0, "t": 1.0, "kind": "stopped"}\n')
    session.starter.queue_existing(run)
    assert session.queue.waiting == (run,)
    assert session.messages.current and session.messages.current.sentence == "stopped waits in the queue."
    session.queue.remove(run)
    assert session.queue.waiting == () and run.events.exists()


def test_the_form_waits_as_a_run(session: Session, runners) -> None:
    session.draft.set("run_name", "first")
    session.draft.set("seed", 3)
    session.starter.queue()
    (run,) = session.queue.waiting
    assert run.name == "first" and "seed: 3" in run.config.read_text() and len(runners) == 1
    assert session.messages.current and session.messages.current.sentence == "first waits in the queue."


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
    assert (session.run.folder.name == "next") is follows
    assert session.is_training
    assert session.messages.current and session.messages.current.sentence == "next has left the queue and begins."
    os.close(lock)


@pytest.fixture
def panel(session: Session, qtbot) -> QueuePanel:
    for name in "abc":
        run = RunFolder(places.runs_folder() / name)
        run.path.mkdir(parents=True)
        run.config.write_text("model: owner/model\niters: 300\n")
        session.queue.add(run)
    return qtbot.show(QueuePanel(session))


def names(panel: QueuePanel) -> str:
    return "".join(row.run.name for row in panel.model.rows)


def test_the_panel_of_a_filled_queue_is_never_a_window(session: Session, qtbot, monkeypatch) -> None:
    session.queue.add(prepared("a"))
    windows: list[bool] = []
    monkeypatch.setattr(QueuePanel, "showEvent", lambda panel, _: windows.append(panel.isWindow()))
    qtbot.show(RunsPage(session))
    assert windows and not any(windows)


def test_charts_of_a_waiting_run_wait(session: Session, qtbot) -> None:
    page = qtbot.show(MonitorPage(session), 1100, 760)
    session.queue.add(prepared("a"))
    session.open_run(places.runs_folder() / "a")
    qtbot.waitUntil(lambda: session.run is not None and session.run.state == "queued")
    page.grid.draw(page.grid.plots[0])
    assert page.grid.plots[0].waiting.text() == "Waits for the first step."


def test_a_run_that_has_begun_stays_when_it_is_removed(panel: QueuePanel) -> None:
    run = panel.model.rows[0].run
    run.events.write_text('{"v": 1, "seq": 0, "t": 1.0, "kind": "stopped"}\n')
    panel.refresh()
    panel.table.selectRow(0)
    assert "stays" in panel.remove_button.toolTip()
    assert [panel.model.index(0, column).data() for column in range(4)] == ["1", "a", "owner/model", "to step 300"]


def test_keys_and_buttons_act_on_the_selected_run(panel: QueuePanel, qtbot) -> None:
    table, alt = panel.table, Qt.KeyboardModifier.AltModifier
    assert not panel.remove_button.isEnabled()
    table.selectRow(1)
    table.setFocus()
    panel.activateWindow()
    up, down, home = Qt.Key.Key_Up, Qt.Key.Key_Down, Qt.Key.Key_Home
    for key, order in ((up, "bac"), (up, "bac"), (down, "abc"), (home, "bac")):
        qtbot.keyClick(table, key, alt)
        assert names(panel) == order and panel.table.selected_row.run.name == "b"
    assert not panel.next_button.isEnabled()
    qtbot.keyClick(table, Qt.Key.Key_Delete)
    assert names(panel) == "ac"
    table.selectRow(1)
    panel.next_button.click()
    assert names(panel) == "ca"
    panel.remove_button.click()
    assert names(panel) == "a"


def test_the_queue_pauses_and_an_empty_one_hides(panel: QueuePanel) -> None:
    queue = panel._session.queue
    panel.pause.click()
    assert queue.now.is_paused and panel.status.text() == "Paused: no other run is started."
    panel.after_failure.click()
    assert queue.now.pauses_after_failure and panel.pause.text() == "Resume" and panel.after_failure.isChecked()
    panel.pause.click()
    queue._launched_until = 0.0
    panel.refresh()
    assert panel.status.text() == "No process starts them." and panel.pause.text() == "Start"
    panel.pause.click()
    assert queue.is_active and panel.pause.text() == "Pause" and panel.status.text().startswith("The first starts as")
    queue.file.path.unlink()
    queue.refresh()
    assert panel.isHidden()
    queue.file.path.write_text("{")
    queue.refresh()
    assert "queue.json" in panel.status.text() and not panel.isHidden() and panel.table.isHidden()


def test_runs_are_named_by_what_differs(session: Session) -> None:
    """From the run before over the same data; a name of the user wins, on every page."""
    session.queue.set_paused(True)
    session.starter.queue()
    (elsewhere := RunFolder(places.runs_folder() / "elsewhere")).path.mkdir()
    elsewhere.config.write_text("model: a\ndata: elsewhere\nrank: 4\n")
    for key, value in (("learning_rate", 3e-4), ("beta", 0.0), ("beta", 0.0), ("run_name", "mine")):
        session.draft.set(key, value)
        session.starter.queue()
    panel = QueuePanel(session)
    shown = [panel.model.index(row, 1).data() for row in range(5)]
    assert shown[1:] == ["demo · lr 3e-4", "demo · KL 0", "demo · KL 0 (2)", "mine"]
    assert shown[0] == "demo · lr 1e-4 · KL 0.02", "of the first one, what differs from the defaults"
    first = session.queue.waiting[0]
    assert first.name.startswith("demo-full-grpo-20") and first.path.is_dir(), "its folder keeps its name"
    change_notes(first, title="Baseline")
    session.open_run(first.path)
    page = MonitorPage(session)
    page.show()
    assert page.header.switcher.text() == "Baseline"
    change_notes(first, title="")
    assert name_of(first) == "demo · lr 1e-4 · KL 0.02"
    (clone := RunFolder(places.runs_folder() / "sums-from-20")).path.mkdir()
    clone.config.write_text("model: a\n")
    write_parent(clone, Parent("sums", first.path, 20, True, {"learning_rate": (1e-4, 3e-4)}))
    assert name_of(clone) == "sums · lr 3e-4 · from step 20"
    other = RunFolder(places.runs_folder() / "m-full-sft-2026-01-02-030405")
    other.path.mkdir()
    other.config.write_text("model: a\ndata: chats.jsonl\ntrain_mode: sft\ntrain_type: full\nbeta: 0.3\n")
    assert name_of(other) == "chats · full", "not by what its mode has no use for"
    other.config.write_text("model: a\ndata: chats.jsonl\ntrain_mode: sft\niters: 20\nbeta: 0.2\n")
    (newer := RunFolder(places.runs_folder() / "m-lora-sft-2026-01-02-030406")).path.mkdir()
    newer.config.write_text("model: a\ndata: chats.jsonl\ntrain_mode: sft\niters: 40\nbeta: 0.1\n")
    assert new_label(newer) == "chats · 40 steps"
    both = "model: a\ndata: chats.jsonl\nreward_functions: [r1_accuracy_reward_func, {}]\n"
    newer.config.write_text(both.format("r1_count_xml"))
    other.config.write_text("model: a\ndata: chats.jsonl\ntrain_mode: sft\niters: 20\nbest_is_lowest: true\n")
    assert new_label(other).startswith("chats · sft · ") and "lower" not in new_label(other)
    other.config.write_text(both.format("r1_int_reward_func"))
    assert new_label(other) == "chats · +Integer Answer, −XML C…", "it was “r1_accuracy_reward_func…” of all"
