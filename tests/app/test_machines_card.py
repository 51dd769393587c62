"""The Machines card: one line for a run on one machine; else the list, edited and saved; its check never blocks."""

import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QWidget
from pytestqt.qtbot import QtBot

from app.pages.monitor.monitor_page import MonitorPage
from app.pages.monitor.steering import GROUPS, SteeringPanel
from app.pages.train.machines import ADDRESS, NAME, MachinesCard, free_memory
from app.state.consent import Consent
from app.state.draft import Draft
from app.state.machines import ALONE, Machines
from app.state.session import Session
from backend.config.config import dump, parse
from backend.config.setting import STEERABLE
from backend.distributed.hosts_file import read_hosts
from backend.distributed.machine_check import CheckedMachine, MachineFacts, MachineFinding, MachineReport
from backend.runs.events import EventLog
from backend.runs.run_folder import RunFolder, hold_lock
from backend.runs.steering import Change, read_request, write_changes
from backend.utils.errors import ConfigProblem, UserError
from tests.support.windows import ServiceByHand

BYTES = (64 * 10**9, 40 * 10**9, 45 * 10**9, 10**12)
VERSIONS = ("3.12", "0.1.0")
FACTS = MachineFacts("mac-a", "macOS 26.2", "Apple M4 Max", "gpu", *BYTES, *VERSIONS, mlx="0.32.4", model="d")
REPORT = MachineReport(
    "ring",
    [
        CheckedMachine(0, "127.0.0.1", "this machine", is_here=True, facts=FACTS),
        CheckedMachine(1, "mac-b", "mac-b", facts=replace(FACTS, model="")),
    ],
    [MachineFinding("warn", 1, "mac-b has no copy of the model.")],
)


@pytest.fixture
def service(qapp) -> ServiceByHand:
    return ServiceByHand()


@pytest.fixture
def consent(tmp_path: Path) -> Consent:
    """Of a user who allows every file."""
    consent = Consent(tmp_path / "trusted.json")
    consent.ask_hosts = lambda _: True
    return consent


@pytest.fixture
def machines(draft: Draft, service: ServiceByHand, consent: Consent) -> Machines:
    return Machines(draft, lambda: service, consent)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "two macs.json"
    rdma = [[None, "rdma_en2", "rdma_en3"], ["rdma_en2", None, "rdma_en4"], ["rdma_en3", "rdma_en4", None]]
    names = ("127.0.0.1", "mac-b", "mac-c")
    hosts = [{"ssh": name, "ips": [f"10.0.0.{rank + 1}"], "rdma": rdma[rank]} for rank, name in enumerate(names)]
    path.write_text(json.dumps({"backend": "ring", "envs": ["MLX_A=b"], "hosts": hosts}))
    return path


def test_edit_and_save(draft: Draft, machines: Machines, file: Path):
    assert (machines.summary(), machines.hosts) == (ALONE, ())
    draft.set("hosts", str(file))
    assert machines.summary() == "3 ranks: this machine, mac-b and mac-c" and not machines.is_edited
    machines.change(1, ssh="studio")
    machines.change(2, ips=("10.0.0.9", "10.0.1.9"))
    assert machines.is_edited and machines.can_save and not machines.command()
    machines.save(file)
    saved = read_hosts(file)
    assert [host.ssh for host in saved.hosts] == ["127.0.0.1", "studio", "mac-c"]
    assert saved.hosts[2].ips == ("10.0.0.9", "10.0.1.9") and (saved.backend, saved.envs) == ("ring", ("MLX_A=b",))
    assert (
        not machines.is_edited
        and "--hostfile" in machines.command()
        and {"--backend", "ring"} < set(machines.command())
    )
    machines.remove(1)
    assert [host.rdma for host in machines.hosts] == [(None, "rdma_en3"), ("rdma_en3", None)]
    machines.add()
    assert [host.rdma for host in machines.hosts] == [(), (), ()]
    assert not machines.can_save  # the new one has no name yet
    machines.load()
    assert len(machines.hosts) == 3 and not machines.is_edited


def test_check(draft: Draft, machines: Machines, service: ServiceByHand, file: Path):
    draft.set("hosts", str(file))
    draft.set("model", "owner/name")
    machines.check()
    machines.check()  # one at a time
    (asked,) = service.asked
    told = asked.arguments
    assert asked.name == "check_machines" and told["model"] == "owner/name"
    assert (told["copies"], told["name"]) == (False, "two macs.json")
    assert told["hosts"]["hosts"][1]["ssh"] == "mac-b"
    service.asked[-1].report({"rank": 1, "stage": "copying", "share": 0.42})
    assert str(machines.stages[1]) == "Copying 42 %" and machines.is_checking
    service.asked[-1].answer(json.loads(json.dumps(asdict(REPORT))))
    assert (
        machines.report == REPORT and machines.report.without_model and not machines.is_checking and not machines.stages
    )
    machines.check(copies=True)
    assert machines.report == REPORT  # shown while the copy goes on
    machines.stop()
    assert service.cancelled == [2] and service.asked[1].arguments["copies"] and not machines.is_checking
    machines.check()
    assert machines.report is None
    service.asked[-1].refuse([ConfigProblem("hosts", "Something is wrong.")])
    assert machines.problem == "Something is wrong."
    machines.check()
    service.asked[-1].answer(asdict(REPORT))
    machines.change(1, ssh="other")
    assert machines.report is None  # it was about another machine
    machines.check()
    draft.set("hosts", "")
    assert service.cancelled == [2, 5]


def test_card(qtbot: QtBot, session: Session, file: Path, service: ServiceByHand):
    session.consent.ask_hosts = lambda _: True
    session.service = service  # pyright: ignore[reportAttributeAccessIssue]
    page = QWidget()
    panel = MachinesCard(session, page)
    panel.setParent(None)
    qtbot.show(panel)
    assert panel.summary.text() == ALONE and not panel.table.isVisible()
    session.draft.set("hosts", str(file))
    assert panel.table.isVisible() and panel.check.isEnabled()
    model = panel.model
    texts = [model.index(1, column).data() for column in range(model.columnCount())]
    assert texts[:4] == ["1", "mac-b", "10.0.0.2", "–"]
    assert not model.flags(model.index(0, NAME)) & Qt.ItemFlag.ItemIsEditable
    assert model.setData(model.index(1, ADDRESS), "10.0.0.7")
    assert session.machines.hosts[1].ips == ("10.0.0.7",) and panel.save.isEnabled()
    panel.table.selectRow(2)
    panel.remove.click()
    panel.check.click()
    assert panel.stop.isVisible() and not panel.check.isVisible()
    service.asked[-1].answer(asdict(REPORT))
    texts = [model.index(1, column).data() for column in range(model.columnCount())]
    assert texts[3:] == ["Answered", "Apple M4 Max", "40.0 of 64.0\u00a0GB", "1000\u00a0GB", "No"]
    assert free_memory(replace(FACTS, memory_free=640 * 10**6)) == "640\u00a0MB of 64.0\u00a0GB"
    shown = [child.text() for child in panel.findChildren(type(panel.summary))]
    assert "Warning: mac-b has no copy of the model." in shown
    assert panel.copy_model.isVisible() and not panel.copy_command.isVisible()
    panel.save.click()
    panel.copy_command.click()
    assert QGuiApplication.clipboard().text() == shlex.join(session.machines.command()) != ""


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
def monitor(qtbot, session: Session, live: LiveRun) -> MonitorPage:
    page = MonitorPage(session)
    qtbot.addWidget(page)
    session.open_run(live.folder.path)
    qtbot.waitUntil(lambda: session.run.state == "running")
    page.change_settings()
    return page


def type_into(panel: SteeringPanel, key: str, text: str) -> None:
    control: Any = panel.fields[key].control
    control.setFocus()
    control.selectAll()
    QTest.keyClicks(control, text)


def test_offered_settings(monitor: MonitorPage) -> None:
    panel = monitor.steering
    assert sorted(key for keys in GROUPS.values() for key in keys) == sorted(STEERABLE)
    assert panel.fields["iters"].value() == 100 and panel.fields["beta"].value() == 0.1
    assert panel.fields["lr_final"].isHidden(), "the rate is constant"
    assert not panel.apply_button.isEnabled() and not panel.revert_button.isEnabled()


def test_a_fault_is_beside_its_field_and_nothing_is_asked(monitor: MonitorPage, live: LiveRun) -> None:
    panel = monitor.steering
    type_into(panel, "temperature", "0")
    type_into(panel, "iters", "7")
    problem = panel.fields["temperature"]._problem
    assert problem is not None and problem.text() == "Temp must be above 0, not 0."
    assert not panel.apply_button.isEnabled()
    type_into(panel, "temperature", "0.9")
    shortened = panel.fields["iters"]._problem
    assert shortened is not None and "at least 12, which are done" in shortened.text()
    controls: list[Any] = [panel.fields[key].control for key in ("iters", "learning_rate")]
    QApplication.processEvents()
    assert len({control.mapTo(panel, QPoint()).y() for control in controls}) == 1, "the row stays in line"
    QTest.mouseClick(panel.revert_button, Qt.MouseButton.LeftButton)
    assert panel.fields["iters"].value() == 100 and not panel.apply_button.isEnabled() and live.asked() == {}


def test_a_change_is_asked_for_answered_listed_and_undone(qtbot, monitor: MonitorPage, live: LiveRun) -> None:
    panel = monitor.steering
    type_into(panel, "learning_rate", "5e-6")
    type_into(panel, "beta", "0.1")  # as it is
    assert panel.apply_button.isEnabled() and panel.apply_button.text() == "Apply"
    QTest.keyClick(panel.apply_button, Qt.Key.Key_Space)
    assert live.asked() == {"learning_rate": "5e-6"}
    change = Change(14, {"learning_rate": (1e-5, 5e-6)})
    live.take(change)
    qtbot.waitUntil(lambda: "From step 14 on: Learning Rate 1e-05 → 5e-06." in panel.answer.text())
    assert float(panel.fields["learning_rate"].value()) == 5e-6 and not panel.apply_button.isEnabled()
    children = panel.findChildren(QWidget)
    undo = next(child for child in children if child.accessibleName().startswith("Undo: From step 14"))
    QTest.mouseClick(undo, Qt.MouseButton.LeftButton)
    assert live.asked() == {"learning_rate": 1e-5}


def test_the_panel_opens_at_the_conditions_and_closes_with_the_run(qtbot, monitor: MonitorPage, live: LiveRun) -> None:
    panel = monitor.steering
    monitor.stop_when()
    type_into(panel, "stop_when", "rewrd > 1")
    problem = panel.fields["stop_when"]._problem
    assert problem is not None and "Did you mean reward?" in problem.text()
    live.event_log.write("finished", step=12, sentence="Done.")
    os.close(live.lock)
    qtbot.waitUntil(lambda: not panel.isVisible())
    live.lock = os.open(os.devnull, os.O_RDONLY)
    with pytest.raises(UserError, match="while a run is training or paused"):
        monitor.session.run.change({"beta": 0.2})
