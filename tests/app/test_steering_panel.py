"""Settings of a live run, changed from the window."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QWidget

from app.pages.monitor.steering import GROUPS, RunSteering, SteeringPanel
from app.state.run import Run
from app.state.session import Session
from backend.config.changeable import STEERABLE
from backend.config.config import dump, parse
from backend.runs.events import EventLog
from backend.runs.run_folder import RunFolder, hold_lock
from backend.runs.steering import Change, read_request, write_changes
from backend.utils.errors import UserError

SETTINGS = parse({"model": "m", "data": "d", "iters": 100, "reward_functions": ["r1_int", "r1_count_xml"]})


class LiveRun:
    """A run folder as a trainer at step 12 has it; the test writes what the trainer would."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.folder = RunFolder(path)
        self.folder.config.write_text(dump(SETTINGS))
        self.lock = hold_lock(self.folder)
        self.event_log = EventLog(self.folder.events)
        self.event_log.write("started", iterations=100)
        for step in range(1, 13):
            self.event_log.write("step", step=step, metrics={"reward": 0.5})

    def asked(self) -> dict[str, Any]:
        return read_request(self.folder.change_request)

    def take(self, *changes: Change) -> None:
        write_changes(self.folder, changes)
        self.folder.change_request.unlink()
        self.event_log.write("note", level="info", sentence=changes[-1].sentence, answers="change")


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveRun]:
    run = LiveRun(tmp_path / "mine")
    yield run
    run.event_log.close()
    os.close(run.lock)


@pytest.fixture
def steering(qtbot, qapp, live: LiveRun) -> Iterator[RunSteering]:
    session, parent = Session(), QWidget()
    qtbot.addWidget(parent)
    steered = RunSteering(session, parent)
    session.open_run(live.folder.path)
    qtbot.waitUntil(lambda: run_of(session).state == "running")
    steered.open()
    yield steered
    session.close_run()


def run_of(session: Session) -> Run:
    assert session.run is not None
    return session.run


def panel_of(steering: RunSteering) -> SteeringPanel:
    assert steering.panel is not None
    return steering.panel


def type_into(panel: SteeringPanel, key: str, text: str) -> None:
    control: Any = panel.fields[key].control
    control.setFocus()
    control.selectAll()
    QTest.keyClicks(control, text)


def shown_texts(panel: SteeringPanel) -> str:
    return f"{panel.answer.text()} {panel.problem.text()}"


def test_offered_settings(steering: RunSteering) -> None:
    panel = panel_of(steering)
    assert sorted(key for keys in GROUPS.values() for key in keys) == sorted(STEERABLE)
    assert panel.fields["iters"].value() == 100 and panel.fields["beta"].value() == 0.1
    assert panel.fields["lr_final"].isHidden(), "the rate is constant"
    assert not panel.apply_button.isEnabled() and not panel.revert_button.isEnabled()


def test_a_fault_is_beside_its_field_and_nothing_is_asked(steering: RunSteering, live: LiveRun) -> None:
    panel = panel_of(steering)
    type_into(panel, "temperature", "0")
    type_into(panel, "iters", "7")
    problem = panel.fields["temperature"]._problem
    assert problem is not None and problem.text() == "Temp must be above 0, not 0."
    assert not panel.apply_button.isEnabled()
    type_into(panel, "temperature", "0.9")
    shortened = panel.fields["iters"]._problem
    assert shortened is not None and "at least 12, which are done" in shortened.text()
    QTest.mouseClick(panel.revert_button, Qt.MouseButton.LeftButton)
    assert panel.fields["iters"].value() == 100 and not panel.apply_button.isEnabled() and live.asked() == {}


def test_a_change_is_asked_for_answered_listed_and_undone(qtbot, steering: RunSteering, live: LiveRun) -> None:
    panel = panel_of(steering)
    type_into(panel, "learning_rate", "5e-6")
    type_into(panel, "beta", "0.1")  # as it is
    assert panel.apply_button.isEnabled() and panel.apply_button.text() == "Apply"
    QTest.keyClick(panel.apply_button, Qt.Key.Key_Space)
    assert live.asked() == {"learning_rate": "5e-6"}
    change = Change(14, {"learning_rate": (1e-5, 5e-6)})
    live.take(change)
    qtbot.waitUntil(lambda: "From step 14 on: Learning Rate 1e-05 → 5e-06." in shown_texts(panel))
    assert float(panel.fields["learning_rate"].value()) == 5e-6 and not panel.apply_button.isEnabled()
    children = panel.findChildren(QWidget)
    undo = next(child for child in children if child.accessibleName().startswith("Undo: From step 14"))
    QTest.mouseClick(undo, Qt.MouseButton.LeftButton)
    assert live.asked() == {"learning_rate": 1e-5}


def test_the_panel_opens_at_the_conditions_and_closes_with_the_run(qtbot, steering: RunSteering, live: LiveRun) -> None:
    panel = panel_of(steering)
    steering.open("stop_when")
    type_into(panel, "stop_when", "rewrd > 1")
    problem = panel.fields["stop_when"]._problem
    assert problem is not None and "Did you mean reward?" in problem.text()
    live.event_log.write("finished", step=12, sentence="Done.")
    os.close(live.lock)
    qtbot.waitUntil(lambda: not panel.isVisible())
    live.lock = os.open(os.devnull, os.O_RDONLY)
    with pytest.raises(UserError, match="while a run is training or paused"):
        run_of(steering._session).change({"beta": 0.2})
