"""The panel of waiting runs: what it shows, and what keys, buttons and dragging do."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import QModelIndex, Qt

from app.pages.runs.queue_panel import QueuePanel
from app.state.prefs import Prefs
from app.state.session import Session
from backend.runs.run_folder import RunFolder
from backend.utils import places


@pytest.fixture
def panel(tmp_path: Path, qtbot, monkeypatch) -> QueuePanel:
    monkeypatch.setattr("app.state.run_list.start_detached", lambda *_: None)
    session = Session(Prefs(tmp_path / "prefs"))
    for name in "abc":
        run = RunFolder(places.runs_folder() / name)
        run.path.mkdir(parents=True)
        run.config.write_text("model: owner/model\niters: 300\n")
        session.queue.add(run)
    panel = qtbot.show(QueuePanel(session))
    return panel


def names(panel: QueuePanel) -> str:
    return "".join(row.run.name for row in panel.model.rows)


def test_settings_of_a_run_that_has_begun_stand(panel: QueuePanel, qtbot) -> None:
    run = panel.model.rows[0].run
    run.events.write_text('{"v": 1, "seq": 0, "t": 1.0, "kind": "stopped"}\n')
    panel.refresh()
    panel.table.selectRow(0)
    panel._session.waiting_settings_requested.connect(lambda _: pytest.fail("edited"))
    qtbot.keyClick(panel.table, Qt.Key.Key_Return)
    assert not panel.edit_button.isEnabled() and "stays" in panel.remove_button.toolTip()
    assert [panel.model.index(0, column).data() for column in range(4)] == ["1", "a", "owner/model", "to step 300"]


def test_keys_and_buttons_act_on_the_selected_run(panel: QueuePanel, qtbot) -> None:
    edited, table, alt = list[str](), panel.table, Qt.KeyboardModifier.AltModifier
    panel._session.waiting_settings_requested.connect(lambda run: edited.append(run.name))
    assert not panel.remove_button.isEnabled()
    table.selectRow(1)
    table.setFocus()
    panel.activateWindow()
    for key, order in (
        (Qt.Key.Key_Up, "bac"),
        (Qt.Key.Key_Up, "bac"),
        (Qt.Key.Key_Down, "abc"),
        (Qt.Key.Key_Home, "bac"),
    ):
        qtbot.keyClick(table, key, alt)
        assert names(panel) == order and panel.selected().run.name == "b"
    assert not panel.next_button.isEnabled()
    qtbot.keyClick(table, Qt.Key.Key_Return)
    panel.edit_button.click()
    assert edited == ["b", "b"]
    qtbot.keyClick(table, Qt.Key.Key_Delete)
    assert names(panel) == "ac"
    table.selectRow(1)
    panel.next_button.click()
    assert names(panel) == "ca"
    panel.remove_button.click()
    assert names(panel) == "a"


@pytest.mark.parametrize(
    ("origin", "gap", "order"), [(0, 2, "bac"), (0, 3, "bca"), (2, 0, "cab"), (1, -1, "acb"), (1, 2, "abc")]
)
def test_dragging_moves_a_run_into_a_gap(panel: QueuePanel, origin: int, gap: int, order: str) -> None:
    """Qt counts gaps between rows; below the last row it says −1."""
    model = panel.model
    data = model.mimeData([model.index(origin, column) for column in range(4)])
    assert model.dropMimeData(data, Qt.DropAction.MoveAction, gap, 0, QModelIndex()) is False
    assert names(panel) == order


def test_the_queue_pauses_and_an_empty_one_hides(panel: QueuePanel) -> None:
    queue = panel._session.queue
    panel.pause.click()
    assert queue.now.is_paused and panel.status.text() == "Paused: no other run is started."
    panel.after_failure.click()
    assert queue.now.pauses_after_failure and panel.pause.text() == "Resume" and panel.after_failure.isChecked()
    queue.file.path.unlink()
    queue.refresh()
    assert panel.isHidden()
    queue.file.path.write_text("{")
    queue.refresh()
    assert "queue.json" in panel.status.text() and not panel.isHidden() and panel.table.isHidden()
