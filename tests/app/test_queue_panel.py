"""The panel of waiting runs: what it shows, and what keys, buttons and dragging ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import QModelIndex, Qt

from app.pages.runs.queue_panel import QueuePanel, QueueRow, SessionQueue
from app.state.prefs import Prefs
from app.state.session import Session
from backend.runs.run_folder import RunFolder
from backend.utils import places

ROWS = [QueueRow(Path("/runs") / name, "owner/model", 300) for name in ("a", "b", "c")]


@pytest.fixture
def panel(qtbot) -> QueuePanel:
    panel = QueuePanel()
    qtbot.addWidget(panel)
    panel.show_queue(ROWS, "The first begins now.")
    panel.show()
    return panel


def asked(panel: QueuePanel) -> list[tuple]:
    """Everything that the panel asks for from now on."""
    said: list[tuple] = []
    panel.moved.connect(lambda path, place: said.append(("move", path.name, place)))
    panel.removed.connect(lambda path: said.append(("remove", path.name)))
    panel.edit_requested.connect(lambda path: said.append(("edit", path.name)))
    panel.pause_requested.connect(lambda paused: said.append(("pause", paused)))
    panel.pause_after_failure_requested.connect(lambda pauses: said.append(("after failure", pauses)))
    return said


def test_settings_of_a_run_that_has_begun_stand(panel: QueuePanel, qtbot) -> None:
    panel.show_queue([QueueRow(Path("/runs/stopped"), "owner/model", 300, has_begun=True)], "")
    said = asked(panel)
    panel.table.selectRow(0)
    qtbot.keyClick(panel.table, Qt.Key.Key_Return)
    assert not panel.edit_button.isEnabled() and said == []
    assert panel.remove_button.isEnabled() and "stays" in panel.remove_button.toolTip()
    assert panel.model.index(0, 3).data() == "to step 300"


def test_keys_and_buttons_act_on_the_selected_run(panel: QueuePanel, qtbot) -> None:
    said, table, alt = asked(panel), panel.table, Qt.KeyboardModifier.AltModifier
    assert not panel.remove_button.isEnabled()
    table.selectRow(1)
    table.setFocus()
    panel.activateWindow()
    for key, modifier in (
        (Qt.Key.Key_Up, alt),
        (Qt.Key.Key_Down, alt),
        (Qt.Key.Key_Home, alt),
        (Qt.Key.Key_Return, Qt.KeyboardModifier.NoModifier),
        (Qt.Key.Key_Delete, Qt.KeyboardModifier.NoModifier),
    ):
        qtbot.keyClick(table, key, modifier)
    panel.next_button.click()
    panel.edit_button.click()
    panel.remove_button.click()
    once = [("move", "b", 0), ("edit", "b"), ("remove", "b")]
    assert said == [("move", "b", 0), ("move", "b", 2), *once, *once]
    table.selectRow(0)
    assert not panel.next_button.isEnabled()
    qtbot.keyClick(table, Qt.Key.Key_Up, alt)
    assert len(said) == 8, "the first has no place before it"


@pytest.mark.parametrize(("origin", "gap", "place"), [(0, 2, 1), (0, 3, 2), (2, 0, 0), (1, -1, 2)])
def test_dragging_moves_a_run_into_a_gap(panel: QueuePanel, origin: int, gap: int, place: int) -> None:
    """Qt counts gaps between rows; below the last row it says −1."""
    said, model = asked(panel), panel.model
    data = model.mimeData([model.index(origin, column) for column in range(4)])
    removed = model.dropMimeData(data, Qt.DropAction.MoveAction, gap, 0, QModelIndex())
    assert said == [("move", "abc"[origin], place)] and removed is False
    data = model.mimeData([model.index(1, 0)])
    model.dropMimeData(data, Qt.DropAction.MoveAction, 2, 0, QModelIndex())
    assert len(said) == 1, "a drop where it was moves nothing"


def test_the_selection_stays_on_its_run_and_an_empty_queue_hides(panel: QueuePanel) -> None:
    panel.table.selectRow(0)
    panel.show_queue([ROWS[1], ROWS[2], ROWS[0]], "", is_paused=True, pauses_after_failure=True)
    assert panel.selected() == ROWS[0] and panel.table.selected_rows() == [2]
    said = asked(panel)
    assert panel.pause.text() == "Resume" and panel.after_failure.isChecked()
    panel.pause.click()
    panel.after_failure.click()
    assert said == [("pause", False), ("after failure", False)]
    panel.show_queue([], "")
    assert panel.isHidden()
    panel.show_queue([], "The queue cannot be read.")
    assert not panel.isHidden() and panel.table.isHidden()


def test_the_page_shows_the_queue_and_changes_it(tmp_path: Path, qtbot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.state.run_list.start_detached", lambda *_: None)
    session = Session(Prefs(tmp_path / "prefs"))
    for name in "ab":
        run = RunFolder(places.runs_folder() / name)
        run.path.mkdir(parents=True)
        run.config.write_text("model: owner/model\niters: 7\n")
        session.queue.add(run)
    panel = SessionQueue(session)
    qtbot.addWidget(panel)
    assert [(row.path.name, row.model, row.steps) for row in panel.model.rows] == [
        ("a", "owner/model", 7),
        ("b", "owner/model", 7),
    ]
    panel.table.selectRow(1)
    panel.next_button.click()
    assert [row.path.name for row in panel.model.rows] == ["b", "a"]
    panel.pause.click()
    assert session.queue.now.is_paused and panel.status.text() == "Paused: no other run is started."
    panel.after_failure.click()
    assert session.queue.now.pauses_after_failure
    wanted: list[RunFolder] = []
    session.waiting_settings_requested.connect(wanted.append)
    panel.edit_button.click()
    assert [run.name for run in wanted] == ["b"]
    session.queue.file.path.write_text("{")
    session.queue.refresh()
    assert "queue.json" in panel.status.text()
