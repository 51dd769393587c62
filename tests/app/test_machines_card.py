"""The Machines card: one line while a run has one machine; else the list, which is edited and saved, and its check,
which never blocks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QWidget
from pytestqt.qtbot import QtBot

from app.pages.train.machines import ADDRESS, COLUMNS, NAME, MachinesPart, free_memory
from app.state.consent import Consent
from app.state.draft import Draft
from app.state.machines import ALONE, Machines
from app.state.session import Session
from backend.distributed.hosts_file import read_hosts
from backend.distributed.machine_report import CheckedMachine, LinkSpeed, MachineFacts, MachineFinding, MachineReport
from backend.utils.errors import ConfigProblem
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
    LinkSpeed(0.001, 1e8),
    [MachineFinding("warn", 1, "mac-b has no copy of the model.")],
)


@pytest.fixture
def service(qapp) -> ServiceByHand:
    return ServiceByHand()


@pytest.fixture
def draft(qtbot: QtBot) -> Draft:
    return Draft()


@pytest.fixture
def consent(tmp_path: Path) -> Consent:
    """Of a user who allows every file."""
    return Consent(tmp_path / "trusted.json", ask_hosts=lambda _: True)


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
    machines.rename(1, " studio ")
    machines.move_to(2, "10.0.0.9, 10.0.1.9")
    assert machines.is_edited and machines.can_save and machines.command() == ""
    machines.save(file)
    saved = read_hosts(file)
    assert [host.ssh for host in saved.hosts] == ["127.0.0.1", "studio", "mac-c"]
    assert saved.hosts[2].ips == ("10.0.0.9", "10.0.1.9") and (saved.backend, saved.envs) == ("ring", ("MLX_A=b",))
    assert not machines.is_edited and "--hostfile" in machines.command() and "--backend ring" in machines.command()
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
    service.asked[-1].answer(json.loads(json.dumps(REPORT.to_dict())))
    assert machines.report == REPORT and machines.can_copy and not machines.is_checking and not machines.stages
    machines.check(copies=True)
    assert machines.report == REPORT  # shown while the copy goes on
    machines.stop()
    assert service.cancelled == [2] and service.asked[1].arguments["copies"] and not machines.is_checking
    machines.check()
    assert machines.report is None
    service.asked[-1].refuse([ConfigProblem("hosts", "Something is wrong.")])
    assert machines.problem == "Something is wrong."
    machines.check()
    service.asked[-1].answer(REPORT.to_dict())
    machines.rename(1, "other")
    assert machines.report is None  # it was about another machine
    machines.check()
    draft.set("hosts", "")
    assert service.cancelled == [2, 5]


def test_card(qtbot: QtBot, file: Path, service: ServiceByHand, monkeypatch):
    session = Session()
    session.consent.ask_hosts = lambda _: True
    session.service = service  # pyright: ignore[reportAttributeAccessIssue]
    page = QWidget()
    part = panel = MachinesPart(session, page)
    part.card.setParent(None)
    qtbot.show(part.card)
    assert panel.summary.text() == ALONE and not panel.table.isVisible()
    session.draft.set("hosts", str(file))
    assert panel.table.isVisible() and panel.check.isEnabled()
    model = panel.model
    texts = [model.index(1, column).data() for column in range(len(COLUMNS))]
    assert texts[:4] == ["1", "mac-b", "10.0.0.2", "–"]
    assert not model.flags(model.index(0, NAME)) & Qt.ItemFlag.ItemIsEditable
    assert model.setData(model.index(1, ADDRESS), "10.0.0.7")
    assert session.machines.hosts[1].ips == ("10.0.0.7",) and panel.save.isEnabled()
    panel.table.selectRow(2)
    panel.remove.click()
    panel.check.click()
    assert panel.stop.isVisible() and not panel.check.isVisible()
    service.asked[-1].answer(REPORT.to_dict())
    texts = [model.index(1, column).data() for column in range(len(COLUMNS))]
    assert texts[3:] == ["Answered", "Apple M4 Max", "40.0 of 64.0\u00a0GB", "1000\u00a0GB", "No"]
    assert free_memory(replace(FACTS, memory_free=640 * 10**6)) == "640\u00a0MB of 64.0\u00a0GB"
    shown = [child.text() for child in panel.card.findChildren(type(panel.summary))]
    assert "Warning: mac-b has no copy of the model." in shown and any("A sum of one number" in text for text in shown)
    assert panel.copy_model.isVisible() and not panel.copy_command.isVisible()
    panel.save.click()
    panel.copy_command.click()
    assert QGuiApplication.clipboard().text() == session.machines.command() != ""
